"""Who was first, and what it costs them: from evidence to the cause of a recovery.

A witness is a piece of evidence or a node that has gone. The first cause is the heaviest, then the earliest. It is
*clear* only if nothing of the same weight elsewhere could as well have been first; an unclear one strikes nobody. A
failure that keeps coming back at the same step is counted (``Streak``), so that a failing run ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lmres.policy import Recovery
from lmres.rendezvous.plan import ActiveNode, Cause, Plan, Streak, Strike
from lmres.rendezvous.state import Evidence, View
from lmres.scout.evidence import WEIGHT_ORDER

SOON_MS = 120_000
"""A failure this soon after the start of its generation may be "the same" even where no step is known."""
_STRIKING = frozenset({"process_crash", "out_of_memory", "hang"})
_LOCALIZED = frozenset({"hang", "collective_desync", "silent_corruption"})
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|[0-9]+")

NO_WAY_BACK = "lmres.errors.ResumeError"
"""The exception's type in the report of a worker that could not be brought back to its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    weight: str
    revision: int
    cause: Cause
    boot_id: str = ""
    at_ms: int = 0
    fit: bool = True
    slot: int | None = None
    attributed: bool = True


def witnesses(view: View, head: Plan, done: frozenset[str]) -> list[Witness]:
    """Evidence of this generation, and the nodes that have gone, in the order of arrival."""
    found = []
    prefix = f"{view.keys.reg}evidence/{head.generation:08d}/"
    for stored, e in view.under(prefix, Evidence):
        if e.generation == head.generation and e.reaction == "recover":
            found.append(
                Witness(
                    weight=e.weight,
                    revision=stored.created,
                    cause=e.cause,
                    boot_id=e.boot_id,
                    at_ms=e.at_ms,
                    fit=e.fit,
                    attributed=e.attributed,
                )
            )
    for node in head.active:
        if node.node_id not in done:
            lost = gone_witness(view, node)
            if lost is not None:
                found.append(lost)
    return sorted(found, key=lambda w: w.revision)


def gone_witness(view: View, node: ActiveNode) -> Witness | None:
    if view.is_live(node.node_id, node.incarnation):
        return None
    member, gone = view.member(node.node_id), view.gone(node.node_id)
    host = member.host if member is not None else "unknown"
    if gone is not None and gone.incarnation == node.incarnation:
        revision = view.mod_revision(view.keys.gone(node.node_id))
        failure_class = "drain" if gone.how == "left" and gone.planned else "node_lost"
        detail, step, quiet_ms = gone.reason, gone.step, gone.quiet_ms
    else:
        revision = view.mod_revision(view.keys.member(node.node_id))
        failure_class, detail, step, quiet_ms = "node_lost", "its agent was started anew", None, None
    cause = Cause(
        failure_class=failure_class,
        node_id=node.node_id,
        incarnation=node.incarnation,
        host=host,
        detail=detail,
        step=step,
        detect_ms=quiet_ms,
    )
    return Witness(weight="primary", revision=revision, cause=cause, slot=node.slot)


def late_witnesses(view: View, head: Plan, late: frozenset[str]) -> list[Witness]:
    """Nodes that live but do not become ready: unfit as long as that lasts."""
    found = []
    for node in head.active:
        if node.node_id in late and view.is_live(node.node_id, node.incarnation):
            member = view.member(node.node_id)
            cause = Cause(
                failure_class="node_unhealthy",
                node_id=node.node_id,
                incarnation=node.incarnation,
                host=member.host if member is not None else "unknown",
                detail=f"was not ready for generation {head.generation} in time",
            )
            found.append(Witness(weight="primary", revision=view.revision, cause=cause, fit=False))
    return found


def first_cause(found: list[Witness]) -> Witness | None:
    """The heaviest weight, then arrival; on one host (one boot) its own clock is finer than arrival."""
    if not found:
        return None
    best = min(found, key=lambda w: (WEIGHT_ORDER[w.weight], w.revision))
    if not best.boot_id:
        return best
    rivals = [w for w in found if w.weight == best.weight and w.boot_id == best.boot_id]
    return min(rivals, key=lambda w: (w.at_ms, w.revision))


def is_clear(first: Witness | None, found: list[Witness]) -> bool:
    """Whether the first cause is more than the first to be heard of.

    A broken connection blames nobody; of ambiguous exits on several nodes all but one are consequences, and nobody can
    say which one is not.
    """
    if first is None or first.weight == "primary":
        return first is None or first.attributed
    doubtful = {w.cause.node_id for w in found if w.weight == "ambiguous"}
    return first.weight == "ambiguous" and len(doubtful) == 1


def has_no_way_back(cause: Cause) -> bool:
    """The program does not stand where it stood, in this life or in any other: to start it again changes nothing."""
    return cause.exception is not None and cause.exception.type_name == NO_WAY_BACK


def next_streak(head: Plan, first: Witness | None, clear: bool, generation_ms: int, resume_step: int) -> Streak:
    """``resume_step``: where the next generation goes on; 0 where no state is restored.

    A failure after an unknown step is "the same" only soon after the start: a week apart it is another one. Nor is it
    the same if the run has come further: the next generation resumes at a later step than this one did.
    """
    signature = _signature(first, clear, restored=resume_step > 0) if first is not None else ""
    if first is None or not signature:
        return Streak()
    tells = bool(first.cause.step) or generation_ms <= SOON_MS
    again = signature == head.streak.signature and tells and resume_step <= head.recovery_step
    return Streak(signature=signature, count=head.streak.count + 1 if again else 1)


def _signature(first: Witness, clear: bool, *, restored: bool) -> str:
    """Equal for the same failure at the same step. Empty where "the same" can not be told.

    A signal or a lost node says little by itself: it counts only after a known step. Numbers in a message (ports,
    process ids, addresses) change from time to time, and which of several ranks is heard first is chance. ``restored``:
    a state is, so that steps are counted from the start of the run, else from that of the generation.
    """
    cause = first.cause
    if cause.failure_class == "out_of_memory" and cause.step and not restored:
        return ""  # a leak ends every generation after as many steps, however far the run has come
    if not clear:
        what = "several workers, no clear cause"
    elif cause.exception is not None:
        lines = cause.exception.message.strip().splitlines()
        what = f"{cause.exception.type_name}: {_NUMBER.sub('#', lines[0][:200]) if lines else ''}"
    elif cause.rank is not None and cause.exit_status is not None:
        if cause.exit_status < 0 and not cause.step:
            return ""
        what = f"rank {cause.rank} {cause.detail}"
    elif cause.failure_class in _LOCALIZED and cause.step:
        what = f"rank {cause.rank}"
    elif cause.failure_class == "node_lost" and cause.step:
        what = f"slot {first.slot}"
    else:
        return ""
    failure_class = cause.failure_class if clear else "unknown"
    return f"{failure_class} | {what} | step {cause.step}"


def charged_node(first: Witness | None, head: Plan, missing: frozenset[str]) -> ActiveNode | None:
    """The node whose worker was at fault, if a worker was."""
    if first is None or first.weight == "secondary" or first.cause.rank is None:
        return None
    for node in head.active:
        if node.node_id == first.cause.node_id and node.node_id not in missing:
            return node
    return None


def next_strikes(
    head: Plan, first: Witness | None, charged: ActiveNode | None, run_ms: int, policy: Recovery
) -> tuple[Strike, ...]:
    """``charged`` None: nobody is struck, old strikes are kept as long as they count."""
    window_ms = int(policy.strikes_window_s * 1000)
    kept = [s for s in head.strikes if run_ms - s.at_run_ms <= window_ms]
    if charged is not None and first is not None and first.cause.failure_class in _STRIKING:
        kept.append(Strike(node_id=charged.node_id, at_run_ms=run_ms))
    return tuple(kept)
