"""Bugs planted on purpose, each as a patch of the shipped code. The simulator must find every one of them.

A bug that the simulator does not find shows a hole in its faults or its invariants, not that the code is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from lmres.gemini.watermark import Verdict
from lmres.ports import Compare, Get, Put, Txn
from lmres.rendezvous import blame, looking, parting, pausing, vacancies
from lmres.rendezvous import decide as deciding
from lmres.rendezvous import resume as resuming
from lmres.rendezvous.agent import Agent
from lmres.rendezvous.codec import encode
from lmres.rendezvous.joining import Joining
from lmres.rendezvous.leases import LeaseTable
from lmres.rendezvous.ledger import Ledger
from lmres.rendezvous.state import Evidence, Finished, Formed, View
from lmres.scout.localize import Suspect, localize

Patch = Callable[[], Any]
_observe, _choose = LeaseTable.observe, resuming.choose
_localize, _witnesses = localize, blame.witnesses
_create, _decide, _observed, _outcome = Ledger.create, deciding.decide, Agent._observed, Agent._outcome


def _replaced(owner: object, name: str, new: object) -> Patch:
    return lambda: mock.patch.object(owner, name, new)


# -- the store's guards -----------------------------------------------------------------------------------------------


def _create_blindly(self: Ledger, key: str, value: str, *, unless_changed: tuple[str, ...] = ()) -> Any:
    return (yield from self.write(Put(key=key, value=value)))


def _create_after_look(self: Ledger, key: str, value: str, *, unless_changed: tuple[str, ...] = ()) -> Any:
    """Looks whether the key is free, then writes it: two requests instead of one."""
    known = self.view.mod_revision(key)
    result = yield Txn(success=(Get(key=key),))
    if any(e.mod_revision != known for e in result.reads[0]):
        return False
    return (yield from self.write(Put(key=key, value=value)))


def _create_alone(self: Ledger, key: str, value: str, *, unless_changed: tuple[str, ...] = ()) -> Any:
    return (yield from _create(self, key, value))


def _without_compares(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same requests, done in any case."""

    def blindly(*args: Any, **kwargs: Any) -> Any:
        steps, result = method(*args, **kwargs), None
        while True:
            try:
                txn = steps.send(result)
            except StopIteration as stop:
                return stop.value
            result = yield replace(txn, compares=())

    return blindly


def _unfenced(self: Ledger) -> Compare:
    return Compare(key="/never", mod_revision=0)


# -- time -------------------------------------------------------------------------------------------------------------


def _forgive_nothing(self: LeaseTable, now_ms: int) -> None:
    self._looked_ms = now_ms


def _half_timeout(self: LeaseTable, node_id: str, now_ms: int) -> bool:
    return self.quiet_ms(node_id, now_ms) >= self.timeout_ms // 2


def _moved(self: LeaseTable, node_id: str) -> int | None:
    seen = self._seen.get(node_id)
    return seen.moved_ms if seen is not None else None


def _torn_lease_skipped(self: LeaseTable, entries: Any, now_ms: int) -> None:
    """Keeps the revision of the last whole lease, so that a member with a torn one can never be given up."""
    whole = [(n, e) for n, e in entries if e.value.endswith("}") and '"Lease"' in e.value and "counter" in e.value]
    _observe(self, whole, now_ms)


# -- the round --------------------------------------------------------------------------------------------------------


def _form_early(self: Agent, head: Any) -> Any:
    first = self.view.ready(head.generation).get(self.me.node_id)
    if first is not None:
        formed = Formed(generation=head.generation, master_address=first.address, master_port=first.master_port)
        yield from self.ledger.create(self.keys.formed(head.generation), encode(formed))


def _all_confirmed(self: Agent, inputs: Any) -> Any:
    return replace(_observed(self, inputs), unconfirmed=frozenset())


def _all_charged(self: Agent, inputs: Any) -> Any:
    return replace(_outcome(self, inputs), charged=True)


def _lost_keep_working(self: Agent, inputs: Any) -> Any:
    outcome = _outcome(self, inputs)
    return outcome if self.end is not None or self.ledger.registered else replace(outcome, stop_workers=False)


def _act_on_proposal(self: Agent, decision: Any, now_ms: int) -> bool:
    """Follows its own proposal without committing it."""
    self.view._head = decision.plan
    return False


def _name_always_free(self: Joining, inputs: Any) -> Any:
    yield from ()
    return True


# -- decisions --------------------------------------------------------------------------------------------------------


def _finish_early(view: Any, policy: Any, observed: Any, checkpointing: Any, **more: Any) -> Any:
    head = view.head()
    if head is not None and head.action != "stop" and view.finished is None and view.done(head.generation):
        record = Finished(outcome="succeeded", exit_code=0, reason="one has ended well", generation=head.generation)
        return deciding.Finish(record=record)
    return _decide(view, policy, observed, checkpointing, **more)


def _standby_counts(view: Any, policy: Any, observed: Any, checkpointing: Any, **more: Any) -> Any:
    decision, head = _decide(view, policy, observed, checkpointing, **more), view.head()
    if isinstance(decision, deciding.Wait) and head is not None and head.action != "stop" and view.finished is None:
        standby = tuple(m.node_id for m in view.standbys())
        if set(standby) - set(head.standby) and not decision.for_standby:
            plan = replace(
                head,
                generation=head.generation + 1,
                from_generation=head.generation,
                action="restart",
                reason="a node has come",
                standby=standby,
                charged=(),
                dismissed={},
            )
            return deciding.Commit(plan=plan, settle="now")
    return decision


def _slots_by_name(view: Any, policy: Any, observed: Any, checkpointing: Any, **more: Any) -> Any:
    decision = _decide(view, policy, observed, checkpointing, **more)
    if isinstance(decision, deciding.Commit) and decision.plan.action in ("restart", "replace"):
        nodes = sorted(decision.plan.active, key=lambda n: n.node_id)
        active = tuple(replace(n, slot=i) for i, n in enumerate(nodes))
        return replace(decision, plan=replace(decision.plan, active=active))
    return decision


def _blame_anybody(first: Any, head: Any, missing: Any) -> Any:
    if first is None or first.cause.rank is None:
        return None
    return next((n for n in head.active if n.node_id == first.cause.node_id), None)


# -- states -----------------------------------------------------------------------------------------------------------


def _choose_the_last_but_one(holdings: Any, **what: Any) -> Any:
    found = _choose(holdings, **what)
    if not hasattr(found, "step"):
        return found
    older = _choose(holdings, **{**what, "banned": what["banned"] | {(found.step, found.origin)}})
    return older if hasattr(older, "step") else found


def _choose_banned(holdings: Any, **what: Any) -> Any:
    return _choose(holdings, **{**what, "banned": frozenset()})


def _choose_half(holdings: Any, **what: Any) -> Any:
    """Is content with the images of some ranks."""
    return _choose(holdings, **{**what, "slots": dict(list(what["slots"].items())[:1])})


def _give_up_at_once(holdings: Any, **what: Any) -> Any:
    """Only own memory counts."""
    found = _choose(holdings, **what)
    lost = hasattr(found, "step") and set(found.source.values()) != {"local"}
    return resuming.Nothing(reason="it is not here", lost=True) if lost else found


def _own_buffer_only(self: Verdict, held: Any) -> bool:
    """The safe image itself may be written over."""
    return held is None or self.is_dead(held) or (self.safe is not None and held <= self.safe)


# -- witnesses --------------------------------------------------------------------------------------------------------


def _left_without_lease(self: parting.Partings, view: View, leases: LeaseTable, member: Any, now_ms: int) -> Any:
    """Two notes, and the lease is not looked at."""
    notes = parting._standing(view, leases, member.node_id)
    return 0 if len(notes) >= parting.needed_witnesses(view) else None


def _notes_outlive_heartbeats(view: View, leases: LeaseTable, node_id: str) -> dict[int, str]:
    return {revision: noted.by for revision, noted in view.parted().get(node_id, ())}


# -- workers that stand still, and doubts -----------------------------------------------------------------------------


def _alarmed_for_ever(view: View, head: Any) -> int | None:
    """Whoever has ever told of its workers stands for an alarm: also who has withdrawn it."""
    told = view.sightings(head.generation)
    keys = [view.keys.sighting(head.generation, n.node_id) for n in head.active if n.node_id in told]
    return min((view.mod_revision(key) for key in keys), default=None)


def _who_waits_is_blamed(sights: Any, **more: Any) -> Any:
    """Who raised the alarm."""
    sights = list(sights)
    found = _localize(sights, **more)
    first = next((s for s in sights if s.alarm and s.workers), None)
    if first is None:
        return found
    return replace(found, suspects=(Suspect(node_id=first.node_id, rank=first.workers[0].rank),), verdict="attributed")


def _doubts_are_clear(sights: Any, **more: Any) -> Any:
    """Of several suspects the first is it."""
    found = _localize(sights, **more)
    return replace(found, verdict="attributed", suspects=found.suspects[:1])


def _reports_are_witnesses(view: View, head: Any, done: Any) -> Any:
    """Whatever the reaction is, it is a failure."""
    with mock.patch.object(Evidence, "reaction", "recover"):
        return _witnesses(view, head, done)


def _anybody_is_replaced(view: View, head: Any) -> Any:
    """Also for evidence that does not know who it is."""
    told = view.evidence(head.generation)
    return {e.cause.node_id: e.cause for e in told if e.reaction == "replace" or e.evict}


def _slow_ones_have_failed(view: View, head: Any, done: Any) -> Any:
    told = [e for e in view.evidence(head.generation) if e.reaction == "replace" and e.attributed]
    return _witnesses(view, head, done) + [blame.Witness(weight="primary", revision=0, cause=e.cause) for e in told]


MUTANTS: dict[str, Patch] = {
    "withdrawn_alarm_counts": _replaced(looking, "alarmed", _alarmed_for_ever),
    "who_waits_is_blamed": _replaced(looking, "localize", _who_waits_is_blamed),
    "unclear_hang_is_blamed": _replaced(looking, "localize", _doubts_are_clear),
    "reports_are_witnesses": _replaced(blame, "witnesses", _reports_are_witnesses),
    "unclear_finding_evicts": _replaced(vacancies, "to_be_replaced", _anybody_is_replaced),
    "slow_ones_have_failed": _replaced(blame, "witnesses", _slow_ones_have_failed),
    "unfit_standby_chosen": _replaced(View, "unfit_reason", lambda self, node_id: None),
    "trust_is_not_asked": _replaced(deciding, "newest_trusted", lambda view, head: None),
    "doubts_are_forgotten": _replaced(resuming, "doubts_of", lambda head, trusted: ()),
    "nobody_stands_still": _replaced(pausing, "moving", lambda view, head: ()),
    "one_witness_is_enough": _replaced(parting, "needed_witnesses", lambda view: 1),
    "lease_is_not_asked": _replaced(parting.Partings, "_left_ms", _left_without_lease),
    "witnesses_are_not_heard": _replaced(parting.Partings, "find", lambda *_: None),
    "notes_outlive_heartbeats": _replaced(parting, "_standing", _notes_outlive_heartbeats),
    "holdings_not_waited_for": _replaced(deciding, "untold", lambda view, head, but: ()),
    "holdings_of_any_generation": _replaced(resuming, "_is_fresh", lambda member, revision, held, **_: True),
    "newest_state_passed_over": _replaced(resuming, "choose", _choose_the_last_but_one),
    "banned_state_taken": _replaced(resuming, "choose", _choose_banned),
    "state_of_some_ranks": _replaced(resuming, "choose", _choose_half),
    "copies_elsewhere_overlooked": _replaced(resuming, "choose", _give_up_at_once),
    "safe_image_overwritten": _replaced(Verdict, "reusable", _own_buffer_only),
    "plan_without_compare": _replaced(Ledger, "create", _create_blindly),
    "plan_after_separate_look": _replaced(Ledger, "create", _create_after_look),
    "end_and_plan_not_exclusive": _replaced(Ledger, "create", _create_alone),
    "give_up_without_compare": _replaced(Ledger, "give_up", _without_compares(Ledger.give_up)),
    "wipe_without_door": _replaced(Ledger, "clear", _without_compares(Ledger.clear)),
    "no_gap_forgiveness": _replaced(LeaseTable, "_forgive_gap", _forgive_nothing),
    "lease_over_at_half_time": _replaced(LeaseTable, "is_over", _half_timeout),
    "late_on_plain_clock": _replaced(LeaseTable, "attended_ms", lambda self, now_ms: now_ms),
    "heard_is_forgiven": _replaced(LeaseTable, "heard_ms", _moved),
    "formed_before_all_ready": _replaced(Agent, "_say_formed", _form_early),
    "vague_evidence_at_once": _replaced(Agent, "_observed", _all_confirmed),
    "everybody_charged": _replaced(Agent, "_outcome", _all_charged),
    "lost_agent_keeps_workers": _replaced(Agent, "_outcome", _lost_keep_working),
    "acts_on_own_proposal": _replaced(Agent, "_settled", _act_on_proposal),
    "displaced_agent_writes": _replaced(Ledger, "_registration", _unfenced),
    "same_incarnation_again": lambda: mock.patch("lmres.rendezvous.joining.replace", lambda me, incarnation: me),
    "foreign_records_believed": _replaced(View, "_belongs", lambda self, record, key: True),
    "torn_lease_skipped": _replaced(LeaseTable, "observe", _torn_lease_skipped),
    "name_never_taken": _replaced(Joining, "_name_is_free", _name_always_free),
    "quarantine_forgotten": _replaced(deciding, "_still_held", lambda view, item: False),
    "success_of_one": lambda: mock.patch("lmres.rendezvous.agent.decide", _finish_early),
    "standby_makes_a_plan": lambda: mock.patch("lmres.rendezvous.agent.decide", _standby_counts),
    "slots_by_name": lambda: mock.patch("lmres.rendezvous.agent.decide", _slots_by_name),
    "broken_connection_blames": _replaced(blame, "charged_node", _blame_anybody),
}
"""Name to patch. ``README.md`` says what each breaks."""


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    with MUTANTS[name]():
        yield


FIRST_SEEDS = {
    "banned_state_taken": 150,
    "heard_is_forgiven": 500,
    "holdings_of_any_generation": 50,
    "displaced_agent_writes": 56,
    "end_and_plan_not_exclusive": 475,
    "foreign_records_believed": 12,
    "give_up_without_compare": 27,
    "late_on_plain_clock": 16,
    "lost_agent_keeps_workers": 134,
    "quarantine_forgotten": 11,
    "same_incarnation_again": 34,
    "torn_lease_skipped": 18,
    "wipe_without_door": 101,
    "witnesses_are_not_heard": 160,
    "withdrawn_alarm_counts": 70,
    "doubts_are_forgotten": 90,
}
"""Where the search begins, to save time: the seed that found the bug when this was written, if not among the first."""
