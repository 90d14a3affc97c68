"""Several vaults that compare what equals have: what differs is never safe, and what replay certifies is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lmres.gemini.edge.client import WorkerVault
from lmres.gemini.inventory import Copy
from tests.contract.test_vault_copies import Group
from tests.contract.vault_kit import log_bytes, own_bytes, restore, shared_bytes, until, wait_grant

SIZE = 1 << 20
PARTS = 2


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def group_of(stack: ExitStack, folder: Path, count: int, **options: Any) -> Group:
    group = Group(folder, count, **{"compare": "hold", **options})
    stack.callback(group.close)
    return group


def workers_of(stack: ExitStack, group: Group, generation: int) -> list[WorkerVault]:
    workers = group.workers(generation, SIZE)
    for worker in workers:
        stack.callback(worker.close)
    return workers


def capture(worker: WorkerVault, step: int, *, flip: bool = False, all_finite: bool = True) -> None:
    """The shared part is the same on all ranks but for one bit of it."""
    grant = wait_grant(worker)
    shared = bytearray(shared_bytes(step, SIZE))
    shared[SIZE // 2] ^= flip
    grant.shared[:SIZE] = shared
    grant.own[:4096] = own_bytes(step, worker.rank, 4096)
    log = log_bytes(step, worker.rank)
    worker.log[: len(log)] = log
    worker.seal(
        grant,
        step=step,
        shared_length=SIZE,
        own_length=4096,
        log_length=len(log),
        topology="t",
        layout="l",
        all_finite=all_finite,
    )


def step_of_all(workers: list[WorkerVault], step: int, *flipped: int, **more: Any) -> None:
    for worker in workers:
        capture(worker, step, flip=worker.rank in flipped, **more)


def replay_of_all(workers: list[WorkerVault], step: int, part: int, *wrong: int, steady: bool = True) -> None:
    for worker in workers:
        digest = "wrong" if worker.rank in wrong else "right"
        worker.replayed(step=step, part=part, parts=PARTS, what=f"part {part}", digest=digest, steady=steady)


def trusts(copies: tuple[Copy, ...], step: int) -> set[str]:
    return {copy.trust for copy in copies if copy.step == step}


def test_a_flipped_bit_is_found_and_its_key_is_never_safe(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 3)
    group.assign(1)
    workers = workers_of(stack, group, 1)
    for step in (1, 2):
        step_of_all(workers, step)
        group.until_safe(step)
    step_of_all(workers, 3, 1)
    (found,) = until(lambda: group.nodes[0].told("corruption"), "the finding")
    assert (found["check"], found["step"], found["origin"]) == ("state", 3, 1)
    assert found["groups"] == [[0, 2], [1]] and found["trusted"] == [2, 1]
    step_of_all(workers, 4, 1)  # its buffers are free again, and what is wrong stays so
    for copies in group.freeze(1):
        assert trusts(copies, 2) == {"verified"} and trusts(copies, 3) <= {"unverified"}
    assert group.nodes[0].safe_step() == 2 and group.nodes[0].status()["verified"] == [2, 1]
    assert len(group.nodes[0].told("corruption")) == 1
    assert not any(node.told("corruption") for node in group.nodes[1:])


def test_what_is_only_told_becomes_safe_and_is_not_verified(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 2, compare="report")
    group.assign(1)
    workers = workers_of(stack, group, 1)
    step_of_all(workers, 1)
    group.until_safe(1)
    step_of_all(workers, 2, 1)
    group.until_safe(2)
    assert group.nodes[0].told("corruption")
    assert all(trusts(copies, 2) == {"unverified"} for copies in group.freeze(1))


def test_what_is_not_finite_is_not_verified(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 2)
    group.assign(1)
    workers = workers_of(stack, group, 1)
    step_of_all(workers, 1, all_finite=False)
    group.until_safe(1)
    assert group.nodes[0].status()["verified"] is None


def test_the_same_steps_made_again_tell_who_was_wrong(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 2)
    group.assign(1)
    workers = workers_of(stack, group, 1)
    step_of_all(workers, 1)
    group.until_safe(1)
    step_of_all(workers, 2, 0)
    until(lambda: group.nodes[0].told("corruption"), "the finding")
    for worker in workers:
        worker.close()
    copies = group.freeze(1)
    for n, node in enumerate(group.nodes):
        peers = (group.nodes[1 - n].peer,)
        hub = None if n == 0 else group.nodes[0].peer
        restore(node, 2, copies[n], (1, 1), (n,), peers=peers, hub=hub, members=("n0", "n1") if n == 0 else ())
    workers = workers_of(stack, group, 2)
    step_of_all(workers, 2)
    group.until_safe(2)
    found = until(lambda: group.nodes[0].told("corruption")[1:], "the answer")[0]
    assert found["check"] == "again" and found["ranks"] == [0] and (found["origin"], found["then"]) == (2, 1)


def until_anchor(group: Group) -> list[int]:
    """The same everywhere."""
    found = until(lambda: group.nodes[0].status()["anchor"], "an anchor")
    for node in group.nodes[: group.count]:
        until(lambda node=node: node.status()["anchor"] == found, f"{node.name} has heard of it")
    return list(found)


def test_what_replay_certifies_is_kept_everywhere(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 2, anchors=True)
    group.assign(1)
    workers = workers_of(stack, group, 1)
    step = 0
    for part in (0, 1, 0, 1):
        step += 1
        replay_of_all(workers, step, part)
        step_of_all(workers, step)
        group.until_safe(step)
    anchor = until_anchor(group)
    assert anchor[0] < step
    for _ in range(5):
        step += 1
        step_of_all(workers, step)
        group.until_safe(step)
    for copies in group.freeze(1):
        held = {copy.rank: copy for copy in copies if [copy.step, copy.origin] == anchor}
        assert held.keys() == {0, 1}, copies
        assert all(copy.has == ("shared", "own", "log") and copy.trust == "verified" for copy in held.values())


def test_a_wrong_replay_trusts_the_anchor(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 3, anchors=True)
    group.assign(1)
    workers = workers_of(stack, group, 1)
    for step, part in enumerate((0, 1, 0, 1), start=1):
        replay_of_all(workers, step, part)
        step_of_all(workers, step)
        group.until_safe(step)
    anchor = until_anchor(group)
    replay_of_all(workers, 5, 0, 2)
    step_of_all(workers, 5)
    (found,) = until(lambda: group.nodes[0].told("corruption"), "the finding")
    assert found["check"] == "replay" and found["groups"] == [[0, 1], [2]] and found["what"] == "part 0"
    assert found["trusted"] is not None and anchor <= found["trusted"] <= [3, 1]


def test_without_memory_for_what_is_kept_captures_go_on(stack: ExitStack, tmp_path: Path) -> None:
    group = group_of(stack, tmp_path, 1, anchors=True, copies=1, memory_limit_fraction=0.003)
    node = group.nodes[0]
    limit = node.status()["memory_limit_bytes"]
    group.assign(1)
    worker = node.connect(0, 1)
    stack.callback(worker.close)
    worker.reserve(shared_bytes=limit // 3, own_bytes=4096)
    for step in (1, 2, 3):
        capture(worker, step)
        group.until_safe(step)
    (told,) = node.told("no_room")
    assert "four slots" in told["reason"] and not node.told("refused")
    assert node.status()["anchor"] is None
