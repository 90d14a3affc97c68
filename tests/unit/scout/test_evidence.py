"""What the end of a worker says about its cause."""

import signal

import pytest

from lmres.scout.evidence import (
    WEIGHT_ORDER,
    classify_exception,
    classify_exit,
    killed_loader,
    may_be_out_of_memory,
)

CONSEQUENCES = [
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ("torch.distributed.DistNetworkError", "The client socket has timed out after 60000ms"),
    ("torch.distributed.DistStoreError", "wait timeout after 300000ms"),
    (
        "RuntimeError",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.4]:51200",
    ),
    ("RuntimeError", "[enforce fail at gloo/transport/tcp/pair.cc:598] . Read error [10.0.0.4]:5: Connection reset"),
    ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete"),
    ("torch.distributed.DistBackendError", "NCCL error, remote process exited or there was a network error"),
    ("torch.distributed.DistBackendError", "ncclRemoteError: A call failed possibly due to a network error"),
]  # fmt: skip


@pytest.mark.parametrize(("type_name", "message"), CONSEQUENCES, ids=lambda v: v[:40])
def test_a_broken_connection_is_a_consequence(type_name: str, message: str) -> None:
    finding = classify_exception(type_name=type_name, message=message)
    assert finding.weight == "secondary"
    assert finding.failure_class == "unknown"


CAUSES = [
    ("ValueError", "loss is nan", "user_exception"),
    ("ValueError", "the user wrote connection closed by peer", "user_exception"),
    ("KeyError", "'broken pipe'", "user_exception"),
    ("RuntimeError", "shape '[3, 4]' is invalid for input of size 11", "user_exception"),
    ("MemoryError", "", "out_of_memory"),
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", "out_of_memory"),
    ("torch.cuda.OutOfMemoryError", "CUDA out of memory", "out_of_memory"),
    ("RuntimeError", "CUDA error: an illegal memory access was encountered", "process_crash"),
    ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", "process_crash"),
    ("torch.AcceleratorError", "CUDA error: device-side assert triggered", "process_crash"),
]


@pytest.mark.parametrize(("type_name", "message", "failure_class"), CAUSES, ids=lambda v: v[:40])
def test_what_happened_here_is_primary(type_name: str, message: str, failure_class: str) -> None:
    finding = classify_exception(type_name=type_name, message=message)
    assert finding.weight == "primary"
    assert finding.failure_class == failure_class
    assert finding.detail.startswith(type_name)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGTERM])
def test_a_signal_is_primary(number: signal.Signals) -> None:
    finding = classify_exit(-number)
    assert (finding.failure_class, finding.weight) == ("process_crash", "primary")
    assert number.name in finding.detail


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGPIPE])
def test_a_signal_that_a_watchdog_or_a_closed_pipe_sends_is_ambiguous(number: signal.Signals) -> None:
    assert classify_exit(-number).weight == "ambiguous"


@pytest.mark.parametrize("status", [1, 2, 127, 255])
def test_an_exit_code_alone_is_ambiguous(status: int) -> None:
    finding = classify_exit(status)
    assert finding.weight == "ambiguous"
    assert str(status) in finding.detail


def test_an_unknown_signal_has_a_name_too() -> None:
    assert "signal 250" in classify_exit(-250).detail


def test_only_the_first_line_is_told_and_it_is_short() -> None:
    finding = classify_exception(type_name="ValueError", message="first " + "x" * 1000 + "\nsecond")
    assert "second" not in finding.detail
    assert len(finding.detail) < 350
    assert classify_exception(type_name="ValueError", message=" \n ").detail == "ValueError"


def test_weights_are_ordered() -> None:
    assert sorted(WEIGHT_ORDER, key=WEIGHT_ORDER.__getitem__) == ["primary", "ambiguous", "secondary"]


@pytest.mark.parametrize("name", ["VaultError", "StateError"])
def test_a_state_that_can_not_be_had_blames_no_worker(name: str) -> None:
    found = classify_exception(
        type_name=f"lmres.errors.{name}", message="no whole copy is left for rank 0: a: reset by peer"
    )
    assert (found.failure_class, found.weight, found.blames) == ("unknown", "primary", False)


@pytest.mark.parametrize(
    ("message", "pid"),
    [
        ("DataLoader worker (pid 4321) is killed by signal: Killed. ", 4321),
        ("DataLoader worker (pid(s) 11, 12) exited unexpectedly", 11),
        ("DataLoader worker (pid 4321) is killed by signal: Segmentation fault. ", None),
        ("boom", None),
    ],
)
def test_a_loaders_worker_that_was_killed(message: str, pid: int | None) -> None:
    assert killed_loader(message) == pid


def test_what_the_kernel_ended_for_want_of_memory() -> None:
    found = classify_exit(-9, out_of_memory="killed by the kernel")
    assert (found.failure_class, found.weight, found.detail) == ("out_of_memory", "primary", "killed by the kernel")
    loader = classify_exception(
        type_name="RuntimeError", message="DataLoader ...", out_of_memory="killed by the kernel"
    )
    assert (loader.failure_class, loader.weight, loader.blames) == ("out_of_memory", "primary", True)
    assert loader.detail.startswith("a worker of the data loader was killed: killed by the kernel; RuntimeError")
    assert [may_be_out_of_memory(s) for s in (-9, 137, -15, 1)] == [True, True, False, False]
