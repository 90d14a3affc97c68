"""Who holds up the others: from sightings of all workers to suspects.

The sightings are taken at about the same moment, by each agent of its own workers. Ranks are equals: nobody's words
count more than another's, so a verdict is *attributed* only to whom a direct witness or a strict majority names;
everything else is *inconclusive*, with whoever is concerned named. The rules, the first that fits counts:

(a) **Stopped.** A process in state T or t, or in D for its whole time of quiet, that is behind the others, or of which
    that is not known, or while nobody else is to blame: its state is a direct witness.
(b) **Desync.** The operations of each process group are aligned by their numbers. At the first number where operation
    or shape differ, a strict majority of the group's members names the deviators; two ranks, or no majority, name all.
    A deviator whose later operations fit the others' one further has left one out (one earlier: it has made one too
    many). Shapes do not count where they may differ (gather, all-to-all). Sends and receives bear no numbers: there
    ranks differ by design.
(c) **Wait-for.** Who has entered fewer operations of a group than others holds up those of them that wait in it. A rank
    that itself waits in a collective of another group only passes the delay on; the others are the roots, and what
    they are doing is the cause. If all that are behind wait for each other, it is a cycle. A root that is still
    within its own time (``timeout_ms``) *excuses* the waiting: rank 0 may write a long checkpoint, or evaluate, while
    all wait for it. That ends after ``MAX_EXCUSES`` times the time of those who wait. If the user has set that time, a
    rank that moves but never comes is at fault then. With ``auto`` it ends after half an hour at the soonest, and who
    moves is named but never at fault: nobody has said what is too long.
    On an accelerator nobody seems to wait, since programs run ahead of its operations: who is behind is so still.
(d) **Uneven steps.** Where all have entered the same, but at one number in different optimizer steps, the deviators are
    named; inconclusive, since steps of a rank's own (uneven inputs, local steps) look alike. Steps are compared among
    ranks that had equal ones at the number before: not all ranks of a program have an optimizer.
(e) **Nobody comes out.** All members of a group have entered the same and wait in it: the network, or the backend. No
    suspect. If one is not inside (it sleeps, and others wait for it in receives), the next rule looks.
(f) **No collective says anything.** A minority that is quiet among others that are not is at fault, so is the only rank
    there is; but who may itself be waiting for somebody in a way that is not seen (``_MAY_WAIT``: it polls a store or a
    file) is at fault only if others of a group of its wait too, and is excused by those that move as in (c). All quiet
    in the same phase: that phase is named, nobody is.

Ranks of a node that has told nothing are unknown: suspects as "not heard", and only while nobody else is. Of a rank
whose page can not be read only the state of its process is known. Sources of the view: PyTorch's Flight Recorder
(wait-for over sequence numbers); symmetric agreement among peers as in arXiv 2608.11034.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lmres.scout.scene import (
    DOING_ALL,
    MAX_NAMED,
    STATES,
    Group,
    Rank,
    Scene,
    activity,
    missed,
    numbers,
    op_words,
    place,
    plain_op,
    quiet_words,
    seconds,
    silence,
    who,
)
from lmres.scout.sighting import OpMark, Sighting

MAX_EXCUSES = 4
AUTO_EXCUSE_MS = 1_800_000
"""A healthy rank may go on for this long before it comes, where nobody has set a time."""
_MAY_WAIT = frozenset({"start", "user", "collective", "end"})
MAX_DETAIL = 1200
_FREE_SHAPES = frozenset({"gather", "scatter", "alltoall", "alltoall_base", "allgather", "reduce_scatter"})
"""With lists of tensors, which may be uneven. Those of one tensor (``_allgather_base``) may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    node_id: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Localized:
    """``detail``: one or two sentences for people. ``suspects`` may be named although the verdict is inconclusive.

    ``excused``: those whom the others wait for are still within their own time; it is no hang yet.
    """

    failure_class: Literal["hang", "collective_desync"]
    verdict: Literal["attributed", "inconclusive"]
    suspects: tuple[Suspect, ...]
    detail: str
    excused: bool = False


def localize(sightings: Iterable[Sighting], *, unheard: Mapping[str, Sequence[int]] | None = None) -> Localized:
    """The newest sighting of each active node, as far as there is one. ``unheard``: the ranks of those without one.

    The order of the sightings does not matter. Without an alarm only a desync means anything.
    """
    scene = Scene(sightings, unheard or {})
    return (
        _only_rank(scene)
        or _stopped(scene, direct=True)
        or _desync(scene)
        or _holding_up(scene)
        or _stopped(scene, direct=False)
        or _passing_on(scene)
        or _uneven_steps(scene)
        or _not_heard(scene)
        or _none_comes_out(scene)
        or _by_quiet(scene)
    )


# -- (a) stopped ------------------------------------------------------------------------------------------------------


def _stopped(scene: Scene, *, direct: bool) -> Localized | None:
    """``direct``: those that are behind, or of which that is not known. Else all: nobody else was to blame."""
    stopped = [r for r in scene.ranks.values() if r.stopped]
    if direct:
        known = {n for g in scene.groups for n in g.entered}
        stopped = [r for r in stopped if scene.behind(r.number) or r.number not in known]
    if not stopped:
        return None
    words = [f"{missed(scene, r)}: {_state_words(r)}" for r in stopped[:MAX_NAMED]]
    return _hang("attributed", stopped, "; ".join(words))


def _state_words(rank: Rank) -> str:
    return f"{STATES[rank.sight.state]}, for {seconds(rank.sight.quiet_ms)}"


# -- (b) desync -------------------------------------------------------------------------------------------------------

_Look = tuple[str, str, int]


def _desync(scene: Scene) -> Localized | None:
    for group in scene.groups:
        for number, here in _by_number(group):
            if len({_kind(m) for m in here.values()}) > 1:
                return _desync_of(scene, group, number, here, steps=False)
    return None


def _uneven_steps(scene: Scene) -> Localized | None:
    """Only of those that make no progress: alone, steps that differ mean nothing."""
    for group in scene.groups if scene.alarm else ():
        found = _first_uneven(group)
        if found is not None:
            moving = [r for r in scene.ranks.values() if r.moves]
            made = _desync_of(scene, group, *found, steps=True)
            return replace(made, verdict="inconclusive", excused=_excused(scene, moving))
    return None


def _by_number(group: Group) -> list[tuple[int, dict[int, OpMark]]]:
    """The members' operations of each number."""
    marks: dict[int, dict[int, OpMark]] = {}
    for rank in sorted(group.sights):
        for mark in group.sights[rank].recent:
            if mark.number > 0:
                marks.setdefault(mark.number, {})[rank] = mark
    return sorted(marks.items())


def _first_uneven(group: Group) -> tuple[int, dict[int, OpMark]] | None:
    """The lowest number at which members' steps differ that were equal before, and their operations there."""
    before: dict[int, OpMark] = {}
    for number, here in _by_number(group):
        peers: dict[int, dict[int, OpMark]] = {}
        for rank, mark in here.items():
            if rank in before and before[rank].number == number - 1 and group.ranks[rank].sight.step > 0:
                peers.setdefault(before[rank].step, {})[rank] = mark
        for equals in peers.values():
            if len({m.step for m in equals.values()}) > 1:
                return number, equals
        before = here
    return None


def _kind(mark: OpMark) -> tuple[str, str]:
    op = plain_op(mark.op)
    return op, "" if op in _FREE_SHAPES else mark.shape


def _desync_of(scene: Scene, group: Group, number: int, here: Mapping[int, OpMark], *, steps: bool) -> Localized:
    looks: dict[int, object] = {rank: m.step if steps else _kind(m) for rank, m in here.items()}
    most, count = Counter(looks.values()).most_common(1)[0]
    clear = count * 2 > group.size
    odd = sorted(rank for rank, look in looks.items() if look != most) if clear else sorted(looks)
    usual = next(m for rank, m in sorted(here.items()) if looks[rank] == most)
    where = f"in operation number {number} of {group.title}"
    sides = []
    for look in sorted({repr(looks[r]) for r in odd}):
        ranks = [r for r in odd if repr(looks[r]) == look]
        sides.append(f"{who(scene, ranks)} entered {op_words(here[ranks[0]])}")
    if clear:
        rest = [r for r in sorted(looks) if looks[r] == most]
        sides.append(f"ranks {numbers(rest)} entered {op_words(usual)}")
        shifted = next((s for s in (_shift(group, r, rest[0], number) for r in odd) if s), "")
    else:
        sides.append("there is no majority")
        shifted = ""
    return Localized(
        failure_class="collective_desync",
        verdict="attributed" if clear else "inconclusive",
        suspects=tuple(Suspect(node_id=scene.ranks[r].node_id, rank=r) for r in odd),
        detail=_bounded(f"{where} {', '.join(sides)}{shifted}{silence(scene)}"),
    )


def _shift(group: Group, odd: int, usual: int, number: int) -> str:
    """Whether the odd rank's operations from here on are the others', one later or one earlier.

    Where the others wait in this one, so that none follows yet, what followed it the last time tells.
    """
    mine = {m.number: _kind(m) for m in group.sights[odd].recent if m.number >= number}
    theirs = {m.number: m for m in group.sights[usual].recent if m.number > 0}
    kinds = {n: _kind(m) for n, m in theirs.items()}
    if number not in theirs or number not in mine:
        return ""
    left_out = f"; it seems that rank {odd} has left out {op_words(theirs[number])}"
    later = [(kind, kinds[n + 1]) for n, kind in mine.items() if n + 1 in kinds]
    if later and all(a == b for a, b in later):
        return left_out
    if not later:
        before = [n for n in sorted(kinds) if n + 1 < number and kinds[n] == kinds[number] and n + 1 in kinds]
        return left_out if before and kinds[before[-1] + 1] == mine[number] else ""
    earlier = [(kind, kinds[n - 1]) for n, kind in mine.items() if n > number and n - 1 in kinds]
    if earlier and all(a == b for a, b in earlier):
        return f"; it seems that rank {odd} has made one operation too many before {op_words(theirs[number])}"
    return ""


# -- (c) wait-for -----------------------------------------------------------------------------------------------------


def _holding_up(scene: Scene) -> Localized | None:
    waits = {n: scene.waits_for(n) for n in scene.ranks}
    behind = _behind(scene, waits)
    roots = [r for r in behind if not waits[r.number] and not _waits_elsewhere(scene, r.number)]
    roots = [r for r in roots if not r.is_inside] or roots
    if not roots:
        return None
    named = [r for r in roots if r.is_quiet] or roots
    words = [f"{missed(scene, r)}: {activity(r)}" for r in named[:MAX_NAMED]]
    if named[0].is_inside:
        words.append("what it waits for there can not be told")
    unsure = named[0].is_inside or all(r.moves and r.auto for r in named)
    return _hang(
        "inconclusive" if unsure else "attributed",
        named,
        "; ".join(words) + silence(scene),
        excused=_excused(scene, roots) or _nobody_waits(scene, roots, waits),
    )


def _nobody_waits(scene: Scene, roots: Sequence[Rank], waits: Mapping[int, set[int]]) -> bool:
    """The sightings are not of one moment: others have just moved, so what is behind was seen before they did."""
    others = [r for r in scene.ranks.values() if r not in roots]
    return not any(waits.values()) and any(2 * r.sight.quiet_ms < r.timeout_ms for r in others)


def _behind(scene: Scene, waits: Mapping[int, set[int]]) -> list[Rank]:
    """Those for whom somebody waits, else all that have entered less."""
    behind = [r for n, r in scene.ranks.items() if scene.behind(n)]
    blocking = {b for others in waits.values() for b in others}
    return [r for r in behind if r.number in blocking] or behind


def _excused(scene: Scene, roots: Sequence[Rank]) -> bool:
    """Whether those whom the others wait for are all within their own time, and the others may wait so long."""
    if not roots or any(r.is_quiet for r in roots):
        return False
    longest_ms = max(r.timeout_ms for r in roots)
    others = [r for r in scene.ranks.values() if r not in roots]
    return all(r.sight.quiet_ms < max(_patience_ms(r), longest_ms) for r in others)


def _patience_ms(rank: Rank) -> int:
    return max(MAX_EXCUSES * rank.timeout_ms, AUTO_EXCUSE_MS if rank.auto else 0)


def _waits_elsewhere(scene: Scene, rank: int) -> bool:
    """In a collective of a group in which it is not behind."""
    return scene.ranks[rank].is_inside and any(g.waits(rank) and not g.is_behind(rank) for g in scene.groups)


def _passing_on(scene: Scene) -> Localized | None:
    """All that are behind wait themselves: in a circle, or in a group that nobody comes out of."""
    waits = {n: scene.waits_for(n) for n in scene.ranks}
    behind = _behind(scene, waits)
    if not behind:
        return None
    circle = _circle(waits)
    if circle:
        each = ", which waits for ".join(scene.ranks[n].named for n in (*circle, circle[0]))
        words = f"ranks wait for each other in collectives of different groups: {each}"
        return _hang("inconclusive", [scene.ranks[n] for n in circle], words + silence(scene))
    groups = [g for g in scene.groups if any(g.waits(r.number) and not g.is_behind(r.number) for r in behind)]
    where = " and ".join(g.title for g in groups)
    words = f"{who(scene, [r.number for r in behind])} hold up the others, but wait themselves in {where}"
    outside = [scene.ranks[n] for n in sorted({n for g in groups for n in g.entered if not g.waits(n)})]
    if outside:
        words += "".join(f"; {r.named}: {activity(r)}" for r in outside[:MAX_NAMED])
        return _hang("inconclusive", outside, f"{words}{silence(scene)}", excused=_excused(scene, outside))
    if scene.silent_nodes:
        return _hang("inconclusive", _unheard_suspects(scene), f"{words}{silence(scene)}")
    words = f"{words}, where all have entered the same and none comes out: the network, or the backend"
    return _hang("inconclusive", [], words)


def _circle(waits: Mapping[int, set[int]]) -> tuple[int, ...]:
    """One circle of ranks that wait for each other, from its lowest rank on; empty if there is none."""
    for start in sorted(waits):
        path, seen = [start], {start}
        stack = [iter(sorted(waits[start]))]
        while stack:
            following = next(stack[-1], None)
            if following is None:
                stack.pop()
                path.pop()
            elif following == start:
                return tuple(path)
            elif following not in seen and following in waits:
                seen.add(following)
                path.append(following)
                stack.append(iter(sorted(waits[following])))
    return ()


# -- the rest ---------------------------------------------------------------------------------------------------------


def _only_rank(scene: Scene) -> Localized | None:
    if len(scene.ranks) != 1 or scene.unheard or scene.silent_nodes:
        return None
    rank = next(iter(scene.ranks.values()))
    if rank.sight.state in STATES and rank.sight.state != "D":
        return _hang("attributed", [rank], f"{rank.named} makes no progress: {_state_words(rank)}")
    return _hang("attributed", [rank], f"{rank.named} makes no progress: {activity(rank)}")


def _not_heard(scene: Scene) -> Localized | None:
    if not scene.silent_nodes:
        return None
    return _hang("inconclusive", _unheard_suspects(scene), f"the ranks here wait, {quiet_words(scene)}{silence(scene)}")


def _none_comes_out(scene: Scene) -> Localized | None:
    for group in scene.groups:
        inside = [n for n in group.entered if group.waits(n)]
        if inside and len(inside) == len(group.entered):
            mark = group.mark(group.highest)
            what = op_words(mark) if mark is not None else "an operation"
            words = (
                f"all of ranks {numbers(group.entered)} have entered {what}, number {group.highest} of {group.title}"
            )
            return _hang(
                "inconclusive", [], f"{words}, and none comes out: the network, or the backend; {quiet_words(scene)}"
            )
    return None


def _by_quiet(scene: Scene) -> Localized:
    ranks = list(scene.ranks.values())
    quiet = [r for r in ranks if r.is_quiet]
    moving = [r for r in ranks if r.moves]
    sure = [r for r in quiet if r.phase not in _MAY_WAIT or (not r.is_inside and scene.is_awaited(r.number))]
    if sure and len(quiet) * 2 < len(ranks):
        words = [f"{r.named} makes no progress while the others do: {activity(r)}" for r in sure[:MAX_NAMED]]
        return _hang("attributed", sure, "; ".join(words))
    if quiet and moving and not sure:
        words = [f"{r.named}: {activity(r)}" for r in quiet[:MAX_NAMED]]
        text = f"{'; '.join(words)}; maybe waiting for {who(scene, [r.number for r in moving])}"
        return _hang("inconclusive", moving, f"{text}{silence(scene)}", excused=_excused(scene, moving))
    inside = {r.number for r in ranks if r.phase == "collective"}
    outside = [r for r in quiet if r.number not in inside]
    if inside and outside:
        words = [f"{r.named} {activity(r).removeprefix('it ')}" for r in outside[:MAX_NAMED]]
        return _hang("inconclusive", outside, f"ranks {numbers(inside)} wait in a collective; {'; '.join(words)}")
    phases = sorted({r.phase for r in quiet})
    if len(phases) == 1:
        where = next((f", at {place(r.sight.stack)}" for r in quiet if r.sight.stack), "")
        all_of = f"ranks {numbers(r.number for r in quiet)} all {DOING_ALL[phases[0]]}{where}{_even(scene)}"
        return _hang("inconclusive", [], f"{all_of}; {quiet_words(scene)}")
    words = [f"{r.named}: {activity(r)}" for r in quiet[:MAX_NAMED]]
    return _hang("inconclusive", [], "; ".join([f"no progress, {quiet_words(scene)}", *words]))


def _even(scene: Scene) -> str:
    group = scene.default
    if group is None or group.highest == 0:
        return ""
    return f", after the same {group.highest} operations of {group.title}"


# -- words ------------------------------------------------------------------------------------------------------------


def _hang(
    verdict: Literal["attributed", "inconclusive"],
    ranks: Iterable[Rank | Suspect],
    detail: str,
    *,
    excused: bool = False,
) -> Localized:
    named = {r if isinstance(r, Suspect) else Suspect(node_id=r.node_id, rank=r.number) for r in ranks}
    suspects = tuple(sorted(named, key=lambda s: (s.rank, s.node_id)))
    return Localized(failure_class="hang", verdict=verdict, suspects=suspects, detail=_bounded(detail), excused=excused)


def _unheard_suspects(scene: Scene) -> list[Suspect]:
    return [Suspect(node_id=node_id, rank=rank) for rank, node_id in sorted(scene.unheard.items())]


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_DETAIL else text[: MAX_DETAIL - 1] + "…"
