"""One vault as a process: what holds for a host's state whatever dies."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmres.errors import VaultError
from lmres.gemini.edge.client import WorkerVault
from lmres.gemini.edge.vault import Vault
from tests.contract.vault_kit import (
    BOUND_S,
    RUN,
    Node,
    capture,
    check_whole,
    kill,
    open_segments,
    resident_bytes,
    restore,
    start_writer,
    until,
    wait_grant,
)

SIZE = 4 << 20


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def test_a_new_worker_gets_the_last_image_at_memory_speed(node: Node) -> None:
    node.assign(1, 0)
    worker = node.connect(0, 1)
    assert worker.await_restore(BOUND_S) is None
    worker.reserve(shared_bytes=SIZE, own_bytes=4096)
    for step in range(1, 6):
        capture(worker, step, size=SIZE)
    copies = node.vault.freeze(1)
    newest = max(copies, key=lambda copy: copy.key)
    assert (newest.step, newest.origin, newest.has) == (5, 1, ("shared", "own", "log"))
    worker.close()
    restore(node, 2, copies, (5, 1), (0,))
    with contextlib.closing(node.connect(0, 2)) as again:
        found = again.await_restore(BOUND_S)
        assert found is not None
        assert (found.step, found.origin, found.source) == (5, 1, "local")
        check_whole(found, 0, again.log)
        assert found.shared.readonly
        assert found.own.readonly
        until(lambda: node.told("restored"), "the agent hears of it")
        assert node.told("restored")[0]["moved"] == 0
        again.reserve(shared_bytes=SIZE, own_bytes=4096)
        capture(again, 6, size=SIZE)
        until(lambda: node.safe_step() == 6, "the next step is safe")


def test_the_safe_image_is_never_granted(node: Node) -> None:
    node.assign(1, 0)
    worker = node.connect(0, 1)
    worker.reserve(shared_bytes=SIZE, own_bytes=64)
    for step in range(1, 20):
        grant = wait_grant(worker)
        state = node.status()["ranks"]["0"]
        if step > 2:
            assert sorted(state["slots"]) == ["granted", "sealed"]
        capture(worker, step, size=SIZE, own=64, grant=grant)
    until(lambda: node.safe_step() == 19, "step 19 is safe")
    worker.close()


def test_a_writer_killed_in_mid_copy_never_leaves_a_torn_image(node: Node) -> None:
    rng = random.Random(1)
    generation, key, first = 1, None, 1
    node.assign(generation, 0)
    torn_grants = 0
    for _ in range(100):
        writer = start_writer(node, rank=0, generation=generation, first=first, size=SIZE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"up\n"
        time.sleep(rng.random() * 0.03)
        kill(writer)
        copies = node.vault.freeze(generation)
        slots = node.status()["ranks"]["0"]["slots"]
        torn_grants += "empty" in slots
        newest = max(((copy.step, copy.origin) for copy in copies), default=None)
        generation += 1
        if newest is None:
            node.assign(generation, 0)
            continue
        assert key is None or newest[0] >= key[0]
        key = newest
        restore(node, generation, copies, key, (0,))
        with contextlib.closing(node.connect(0, generation)) as reader:
            found = reader.await_restore(BOUND_S)
            assert found is not None
            assert (found.step, found.origin, found.source) == (*key, "local")
            check_whole(found, 0, reader.log)
        first = key[0] + 1
    assert torn_grants > 10
    assert key is not None
    assert key[0] > 20


def test_memory_after_many_captures_grew_by_less_than_one_buffer(node: Node) -> None:
    node.assign(1, 0)
    worker = node.connect(0, 1)
    worker.reserve(shared_bytes=SIZE, own_bytes=4096)
    for step in range(1, 4):
        capture(worker, step, size=SIZE)
    until(lambda: node.safe_step() == 3, "step 3 is safe")
    held, resident = node.status()["memory_bytes"], resident_bytes(node.vault.pid)
    descriptors = len(list(Path(f"/proc/{node.vault.pid}/fd").iterdir()))
    for step in range(4, 54):
        capture(worker, step, size=SIZE)
    until(lambda: node.safe_step() == 53, "step 53 is safe")
    assert node.status()["memory_bytes"] - held < 4096 * 2
    assert resident_bytes(node.vault.pid) - resident < SIZE
    assert len(list(Path(f"/proc/{node.vault.pid}/fd").iterdir())) == descriptors
    worker.close()


def test_more_than_the_limit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    node = Node(tmp_path, memory_limit_fraction=0.0001)
    try:
        node.assign(1, 0)
        worker = node.connect(0, 1)
        worker.reserve(shared_bytes=1 << 30, own_bytes=4096)
        with pytest.raises(VaultError, match=r"2\.00 GiB .*memory_limit_fraction 0\.0001"):
            until(lambda: worker.poll_grant() and False, "a refusal")
        until(lambda: node.told("refused"), "the agent hears of it")
        worker.close()
        again = node.connect(0, 1)
        again.reserve(shared_bytes=4096, own_bytes=4096)
        capture(again, 1, size=4096)
        until(lambda: node.safe_step() == 1, "what fits is kept")
        again.close()
    finally:
        node.close()


def test_a_part_that_grew_is_reserved_anew_and_old_images_stay(node: Node) -> None:
    node.assign(1, 0)
    worker = node.connect(0, 1)
    worker.reserve(shared_bytes=4096, own_bytes=4096)
    capture(worker, 1, size=4096)
    until(lambda: node.safe_step() == 1, "step 1 is safe")
    worker.reserve(shared_bytes=4096, own_bytes=1 << 20)
    grant = until(lambda: (g := worker.poll_grant()) and len(g.own) >= 1 << 20 and g, "a larger slot")
    assert node.vault.status()["safe"] == [1, 1]
    capture(worker, 2, size=4096, own=1 << 20, grant=grant)
    capture(worker, 3, size=4096, own=1 << 20)
    until(lambda: node.safe_step() == 3, "step 3 is safe")
    worker.close()


def test_what_was_sealed_before_the_worker_died_is_kept(node: Node) -> None:
    node.assign(1, 0)
    worker = node.connect(0, 1)
    worker.reserve(shared_bytes=SIZE, own_bytes=4096)
    capture(worker, 1, size=SIZE)
    worker.close()
    assert [copy.step for copy in node.vault.freeze(1)] == [1]


def test_a_withdrawn_image_is_not_found(node: Node) -> None:
    node.assign(1, 0, members=("n0", "other"))
    worker = node.connect(0, 1)
    worker.reserve(shared_bytes=4096, own_bytes=4096)
    capture(worker, 1, size=4096)
    capture(worker, 2, size=4096)
    worker.withdraw(2)
    wait_grant(worker)
    assert [copy.step for copy in node.vault.freeze(1)] == [1]
    worker.close()


def test_going_back_to_an_older_step_forgets_the_newer_one_and_its_log(node: Node) -> None:
    node.assign(1, 0, members=("n0", "other"))  # nothing becomes safe: both images stay
    worker = node.connect(0, 1)
    worker.reserve(shared_bytes=4096, own_bytes=4096)
    capture(worker, 1, size=4096)
    capture(worker, 2, size=4096)
    copies = node.vault.freeze(1)
    assert sorted(copy.step for copy in copies) == [1, 2]
    worker.close()
    restore(node, 2, copies, (1, 1), (0,))
    again = node.connect(0, 2)
    found = again.await_restore(BOUND_S)
    assert found is not None
    check_whole(found, 0, again.log)
    assert [copy.step for copy in node.vault.freeze(2)] == [1]
    node.assign(2, 0, safe=(1, 1))
    again.reserve(shared_bytes=4096, own_bytes=4096)
    capture(again, 2, size=4096)
    until(lambda: node.status()["safe"] == [2, 2], "step 2 of the new generation is safe")
    again.close()


def test_a_flipped_byte_is_not_used_and_the_reason_is_told(node: Node) -> None:
    node.assign(1, 0)
    worker = node.connect(0, 1)
    worker.reserve(shared_bytes=SIZE, own_bytes=4096)
    capture(worker, 1, size=SIZE)
    copies = node.vault.freeze(1)
    worker.close()
    for fd in open_segments(node.vault.pid, SIZE):
        os.pwrite(fd, b"\xff", 12345)
        os.close(fd)
    restore(node, 2, copies, (1, 1), (0,))
    again = node.connect(0, 2)
    with pytest.raises(VaultError, match=r"step 1 .*rank 0.*another digest"):
        again.await_restore(BOUND_S)
    until(lambda: node.told("problem"), "the agent hears of it")
    assert node.vault.freeze(2) == ()
    again.close()


def test_a_dead_vault_is_an_error_at_once(node: Node) -> None:
    node.assign(1, 0)
    worker = node.connect(0, 1)
    worker.reserve(shared_bytes=4096, own_bytes=4096)
    wait_grant(worker)
    os.kill(node.vault.pid, signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(VaultError, match="gone"):
        until(lambda: worker.poll_grant() and False, "the worker hears of it")
    with pytest.raises(VaultError, match="gone"):
        worker.await_restore(BOUND_S)
    with pytest.raises(VaultError, match="gone"):
        until(lambda: node.status() and False, "the agent hears of it")
    assert time.monotonic() - began_s < BOUND_S / 2
    until(lambda: node.told("gone"), "an event says so")
    worker.close()


def test_a_stopped_vault_does_not_hold_a_worker(node: Node) -> None:
    node.assign(1, 0)
    worker = node.connect(0, 1)
    worker.reserve(shared_bytes=4096, own_bytes=4096)
    grant = wait_grant(worker)
    os.kill(node.vault.pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        capture(worker, 1, size=4096, grant=grant)
        assert worker.poll_grant() is None
        with pytest.raises(VaultError, match=r"within 0\.2 s"):
            worker.await_restore(0.2)
        with pytest.raises(VaultError, match="does not read"):
            for _ in range(100_000):
                worker.withdraw(5)
        assert time.monotonic() - began_s < BOUND_S / 2
    finally:
        os.kill(node.vault.pid, signal.SIGCONT)
    worker.close()


def test_a_worker_that_did_not_wait_for_its_welcome_does_not_keep_the_next_one_out(node: Node) -> None:
    node.assign(1, 0)
    os.kill(node.vault.pid, signal.SIGSTOP)
    try:
        with pytest.raises(VaultError, match="welcome"):
            WorkerVault.connect(node.path, rank=0, generation=1, timeout_s=0.1)
    finally:
        os.kill(node.vault.pid, signal.SIGCONT)
    worker = node.connect(0, 1)
    worker.reserve(shared_bytes=4096, own_bytes=4096)
    capture(worker, 1, size=4096)
    until(lambda: node.safe_step() == 1, "step 1 is safe")
    worker.close()


def test_the_vault_outlives_its_agent_and_is_adopted(node: Node) -> None:
    node.assign(1, 0)
    worker = node.connect(0, 1)
    worker.reserve(shared_bytes=4096, own_bytes=4096)
    capture(worker, 1, size=4096)
    pid = node.vault.pid
    node.vault.release()
    capture(worker, 2, size=4096)
    node.vault = node.start()
    assert node.vault.adopted
    assert node.vault.pid == pid
    assert max(copy.step for copy in node.vault.freeze(1)) == 2
    worker.close()


def test_without_an_agent_the_vault_ends(tmp_path: Path) -> None:
    node = Node(tmp_path, linger_s=0.5)
    process = node.vault._process
    node.assign(1, 0)
    worker = node.connect(0, 1)
    node.vault.release()
    assert process is not None
    assert process.wait(BOUND_S) == 0
    assert not node.path.exists()
    worker.close()


def test_ending_leaves_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.assign(1, 0)
    worker = node.connect(0, 1)
    pid = node.vault.pid
    node.vault.end()
    assert not Path(f"/proc/{pid}").exists()
    assert [entry.name for entry in node.folder.iterdir()] == ["vault.log"]
    with pytest.raises(VaultError):
        until(lambda: worker.poll_grant() and False, "the worker hears of it")
    worker.close()


def test_another_run_does_not_adopt(node: Node) -> None:
    other = Vault.start(
        state_dir=node.folder, run_id="run-2", node_id="n0", address="127.0.0.1", on_event=lambda *_: None
    )
    try:
        assert not other.adopted
        assert other.pid != node.vault.pid
        node.vault.end()
        assert node.path.exists(), "the socket file is the other's"
    finally:
        other.end()
    assert not node.path.exists()


def test_an_agent_that_comes_back_may_bring_other_settings(node: Node) -> None:
    pid, before = node.vault.pid, node.status()["memory_limit_bytes"]
    node.vault.release()
    node.options["memory_limit_fraction"] = 0.1
    node.vault = node.start()
    assert node.vault.pid == pid
    assert node.status()["memory_limit_bytes"] < before / 2


def test_a_worker_of_another_generation_or_rank_is_turned_away(node: Node) -> None:
    node.assign(3, 0)
    with pytest.raises(VaultError, match="generation 3"):
        node.connect(0, 2)
    with pytest.raises(VaultError, match="rank 1 is not assigned"):
        node.connect(1, 3)
    with pytest.raises(VaultError, match=r"within 0\.3 s"):
        WorkerVault.connect(node.path, rank=0, generation=4, timeout_s=0.3)
    with pytest.raises(VaultError, match="run-1"):
        WorkerVault.connect(node.path, rank=0, generation=3, run_id="run-9")
    with pytest.raises(VaultError, match="no vault answers"):
        WorkerVault.connect(node.folder / "none.sock", rank=0, generation=3)


def test_a_worker_may_come_before_its_assignment(node: Node) -> None:
    node.assign(1, 0)
    late = threading.Timer(0.3, lambda: node.assign(2, 0))
    late.start()
    worker = node.connect(0, 2)
    worker.reserve(shared_bytes=4096, own_bytes=4096)
    capture(worker, 1, size=4096)
    until(lambda: node.status()["safe"] == [1, 2], "step 1 is safe")
    late.join()
    worker.close()


def test_a_forked_child_neither_disturbs_nor_outlives_the_worker(node: Node) -> None:
    """A child of a killed worker keeps the socket open: the worker counts as dead all the same."""
    node.assign(1, 0)
    ready, child_says = os.pipe()
    worker_pid = os.fork()
    if worker_pid == 0:
        worker = node.connect(0, 1)
        worker.reserve(shared_bytes=4096, own_bytes=4096)
        capture(worker, 1, size=4096)
        wait_grant(worker)
        raw = os.dup(worker._sock.fileno())
        if os.fork() == 0:
            with contextlib.suppress(VaultError):
                worker.withdraw(1)
            os.write(child_says, os.getpid().to_bytes(4, "little") + raw.to_bytes(4, "little"))
            time.sleep(BOUND_S)
            os._exit(0)
        time.sleep(BOUND_S)
        os._exit(0)
    child = int.from_bytes(os.read(ready, 8)[:4], "little")
    try:
        until(lambda: node.safe_step() == 1, "step 1 is safe")
        os.kill(worker_pid, signal.SIGKILL)
        os.waitpid(worker_pid, 0)
        until(lambda: not node.status()["ranks"]["0"]["worker"], "the worker counts as dead")
        assert [copy.step for copy in node.vault.freeze(1)] == [1]
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(ready)
        os.close(child_says)


def test_a_worker_that_writes_on_after_its_time_harms_nothing(node: Node) -> None:
    """The next generation is prepared while old workers are still being stopped."""
    node.assign(1, 0)
    old = node.connect(0, 1)
    old.reserve(shared_bytes=SIZE, own_bytes=4096)
    capture(old, 1, size=SIZE)
    until(lambda: node.safe_step() == 1, "step 1 is safe")
    late = wait_grant(old)
    copies = node.vault.freeze(1)
    restore(node, 2, copies, (1, 1), (0,))
    new = node.connect(0, 2)
    found = new.await_restore(BOUND_S)
    assert found is not None
    late.shared[:SIZE] = b"\xee" * SIZE
    check_whole(found, 0, new.log)
    new.reserve(shared_bytes=SIZE, own_bytes=4096)
    for step in range(2, 5):
        capture(new, step, size=SIZE)
        late.shared[:SIZE] = b"\xee" * SIZE
    until(lambda: node.safe_step() == 4, "step 4 is safe")
    copies = node.vault.freeze(2)
    restore(node, 3, copies, (4, 2), (0,))
    again = node.connect(0, 3)
    found = again.await_restore(BOUND_S)
    assert found is not None
    check_whole(found, 0, again.log)
    for worker in (old, new, again):
        worker.close()


def test_a_long_folder_name(tmp_path: Path) -> None:
    node = Node(tmp_path / ("x" * 120))
    try:
        node.assign(1, 0)
        node.connect(0, 1).close()
    finally:
        node.close()


def test_the_process_is_small_and_private(node: Node) -> None:
    assert resident_bytes(node.vault.pid) < 40 << 20
    maps = Path(f"/proc/{node.vault.pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps
    assert os.getsid(node.vault.pid) == node.vault.pid
    assert node.path.stat().st_mode & 0o777 == 0o600
    assert RUN in (node.folder / "vault.log").read_text()
