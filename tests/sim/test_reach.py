"""The simulator gets into every kind of situation; an invariant that is never put to the test proves nothing."""

from collections import Counter

from lmres.rendezvous.state import Parted
from tests.sim.run import run_seed
from tests.sim.world import World

SEEDS = range(300)


def sights(world: World) -> set[str]:
    found = set()
    for plan in world.oracle.plans.values():
        found.add(f"plan {plan.action}")
        found |= {"charged" for _ in plan.charged}
        found |= {"dismissed" for _ in plan.dismissed}
        found |= {"quarantined" for _ in plan.quarantined}
        found.add(plan.verdict)
        found.add(f"class {plan.failure_class}")
        if "in time" in plan.reason:
            found.add("late")
        if "drained by the operator" in plan.reason:
            found.add("drained")
        if plan.streak.count > 1:
            found.add("streak")
        if plan.action == "replace" and any("keeps slot" in part for part in plan.reason.split("; ")):
            found.add("kept for want of a standby")
        if world.states.on:
            found |= {f"state {source}" for source in plan.recovery_source.values()}
            found |= {what for what, words in STATE_WORDS.items() if words in plan.reason}
    for gone in world.oracle.gone:
        if gone.how == "lost":
            found.add(f"lost by {min(len(gone.witnesses), 2)} witnesses" if gone.witnesses else "lost by its lease")
    found |= {f"connections {'back' if p.back else 'broke'}" for p in world.oracle.of_kind(Parted)}
    if world.looks.withdrawn:
        found.add("alarm withdrawn")
    for plan in world.oracle.plans.values():
        read = world.oracle.reads.get(plan.plan_id)
        found |= {f"finding {e.reaction}{'' if e.attributed else ' unclear'}" for e in (read.evidence if read else ())}
        for paused in read.paused.values() if read else ():
            found.add("can not stand" if paused.problem else "stands still" if paused.step else "moves on")
        if plan.failure_class in ("hang", "collective_desync", "silent_corruption"):
            found.add(f"{plan.failure_class} {plan.verdict}")
        if read is not None and read.unfit and plan.action in ("start", "replace"):
            found.add("unfit passed over")
        if plan.doubts:
            found.add("states doubted")
        if any("process faults" in q.reason for q in plan.quarantined) and plan.failure_class == "hang":
            found.add("put aside for a hang")
    if any(v.verdict.gate for v in world.states.vaults.values()):
        found.add("gate")
    for process in world.processes:
        found.add(f"exit {process.exit_code}")
        if process.agent.me.incarnation.rsplit(".", 1)[1] != "1":
            found.add("came back under a new incarnation")
        if "in use by a live agent" in process.end_reason:
            found.add("name in use")
        if "taken over" in process.end_reason:
            found.add("name taken over")
        if "agents at most" in process.end_reason:
            found.add("too many")
    if world.oracle.epoch > 1:
        found.add("wiped")
    if any(f.outcome == "succeeded" for f in world.oracle.finished):
        found.add("succeeded")
    return found


STATE_WORDS = {
    "newer state not whole": "is not whole",
    "newer state banned": "is banned",
    "state lost": "ways out",
    "state could not be restored": "can not be restored",
    "some were not heard": "without word",
}
EXPECTED = {
    *(f"state {s}" for s in ("none", "local", "peer", "replica", "durable")),
    *STATE_WORDS,
    "gate",
    "alarm withdrawn",
    "put aside for a hang",
    "unfit passed over",
    "states doubted",
    "stands still",
    "can not stand",
    "moves on",
    *(f"class {c}" for c in ("hang", "collective_desync", "straggler", "silent_corruption")),
    *(f"{c} {v}" for c in ("hang", "collective_desync", "silent_corruption") for v in ("attributed", "inconclusive")),
    *(f"finding {f}" for f in ("recover", "recover unclear", "replace", "replace unclear", "report")),
    *(f"lost by {by}" for by in ("1 witnesses", "2 witnesses", "its lease")),
    "connections broke",
    "connections back",
    *(f"plan {a}" for a in ("start", "restart", "replace", "stop")),
    *(f"class {c}" for c in ("none", "process_crash", "user_exception", "out_of_memory", "unknown", "node_lost")),
    *(f"class {c}" for c in ("drain", "node_unhealthy")),
    *(f"exit {c}" for c in (0, 1, 64, 69, 75, 76, -9)),
    "charged",
    "dismissed",
    "quarantined",
    "attributed",
    "inconclusive",
    "late",
    "drained",
    "streak",
    "came back under a new incarnation",
    "name in use",
    "name taken over",
    "too many",
    "wiped",
    "succeeded",
}


def test_every_kind_of_situation_is_reached() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        seen.update(sights(run_seed(seed)))
        if seen.keys() >= EXPECTED:
            break
    missing = sorted(EXPECTED - seen.keys())
    assert not missing, f"never seen in {len(SEEDS)} seeds"
