"""Several vaults: copies of images, what is safe, and restoring from wherever a whole copy is left."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lmres.errors import StateError, VaultError
from lmres.gemini.edge.client import WorkerVault
from lmres.gemini.inventory import Copy
from lmres.gemini.session import Prepare
from tests.contract import vault_kit
from tests.contract.vault_kit import (
    BOUND_S,
    Node,
    capture,
    check_whole,
    open_segments,
    own_bytes,
    restore,
    until,
    wait_grant,
)

SIZE = 4 << 20


class Group:
    """Vaults of one rank each; each holds copies of the next one's images (``copies`` 2), or none (1)."""

    def __init__(self, folder: Path, count: int, *, copies: int = 2, standbys: int = 0, **options: Any) -> None:
        self.nodes = [Node(folder, f"n{n}", **options) for n in range(count + standbys)]
        self.count = count
        self.copies = copies

    def assign(self, generation: int, *, ranks_of: dict[int, tuple[int, ...]] | None = None, **fields: Any) -> None:
        active = self.nodes[: self.count]
        for n, node in enumerate(self.nodes):
            ranks = (ranks_of or {}).get(n, (n,) if n < self.count else ())
            peers = (self.nodes[(n + 1) % len(self.nodes)].peer,) if self.copies > 1 and ranks else ()
            node.assign(
                generation,
                *ranks,
                peers=peers,
                hub=None if n == 0 else self.nodes[0].peer,
                members=tuple(node.name for node in active) if n == 0 else (),
                **fields,
            )

    def workers(self, generation: int, size: int = SIZE) -> list[WorkerVault]:
        workers = [node.connect(n, generation) for n, node in enumerate(self.nodes[: self.count])]
        for worker in workers:
            worker.reserve(shared_bytes=size, own_bytes=4096)
        return workers

    def until_safe(self, step: int) -> None:
        for node in self.nodes[: self.count]:
            until(lambda node=node: node.safe_step() == step, f"step {step} is safe at {node.name}")

    def freeze(self, generation: int) -> list[tuple[Copy, ...]]:
        return [node.vault.freeze(generation) for node in self.nodes]

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def group_of(stack: ExitStack, folder: Path, count: int, **options: Any) -> Group:
    group = Group(folder, count, **options)
    stack.callback(group.close)
    return group


@pytest.mark.parametrize("last", [7, 8])
def test_a_part_that_does_not_change_outlives_the_image_it_came_with(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """A program that draws no random numbers has the same own part in every step: it is pulled once."""
    monkeypatch.setattr(vault_kit, "own_bytes", lambda _step, rank, size: own_bytes(0, rank, size))
    group = group_of(stack, tmp_path, 2)
    group.assign(1)
    workers = group.workers(1)
    for step in range(1, last + 1):
        for worker in workers:
            capture(worker, step, size=SIZE)
        group.until_safe(step)
    for rank, (_, peer) in enumerate(zip(group.nodes, reversed(group.nodes), strict=True)):
        held = {(copy.rank, copy.step): copy.has for copy in peer.vault.freeze(1)}
        assert held[rank, last] == ("shared", "own", "log")
    for worker in workers:
        worker.close()


def group_that_captured(stack: ExitStack, tmp_path: Path) -> Group:
    """Two vaults for which step 1 is safe, and whose workers are gone."""
    group = group_of(stack, tmp_path, 2)
    group.assign(1)
    workers = group.workers(1)
    for worker in workers:
        capture(worker, 1, size=SIZE)
    group.until_safe(1)
    for worker in workers:
        worker.close()
    return group


def test_a_lost_host_is_restored_from_its_peer(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 2, standbys=1)
    group.assign(1)
    workers = group.workers(1)
    for step in range(1, 8):
        for worker in workers:
            capture(worker, step, size=SIZE)
    group.until_safe(7)
    os.kill(group.nodes[0].vault.pid, signal.SIGKILL)
    survivors = group.nodes[1:]
    copies = sum((node.vault.freeze(1) for node in survivors), ())
    for worker in workers:
        worker.close()
    # n2 takes the place of n0, whose images n1 holds.
    peers = tuple(node.peer for node in survivors)
    held = {(copy.rank, copy.step) for copy in copies if copy.has == ("shared", "own", "log")}
    assert (0, 7) in held
    restore(survivors[1], 2, copies, (7, 1), (0,), sources=peers)
    restore(survivors[0], 2, copies, (7, 1), (1,), sources=peers, hub=survivors[1].peer, members=())
    for rank, node in ((0, survivors[1]), (1, survivors[0])):
        worker = node.connect(rank, 2)
        found = worker.await_restore(BOUND_S)
        assert found is not None
        assert found.source == ("peer" if rank == 0 else "local")
        check_whole(found, rank, worker.log)
        worker.close()


def test_parts_that_are_alike_are_not_sent(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 2)
    group.assign(1)
    workers = group.workers(1)
    for step in range(1, 11):
        for worker in workers:
            capture(worker, step, size=SIZE, alike=True)
    group.until_safe(10)
    for node in group.nodes:
        status = node.status()
        assert status["pulled_bytes"] < SIZE // 4
        assert status["replicas"]
        assert max(found["step"] for found in status["replicas"]) == 10
    copies = group.freeze(1)
    for held in copies:
        assert {(c.rank, c.step, c.has) for c in held if c.step == 10} == {
            (rank, 10, ("shared", "own", "log")) for rank in (0, 1)
        }
    for worker in workers:
        worker.close()
    # The host of rank 0 is new: its shared part comes from the image of rank 1.
    node = Node(tmp_path, "n9")
    stack.callback(node.close)
    only_own = tuple(c for c in copies[1] if c.rank == 0)
    restore(node, 2, only_own, (10, 1), (0,), sources=(group.nodes[1].peer,))
    worker = node.connect(0, 2)
    found = worker.await_restore(BOUND_S)
    assert found is not None
    assert found.source == "replica"
    check_whole(found, 0, worker.log, alike=True)
    worker.close()


def test_logs_are_pulled_by_what_is_new_in_them(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 2)
    group.assign(1)
    workers = group.workers(1, 4096)
    before = 0
    for step in range(1, 4):
        log = b"x" * (1 << 20)
        for worker in workers:
            grant = wait_grant(worker)
            worker.log[(step - 1) << 20 : step << 20] = log
            worker.seal(grant, step=step, shared_length=0, own_length=0, log_length=step << 20, topology="t")
        group.until_safe(step)
        pulled = group.nodes[0].status()["pulled_bytes"]
        assert pulled - before <= 1 << 20
        before = pulled
    for worker in workers:
        worker.close()


def test_a_flipped_byte_in_a_peers_copy_is_not_used(stack: ExitStack, tmp_path: Path) -> None:
    """The peer's copy is wrong, the files are right: they are the next source."""
    group = group_of(stack, tmp_path, 2, durable_directory=str(tmp_path / "files"), durable_every=2, durable_keep=2)
    group.assign(1)
    workers = group.workers(1)
    for step in (1, 2):
        for worker in workers:
            capture(worker, step, size=SIZE)
        group.until_safe(step)
    for node in group.nodes:
        until(lambda node=node: node.told("durable"), f"{node.name} has written step 2")
    os.kill(group.nodes[0].vault.pid, signal.SIGKILL)
    copies = group.nodes[1].vault.freeze(1)
    assert {(c.rank, c.step, c.place) for c in copies if c.place == "durable"} == {(0, 2, "durable"), (1, 2, "durable")}
    for worker in workers:
        worker.close()
    for fd in open_segments(group.nodes[1].vault.pid, SIZE):
        os.pwrite(fd, b"\xff", SIZE // 2)
        os.close(fd)
    node = Node(tmp_path, "n9", durable_directory=str(tmp_path / "files"), durable_every=2, durable_keep=2)
    stack.callback(node.close)
    in_memory = tuple(c for c in copies if c.place == "memory")
    restore(node, 2, in_memory, (2, 1), (0,), sources=(group.nodes[1].peer,))
    worker = node.connect(0, 2)
    found = worker.await_restore(BOUND_S)
    assert found is not None
    assert found.source == "durable"
    check_whole(found, 0, worker.log)
    worker.close()


def test_when_no_source_is_left_the_error_names_what_was_tried(stack: ExitStack, tmp_path: Path) -> None:
    group = group_that_captured(stack, tmp_path)
    (_, copies) = group.freeze(1)
    for fd in open_segments(group.nodes[1].vault.pid, SIZE):
        os.pwrite(fd, b"\xff", SIZE // 2)
        os.close(fd)
    node = Node(tmp_path, "n9")
    stack.callback(node.close)
    os.kill(group.nodes[0].vault.pid, signal.SIGKILL)
    restore(node, 2, copies, (1, 1), (0,), sources=tuple(n.peer for n in group.nodes))
    worker = node.connect(0, 2)
    with pytest.raises(VaultError, match="rank 0") as error:
        worker.await_restore(BOUND_S)
    assert "step 1" in str(error.value)
    assert "n1" in str(error.value)
    assert "n0 at 127.0.0.1" in str(error.value)
    (problem,) = until(lambda: node.told("problem"), "the agent hears of it")
    assert problem["rank"] == 0
    worker.close()


def test_a_missed_capture_makes_its_key_dead_and_captures_go_on(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 3, copies=1)
    group.assign(1)
    workers = group.workers(1, 4096)
    for worker in workers:
        capture(worker, 1, size=4096)
    group.until_safe(1)
    for worker in workers[:2]:
        capture(worker, 2, size=4096)  # rank 2 misses step 2
    step = 3
    while group.nodes[0].safe_step() < 3:
        for worker in workers:
            grant = worker.poll_grant(step)
            if grant is not None:
                capture(worker, step, size=4096, grant=grant)
        assert group.nodes[0].safe_step() != 2
        step += 1
        time.sleep(0.01)
        assert step < 1000
    group_safe = group.nodes[0].safe_step()
    assert group_safe >= 3
    for worker in workers:
        worker.close()


def test_nothing_is_safe_before_the_copies_are_made(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 2)
    group.assign(1)
    workers = group.workers(1)
    os.kill(group.nodes[1].vault.pid, signal.SIGSTOP)
    try:
        capture(workers[0], 1, size=SIZE)
        time.sleep(0.3)
        assert group.nodes[0].safe_step() == -1
    finally:
        os.kill(group.nodes[1].vault.pid, signal.SIGCONT)
    capture(workers[1], 1, size=SIZE)
    group.until_safe(1)
    for worker in workers:
        worker.close()


def test_a_peer_out_of_reach_is_counted_out_and_told_once(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 1, standbys=1)
    group.assign(1)
    (worker,) = group.workers(1)
    capture(worker, 1, size=SIZE)
    group.until_safe(1)
    standby = group.nodes[1]
    assert [(c.rank, c.step) for c in standby.vault.freeze(1)] == [(0, 1)]
    os.kill(standby.vault.pid, signal.SIGKILL)
    capture(worker, 2, size=SIZE)
    group.until_safe(2)
    assert [(f["held"], f["wanted"]) for f in group.nodes[0].told("copies")] == [(1, 2)]
    assert "n1" in group.nodes[0].told("copies")[0]["reason"]
    capture(worker, 3, size=SIZE)
    group.until_safe(3)
    worker.close()


def test_a_hub_out_of_reach_stalls_captures_only(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 2, copies=1)
    group.assign(1)
    workers = group.workers(1, 4096)
    for worker in workers:
        capture(worker, 1, size=4096)
    group.until_safe(1)
    os.kill(group.nodes[0].vault.pid, signal.SIGSTOP)
    try:
        capture(workers[1], 2, size=4096)
        time.sleep(0.2)
        assert workers[1].poll_grant() is None
        until(lambda: not group.nodes[1].status()["hub_connected"], "the hub counts as away")
    finally:
        os.kill(group.nodes[0].vault.pid, signal.SIGCONT)
    capture(workers[0], 2, size=4096)
    group.until_safe(2)
    for worker in workers:
        worker.close()


def test_a_peer_without_memory_is_counted_out(stack: ExitStack, tmp_path: Path) -> None:
    big = Node(tmp_path, "n0")
    stack.callback(big.close)
    small = Node(tmp_path, "n1", memory_limit_fraction=0.0001)
    stack.callback(small.close)
    small.assign(1, hub=big.peer, members=())
    big.assign(1, 0, peers=(small.peer,))
    worker = big.connect(0, 1)
    worker.reserve(shared_bytes=64 << 20, own_bytes=64)
    capture(worker, 1, size=64 << 20, own=64)
    until(lambda: big.safe_step() == 1, "step 1 is safe without a copy")
    assert "memory_limit_fraction" in big.told("copies")[0]["reason"]
    worker.close()


def test_a_restored_image_is_copied_again(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 1, copies=1)
    group.assign(1)
    (worker,) = group.workers(1)
    capture(worker, 1, size=SIZE)
    group.until_safe(1)
    (copies,) = group.freeze(1)
    worker.close()
    node = Node(tmp_path, "n9")
    stack.callback(node.close)
    node.assign(2, hub=group.nodes[0].peer, members=())
    restore(group.nodes[0], 2, copies, (1, 1), (0,), peers=(node.peer,))
    until(
        lambda: [(c.rank, c.step, c.has) for c in node.vault.freeze(2)] == [(0, 1, ("shared", "own", "log"))], "a copy"
    )


def test_durable_files_outlive_all_vaults_and_old_ones_go(stack: ExitStack, tmp_path: Path) -> None:
    files = {"durable_directory": str(tmp_path / "files"), "durable_every": 2, "durable_keep": 2}
    group = group_of(stack, tmp_path / "a", 2, copies=1, **files)
    group.assign(1)
    workers = group.workers(1)
    for step in range(1, 10):
        for worker in workers:
            capture(worker, step, size=SIZE)
        group.until_safe(step)
        if step % 2 == 0:
            until(
                lambda step=step: all(n.told("durable") and n.told("durable")[-1]["step"] == step for n in group.nodes),
                f"step {step} is durable",
            )
    until(lambda: {c.step for c in group.nodes[0].vault.freeze(1) if c.place == "durable"} == {6, 8}, "old files go")
    for worker in workers:
        worker.close()
    group.close()
    again = group_of(stack, tmp_path / "b", 2, copies=1, **files)
    copies = sum(again.freeze(0), ())
    assert all(node.vault.ever for node in again.nodes)
    key = max((c.step, c.origin) for c in copies)
    assert key == (8, 1)
    for rank, node in enumerate(again.nodes):
        restore(node, 5, copies, key, (rank,), hub=None if rank == 0 else again.nodes[0].peer, members=("n0", "n1"))
        worker = node.connect(rank, 5)
        found = worker.await_restore(BOUND_S)
        assert found is not None
        assert (found.step, found.source) == (8, "durable")
        check_whole(found, rank, worker.log)
        worker.close()


def test_a_full_disk_never_stops_captures_and_is_told_once(stack: ExitStack, tmp_path: Path) -> None:
    blocked = tmp_path / "files"
    blocked.write_text("not a folder")
    group = group_of(stack, tmp_path, 1, durable_directory=str(blocked), durable_every=1, durable_keep=1)
    group.assign(1)
    (worker,) = group.workers(1)
    for step in range(1, 10):
        capture(worker, step, size=SIZE)
        group.until_safe(step)
    until(lambda: group.nodes[0].told("problem"), "the agent hears of it")
    assert len(group.nodes[0].told("problem")) == 1
    assert group.nodes[0].status()["durable"]["problem"]
    worker.close()


def test_a_dead_source_does_not_hold_a_restore(stack: ExitStack, tmp_path: Path) -> None:
    group = group_that_captured(stack, tmp_path)
    copies = group.nodes[1].vault.freeze(1)
    os.kill(group.nodes[0].vault.pid, signal.SIGSTOP)
    node = Node(tmp_path, "n9")
    stack.callback(node.close)
    try:
        manifests = tuple(c for c in copies if c.rank == 0)
        node.vault.prepare(
            Prepare(
                generation=2,
                step=1,
                origin=1,
                ranks=(0,),
                sources=tuple(n.peer for n in group.nodes),
                manifests=manifests,
            )
        )
        node.assign(2, 0, safe=(1, 1))
        worker = node.connect(0, 2)
        found = worker.await_restore(BOUND_S)
        assert found is not None
        check_whole(found, 0, worker.log)
        worker.close()
    finally:
        os.kill(group.nodes[0].vault.pid, signal.SIGCONT)


def test_a_host_that_is_not_active_any_more_is_still_a_source(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 1, copies=1, standbys=1)
    group.assign(1)
    (worker,) = group.workers(1)
    capture(worker, 1, size=SIZE)
    group.until_safe(1)
    worker.close()
    copies = group.nodes[0].vault.freeze(1)
    old, new = group.nodes
    old.assign(2, safe=(1, 1), hub=new.peer, members=())
    restore(new, 2, copies, (1, 1), (0,), sources=(old.peer,))
    again = new.connect(0, 2)
    found = again.await_restore(BOUND_S)
    assert found is not None
    assert found.source == "peer"
    check_whole(found, 0, again.log)
    held = old.status()["memory_bytes"]
    again.reserve(shared_bytes=SIZE, own_bytes=4096)
    capture(again, 2, size=SIZE)
    until(lambda: new.safe_step() == 2, "step 2 is safe")
    until(lambda: old.status()["memory_bytes"] < held - SIZE, "the old host has let go")
    assert old.vault.freeze(2) == ()
    again.close()


def test_a_restoration_gives_way_to_the_next_one(stack: ExitStack, tmp_path: Path) -> None:
    """The only source hangs; then another plan says where else to look."""
    group = group_of(stack, tmp_path, 2)
    group.assign(1)
    workers = group.workers(1, 64 << 20)
    for worker in workers:
        capture(worker, 1, size=64 << 20)
    group.until_safe(1)
    copies = group.nodes[1].vault.freeze(1)
    for worker in workers:
        worker.close()
    node = Node(tmp_path, "n9")
    stack.callback(node.close)
    restore(node, 2, copies, (1, 1), (0,), sources=(group.nodes[0].peer,))
    os.kill(group.nodes[0].vault.pid, signal.SIGSTOP)
    stack.callback(os.kill, group.nodes[0].vault.pid, signal.SIGCONT)
    first = node.connect(0, 2)
    restore(node, 3, copies, (1, 1), (0,), sources=(group.nodes[1].peer,))
    with pytest.raises(VaultError):
        first.await_restore(BOUND_S)
    second = node.connect(0, 3)
    found = second.await_restore(BOUND_S)
    assert found is not None
    check_whole(found, 0, second.log)
    first.close()
    second.close()


def test_a_manifest_that_comes_before_the_assignment_is_kept(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 1, standbys=1)
    active, standby = group.nodes
    active.assign(1, 0, peers=(standby.peer,))
    worker = active.connect(0, 1)
    worker.reserve(shared_bytes=SIZE, own_bytes=4096)
    capture(worker, 1, size=SIZE)
    until(lambda: active.status()["copies"]["peers"]["n1"]["up"], "the link is up")
    time.sleep(0.2)
    assert active.safe_step() == -1
    standby.assign(1, hub=active.peer, members=())
    until(lambda: active.safe_step() == 1, "step 1 is safe")
    worker.close()


def test_a_withdrawn_image_is_marked_at_its_holders(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 1, standbys=1)
    group.assign(1)
    (worker,) = group.workers(1)
    capture(worker, 1, size=SIZE)
    group.until_safe(1)
    worker.withdraw(1)
    for node in group.nodes:
        until(lambda node=node: [c.finite for c in node.vault.freeze(1)] == [False], f"{node.name} knows")
    worker.close()


def test_several_ranks_of_a_new_host_bring_a_common_part_once(stack: ExitStack, tmp_path: Path) -> None:
    node = Node(tmp_path, "n0")
    stack.callback(node.close)
    node.assign(1, 0, 1, 2)
    workers = [node.connect(rank, 1) for rank in range(3)]
    for worker in workers:
        worker.reserve(shared_bytes=SIZE, own_bytes=4096)
        capture(worker, 1, size=SIZE, alike=True)
    until(lambda: node.safe_step() == 1, "step 1 is safe")
    copies = node.vault.freeze(1)
    for worker in workers:
        worker.close()
    new = Node(tmp_path, "n9")
    stack.callback(new.close)
    restore(new, 2, copies, (1, 1), (0, 1, 2), sources=(node.peer,))
    for rank in range(3):
        worker = new.connect(rank, 2)
        found = worker.await_restore(BOUND_S)
        assert found is not None
        check_whole(found, rank, worker.log, alike=True)
        worker.close()
    until(lambda: len(new.told("restored")) == 3, "three ranks are restored")
    assert {fields["source"] for fields in new.told("restored")} == {"peer"}


def test_a_slow_disk_neither_holds_captures_nor_a_freeze(stack: ExitStack, tmp_path: Path) -> None:
    """Somebody holds the locks of the folders: the writer waits."""
    files = tmp_path / "files"
    group = group_of(stack, tmp_path, 1, durable_directory=str(files), durable_every=1, durable_keep=1)
    group.assign(1)
    (worker,) = group.workers(1)
    capture(worker, 1, size=SIZE)
    until(lambda: group.nodes[0].told("durable"), "step 1 is durable")
    held = []
    for folder in [files, *files.rglob("*")]:
        if folder.is_dir():
            held.append(os.open(folder, os.O_RDONLY))
            fcntl.flock(held[-1], fcntl.LOCK_EX)
    began_s = time.monotonic()
    for step in range(2, 12):
        capture(worker, step, size=SIZE)
        group.until_safe(step)
    assert max(c.step for c in group.nodes[0].vault.freeze(1) if c.place == "memory") == 11
    assert time.monotonic() - began_s < BOUND_S / 2
    for fd in held:
        os.close(fd)
    worker.close()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_source_that_is_stopped_for_a_while_is_waited_for(stack: ExitStack, tmp_path: Path, comes_back: bool) -> None:
    group = group_of(stack, tmp_path, 1, copies=1)
    group.assign(1)
    (worker,) = group.workers(1)
    capture(worker, 1, size=SIZE)
    group.until_safe(1)
    worker.close()
    copies = group.nodes[0].vault.freeze(1)
    pid = group.nodes[0].vault.pid
    node = Node(tmp_path, "n9")
    stack.callback(node.close)
    os.kill(pid, signal.SIGSTOP)
    restore(node, 2, copies, (1, 1), (0,), sources=(group.nodes[0].peer,))
    again = node.connect(0, 2)
    if comes_back:
        with pytest.raises(VaultError, match="did not come within"):
            again.await_restore(4.0)
        assert not node.told("problem")
        os.kill(pid, signal.SIGCONT)
        found = again.await_restore(BOUND_S)
        assert found is not None
        check_whole(found, 0, again.log)
    else:
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(VaultError, match="no whole copy is left for rank 0") as told:
            again.await_restore(BOUND_S)
        assert not isinstance(told.value, StateError), "the image itself may be good"
    again.close()
