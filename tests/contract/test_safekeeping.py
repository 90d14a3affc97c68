"""What an agent orders of its vault, with real vaults: which are killed, and standbys that come late."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lmres.gemini.edge.client import WorkerVault
from lmres.gemini.edge.vault import SOCKET_NAME
from lmres.gemini.inventory import Holdings
from lmres.policy import Policy
from lmres.rendezvous.edge.safekeeping import Safekeeping, Scene
from lmres.rendezvous.plan import ActiveNode, Plan
from lmres.rendezvous.state import Member
from tests.contract.vault_kit import BOUND_S, RUN, Node, capture, check_whole, until

ME = Member(
    node_id="n0",
    incarnation="i0",
    address="127.0.0.1",
    host="h",
    boot_id="b",
    pid=1,
    pid_start=1,
    failure_domain="n0",
)
FIRST = Plan(
    plan_id="p1",
    generation=1,
    from_generation=0,
    action="start",
    failure_class="none",
    active=(ActiveNode(slot=0, node_id="n0", incarnation="i0"),),
    standby=(),
    quarantined=(),
    reason="",
    recovery_source={"0": "none"},
    dismissed={},
    origin=1,
)
SECOND = replace(
    FIRST, plan_id="p2", generation=2, from_generation=1, action="restart", recovery_step=1, recovery_origin=1, origin=2
)


class Agent:
    """Stands for the agent of n0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.told: list[str] = []
        self.safe = Safekeeping(
            policy=Policy(),
            run_id=RUN,
            me=lambda: ME,
            local_world_size=1,
            state_dir=folder,
            on_event=lambda kind, fields: self.told.append(kind),
            poke=lambda: None,
        )
        self.safe.start()
        until(lambda: self.safe._vault, "the vault is there")

    def pid(self) -> int:
        vault = self.safe._vault
        assert vault is not None
        return vault.pid

    def kill_vault(self) -> None:
        os.kill(self.pid(), signal.SIGKILL)
        until(lambda: "gone" in self.told, "the agent hears of it")

    def begin(self, scene: Scene) -> WorkerVault:
        """A worker of the plan."""
        self.safe.begin(scene)
        self.settle()
        path = self.folder / SOCKET_NAME
        return WorkerVault.connect(path, rank=0, generation=scene.plan.origin, run_id=RUN, timeout_s=BOUND_S)

    def settle(self) -> None:
        """All orders so far are carried out."""
        done: list[bool] = []
        self.safe._orders.put(lambda: done.append(True))
        until(lambda: done, "the orders are carried out")

    def copies_wanted(self) -> int:
        self.settle()
        vault = self.safe._vault
        assert vault is not None
        return int(vault.status()["copies"]["wanted"])


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "n0")
    yield agent
    agent.safe.close()
    assert not (agent.folder / SOCKET_NAME).exists()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, "n1")
    yield node
    node.close()


def scene(plan: Plan, *holdings: Holdings) -> Scene:
    names = [h.node_id for h in holdings]
    return Scene(
        plan=plan,
        slot=0,
        holdings={h.node_id: h for h in holdings},
        domains={n: n for n in ("n0", *names)},
        standbys=tuple(names),
    )


def held_by(other: Node, generation: int = 0) -> Holdings:
    vault = other.vault
    return Holdings(
        node_id=other.name,
        incarnation="i1",
        generation=generation,
        address=vault.address,
        port=vault.port,
        copies=vault.freeze(generation) if generation else (),
    )


def keep_step_1(other: Node) -> Holdings:
    other.assign(1, 0)
    worker = other.connect(0, 1)
    worker.reserve(shared_bytes=1 << 20, own_bytes=4096)
    capture(worker, 1)
    until(lambda: other.safe_step() == 1, "step 1 is safe")
    worker.close()
    return held_by(other, 1)


def test_a_vault_killed_between_the_plan_and_the_workers_is_told_again(agent: Agent, other: Node) -> None:
    now = scene(SECOND, keep_step_1(other))
    agent.safe.follow(now)
    agent.settle()
    agent.kill_vault()
    worker = agent.begin(now)
    found = worker.await_restore(BOUND_S / 2)
    assert found is not None and found.step == 1
    check_whole(found, 0, worker.log)
    worker.close()


def test_a_standby_that_comes_late_holds_copies(agent: Agent, other: Node) -> None:
    worker = agent.begin(scene(FIRST))
    assert agent.copies_wanted() == 1
    agent.safe.mind(scene(FIRST, held_by(other)))
    assert agent.copies_wanted() == 2
    other.assign(1)
    worker.reserve(shared_bytes=1 << 20, own_bytes=4096)
    capture(worker, 1)
    until(lambda: [c for c in other.vault.freeze(1) if c.step == 1 and len(c.has) == 3], "the standby has a copy")
    agent.safe.mind(scene(FIRST))
    assert agent.copies_wanted() == 1, "it has gone"
    worker.close()


def test_what_was_told_does_not_change_for_a_standby(agent: Agent, other: Node) -> None:
    worker = agent.begin(scene(FIRST))
    agent.safe.freeze(1)
    agent.safe.mind(scene(FIRST, held_by(other)))
    assert agent.copies_wanted() == 1
    vault = agent.safe._vault
    assert vault is not None and vault.status()["frozen"]
    worker.close()


def test_a_plan_that_does_not_come_leaves_the_state_protected(agent: Agent) -> None:
    worker = agent.begin(scene(FIRST))
    worker.reserve(shared_bytes=1 << 20, own_bytes=4096)
    capture(worker, 1)
    until(lambda: "safe" in agent.told, "step 1 is safe")
    agent.safe.freeze(1)
    until(lambda: agent.safe.holdings, "it has told")

    def thawed() -> bool:
        agent.safe.thaw(scene(FIRST))
        return agent.safe.holdings is None

    until(thawed, "nobody asks any more")
    agent.settle()
    capture(worker, 2)
    agent.safe.freeze(1)
    until(lambda: agent.safe.holdings, "it has told again")
    held = agent.safe.holdings
    assert held is not None and max(c.step for c in held.copies) == 2
    worker.close()


def test_that_there_was_a_state_outlives_the_vault(agent: Agent) -> None:
    worker = agent.begin(scene(FIRST))
    worker.reserve(shared_bytes=1 << 20, own_bytes=4096)
    capture(worker, 1)
    until(lambda: "safe" in agent.told, "step 1 is safe")
    agent.kill_vault()
    agent.safe.freeze(1)
    agent.settle()
    held = agent.safe.holdings
    assert held is not None and held.ever and held.copies == () and held.port
    worker.close()


def test_a_killed_vault_leaves_no_socket(agent: Agent) -> None:
    agent.kill_vault()
    assert (agent.folder / SOCKET_NAME).exists(), "the agent removes it when it ends"
