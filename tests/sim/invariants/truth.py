"""What invariants ask: who has told the deciding agent, which vaults those nodes have, whom a plan blames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lmres.rendezvous.plan import Plan
from lmres.rendezvous.resume import told as fresh
from lmres.rendezvous.state import Evidence

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.states import Vault
    from tests.sim.world import World


LOCALIZED = ("hang", "collective_desync")


def seen_at_fault(plan: Plan) -> str | None:
    """The node that a plan names because of what workers were seen doing; ``only_the_stuck`` judges whether it is."""
    clear = plan.failure_class in LOCALIZED and plan.verdict == "attributed" and plan.cause is not None
    return plan.cause.node_id if clear and plan.cause is not None and plan.cause.node_id else None


def one_of_two(evidence: Iterable[Evidence]) -> set[str]:
    """Nodes of which one is wrong, and nobody can tell which: one of them may make room for a third opinion."""
    unclear = [e for e in evidence if e.evict and not e.attributed and e.reaction == "recover"]
    return {s.node_id for e in unclear if len(e.cause.suspects) > 1 for s in e.cause.suspects}


def told(deciding: Process) -> list[str]:
    """Nodes whose holdings the newest plan was made from: its writer waits for the answer, with the view it had."""
    view = deciding.agent.view
    head = view.head()
    return [h.node_id for h in fresh(view, head.generation if head is not None else 0)]


def vaults_of(world: World, nodes: list[str]) -> list[Vault]:
    """Of the agents that hold these names."""
    view_of = {p.node_id: p for p in world.living() if p.agent.ledger.registered}
    found = [world.states.vaults.get((view_of[n].host.name, n)) for n in nodes if n in view_of]
    return [v for v in found if v is not None and v.alive]
