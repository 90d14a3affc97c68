"""Localization and stragglers: what must hold for any group, whoever is at fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmres.scout.localize import Localized, Suspect, localize
from lmres.scout.sighting import PHASES, GroupSight, OpMark, Pace, Sighting, WorkerSight
from lmres.scout.straggler import Slow, StragglerJudge

TIMEOUT_MS = 3_000
Ops = tuple[tuple[str, str], ...]

ops = st.lists(
    st.tuples(
        st.sampled_from(["allreduce", "broadcast", "_allgather_base"]),
        st.sampled_from(["float32[1]", "float32[8]", "bfloat16[8]"]),
    ),
    min_size=3,
    max_size=12,
).map(tuple)


def sight_of(rank: int, entered: Ops, size: int, *, waits: bool, **fields: object) -> WorkerSight:
    recent = tuple(OpMark(number=i + 1, op=op, shape=shape, step=i // 2 + 1) for i, (op, shape) in enumerate(entered))
    count = len(entered)
    group = GroupSight(
        name="0", ranks=tuple(range(size)), entered=count, left=count - 1 if waits else count, recent=recent
    )
    made = WorkerSight(
        rank=rank,
        local_rank=0,
        pid=rank + 1,
        step=9,
        phase="collective" if waits else "user",
        phase_ms=3_100,
        quiet_ms=3_100,
        state="S",
        groups=(group,),
        timeout_ms=TIMEOUT_MS,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def sightings(workers: list[WorkerSight], per_node: int = 1) -> list[Sighting]:
    nodes: dict[int, list[WorkerSight]] = {}
    for w in workers:
        nodes.setdefault(w.rank // per_node, []).append(w)
    return [
        Sighting(
            generation=1,
            node_id=f"n{n}",
            incarnation="i",
            number=1,
            alarm=True,
            timeout_ms=TIMEOUT_MS,
            workers=tuple(on_node),
        )
        for n, on_node in sorted(nodes.items())
    ]


@st.composite
def anything(draw: st.DrawFn) -> list[WorkerSight]:
    """Any state of some ranks: behind, ahead, stopped, blind, in any phase, in one or two groups."""
    size = draw(st.integers(1, 6))
    plain = draw(ops)
    found = []
    for rank in range(size):
        mine = plain[: draw(st.integers(0, len(plain)))]
        if mine and draw(st.booleans()):
            mine = (*mine[:-1], draw(ops)[0])
        w = sight_of(
            rank,
            mine,
            size,
            waits=draw(st.booleans()),
            phase=draw(st.sampled_from(PHASES)),
            state=draw(st.sampled_from(["R", "S", "D", "T", "t", "Z", ""])),
            quiet_ms=draw(st.sampled_from([0, 2_999, 3_000, 100_000])),
            blind=draw(st.sampled_from(["", "", "", "broken"])),
        )
        inner = draw(st.integers(0, 3))
        other = GroupSight(name="7", ranks=(0, 1, 2), entered=inner, left=draw(st.integers(0, inner)))
        found.append(replace(w, groups=(*w.groups, other)) if draw(st.booleans()) else w)
    return found


def same_but_words(a: Localized, b: Localized) -> bool:
    return (a.failure_class, a.verdict, a.suspects, a.excused) == (b.failure_class, b.verdict, b.suspects, b.excused)


@given(anything(), st.data())
def test_the_order_of_sightings_does_not_matter(workers: list[WorkerSight], data: st.DataObject) -> None:
    made = sightings(workers, per_node=data.draw(st.integers(1, 2)))
    mixed = [replace(s, workers=tuple(data.draw(st.permutations(s.workers)))) for s in data.draw(st.permutations(made))]
    assert localize(mixed) == localize(made)


@given(anything(), st.data())
def test_renaming_ranks_renames_suspects(workers: list[WorkerSight], data: st.DataObject) -> None:
    """Ranks are equals: no number is better than another."""
    to = data.draw(st.permutations(range(len(workers))))

    def renamed(w: WorkerSight) -> WorkerSight:
        def ranks(g: GroupSight) -> tuple[int, ...]:
            return tuple(sorted(to[r] if r < len(to) else r for r in g.ranks))

        return replace(w, rank=to[w.rank], groups=tuple(replace(g, ranks=ranks(g)) for g in w.groups))

    before = localize(sightings(workers))
    after = localize(sightings([renamed(w) for w in workers]))
    mapped = tuple(sorted((Suspect(node_id=f"n{to[s.rank]}", rank=to[s.rank]) for s in before.suspects), key=_rank))
    assert same_but_words(after, replace(before, suspects=mapped))


def _rank(suspect: Suspect) -> int:
    return suspect.rank


@given(anything())
def test_whoever_is_named_was_seen_and_words_are_bounded(workers: list[WorkerSight]) -> None:
    found = localize(sightings(workers))
    assert {s.rank for s in found.suspects} <= {w.rank for w in workers}
    assert len({s.rank for s in found.suspects}) == len(found.suspects)
    assert 0 < len(found.detail) <= 1_200
    if found.verdict == "attributed":
        assert found.suspects


@given(ops, st.integers(3, 8), st.data())
def test_with_a_majority_of_equals_the_deviator_is_found(plain: Ops, size: int, data: st.DataObject) -> None:
    odd_ranks = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=(size - 1) // 2))
    at = data.draw(st.integers(0, len(plain) - 1))
    odd = (*plain[:at], ("allreduce", "float32[77]"), *plain[at + 1 :])
    workers = [sight_of(r, odd if r in odd_ranks else plain, size, waits=True) for r in range(size)]
    found = localize(sightings(workers))
    assert (found.failure_class, found.verdict) == ("collective_desync", "attributed")
    assert {s.rank for s in found.suspects} == odd_ranks
    assert f"number {at + 1} " in found.detail and "float32[77]" in found.detail


@given(ops, st.integers(2, 8))
def test_when_all_are_alike_nobody_is_named(plain: Ops, size: int) -> None:
    for waits in (True, False):
        found = localize(sightings([sight_of(r, plain, size, waits=waits) for r in range(size)]))
        assert (found.failure_class, found.verdict, found.suspects) == ("hang", "inconclusive", ())


@given(ops, st.integers(2, 8), st.data())
def test_the_only_one_that_has_not_come_is_found(plain: Ops, size: int, data: st.DataObject) -> None:
    late = data.draw(st.integers(0, size - 1))
    behind = plain[: data.draw(st.integers(0, len(plain) - 1))]
    phase = data.draw(st.sampled_from(["user", "forward", "backward", "optimizer", "loader", "checkpoint_io"]))
    state = data.draw(st.sampled_from(["R", "S", "T", "D"]))
    workers = [sight_of(r, plain, size, waits=True) for r in range(size) if r != late]
    workers.append(sight_of(late, behind, size, waits=False, phase=phase, state=state))
    found = localize(sightings(workers))
    assert (found.failure_class, found.verdict, found.excused) == ("hang", "attributed", False)
    assert [s.rank for s in found.suspects] == [late]


# -- stragglers -------------------------------------------------------------------------------------------------------


def verdicts(costs: dict[int, int], *, ranks_per_node: int = 1, windows: int = 3) -> list[Slow]:
    judge = StragglerJudge(ranks=len(costs), slowdown=1.5, windows=3)
    found: list[Slow] = []
    for n in range(windows + 1):
        paces: dict[str, tuple[Pace, ...]] = {}
        for r, cost_us in costs.items():
            pace = Pace(rank=r, steps=10 * n, busy_us=10 * n * cost_us, input_us=0, waiting_us=0)
            node = f"n{r // ranks_per_node}"
            paces[node] = (*paces.get(node, ()), pace)
        found += judge.see(paces, 1_000 * n)
    return found


@given(st.integers(2, 12), st.integers(1, 10**7), st.data())
def test_one_slow_rank_among_equals_is_told_once(size: int, cost_us: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, size - 1))
    costs = {r: cost_us + (max(5_000, cost_us) if r == slow else 0) for r in range(size)}
    found = verdicts(costs, windows=8)
    assert [(s.rank, s.node_id, s.cause) for s in found] == [(slow, f"n{slow}", "compute")]


@given(st.lists(st.integers(1_000, 1_490), min_size=1, max_size=12), st.integers(1, 1_000))
def test_no_verdict_while_all_are_about_alike(shares: list[int], scale: int) -> None:
    assert verdicts({r: share * scale for r, share in enumerate(shares)}, windows=8) == []


@pytest.mark.parametrize("per_node", [1, 2, 4])
@given(st.data())
def test_at_most_half_of_the_ranks_are_ever_slow(per_node: int, data: st.DataObject) -> None:
    costs = {r: data.draw(st.integers(0, 10**6)) for r in range(8)}
    found = verdicts(costs, ranks_per_node=per_node)
    named = {s.rank for s in found if s.rank is not None}
    for s in found:
        if s.rank is None:
            named |= {r for r in costs if f"n{r // per_node}" == s.node_id}
    assert len(named) <= 4
    assert not named or min(costs[r] for r in named) > max(min(costs.values()), 0)
