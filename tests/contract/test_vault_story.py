"""A whole run in small: captures, skipped captures, half-written slots, dead hosts, and each time the choice and the
restore that follow. What was safe is never lost, what comes back is always whole."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from lmres.gemini.edge.client import WorkerVault
from lmres.gemini.inventory import Holdings, Key
from lmres.gemini.restore import Choice, choose, copies_of
from lmres.gemini.session import Assignment, Prepare
from tests.contract.vault_kit import BOUND_S, Node, capture, check_whole, until, wait_grant

SIZE = 1 << 18
RANKS = 3
GENERATIONS = 8


class Story:
    """Three slots of one rank each, one standby; every slot's images are copied to the next active host."""

    def __init__(self, folder: Path, stack: ExitStack, seed: int) -> None:
        self.folder = folder
        self.stack = stack
        self.rng = random.Random(seed)
        self.alike = bool(seed % 2)
        self.count = 0
        self.slots = [self.new_node() for _ in range(RANKS)]
        self.standby = self.new_node()
        self.key: Key | None = None
        self.workers: list[WorkerVault] = []

    def new_node(self) -> Node:
        self.count += 1
        node = Node(self.folder, f"n{self.count}")
        self.stack.callback(node.close)
        return node

    def begin(self, generation: int) -> None:
        hub = self.slots[0].peer
        for rank, node in enumerate(self.slots):
            node.vault.assign(
                Assignment(
                    generation=generation,
                    ranks=(rank,),
                    world_size=RANKS,
                    topology="t",
                    safe=self.key,
                    peers=(self.slots[(rank + 1) % RANKS].peer,),
                    hub=hub if rank else None,
                    members=tuple(n.name for n in self.slots) if not rank else (),
                )
            )
        self.standby.vault.assign(
            Assignment(generation=generation, ranks=(), world_size=RANKS, topology="t", safe=self.key, hub=hub)
        )
        self.workers = [node.connect(rank, generation) for rank, node in enumerate(self.slots)]
        for rank, worker in enumerate(self.workers):
            found = worker.await_restore(BOUND_S)
            if self.key is None:
                assert found is None
            else:
                assert found is not None
                assert Key(found.step, found.origin) == self.key
                check_whole(found, rank, worker.log, alike=self.alike)
            worker.reserve(shared_bytes=SIZE, own_bytes=4096)

    def train(self) -> int:
        """Some steps; the last one that this test has seen to be safe."""
        step = self.key.step if self.key is not None else 0
        for worker in self.workers:
            wait_grant(worker)
        for _ in range(self.rng.randrange(3, 30)):
            step += 1
            time.sleep(0.004)  # the vaults talk to each other meanwhile
            for worker in self.workers:
                grant = worker.poll_grant(step)
                if grant is not None and self.rng.random() > 0.05:
                    capture(worker, step, size=SIZE, alike=self.alike, grant=grant)
        return max(node.safe_step() for node in self.slots)

    def fail(self) -> None:
        """Half a slot is written when the workers die; maybe a host goes too."""
        for worker in self.workers:
            grant = worker.poll_grant()
            if grant is not None:
                grant.shared[: SIZE // 2] = b"\xee" * (SIZE // 2)
            worker.close()
        if self.rng.random() < 0.6:
            slot = self.rng.randrange(RANKS)
            lost, self.slots[slot] = self.slots[slot], self.standby
            os.kill(lost.vault.pid, signal.SIGKILL)
            until(lambda: not lost.vault.alive, "the lost host's vault is gone")
            self.standby = self.new_node()

    def recover(self, generation: int, safe_step: int) -> None:
        nodes = [*self.slots, self.standby]
        holdings = [
            Holdings(
                node_id=node.name,
                incarnation="1",
                generation=generation - 1,
                address=node.vault.address,
                port=node.vault.port,
                copies=node.vault.freeze(generation - 1),
                ever=node.vault.ever,
            )
            for node in nodes
        ]
        slots = {slot: node.name for slot, node in enumerate(self.slots)}
        choice = choose(holdings, slots=slots, local_world_size=1, topology="t")
        if not isinstance(choice, Choice):
            assert safe_step < 0, choice.reason
            self.key = None
            return
        assert choice.step >= safe_step
        assert self.key is None or choice.step >= self.key.step
        self.key = Key(choice.step, choice.origin)
        for rank, node in enumerate(self.slots):
            node.vault.prepare(
                Prepare(
                    generation=generation,
                    step=choice.step,
                    origin=choice.origin,
                    ranks=(rank,),
                    sources=tuple(other.peer for other in nodes),
                    manifests=copies_of(holdings, self.key, (rank,)),
                )
            )


@pytest.mark.parametrize("seed", range(4))
def test_what_was_safe_is_never_lost(tmp_path: Path, seed: int) -> None:
    with ExitStack() as stack:
        story = Story(tmp_path, stack, seed)
        reached = []
        for generation in range(1, GENERATIONS + 1):
            story.begin(generation)
            safe_step = story.train()
            story.fail()
            story.recover(generation + 1, safe_step)
            reached.append(story.key)
        assert reached[-1] is not None
