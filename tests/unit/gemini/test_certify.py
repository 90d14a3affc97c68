"""Comparing equals: who is equal, what differs, what replay certifies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lmres.gemini.certify import NOT_FINITE, Certifier, Covered, Finding, Print, Replayed
from lmres.gemini.inventory import Key
from lmres.gemini.watermark import Hub, Report

PARTS = 3


def key(step: int) -> Key:
    return Key(step, 1)


class Group:
    """One vault and one rank a node; each step is captured by all, and reported."""

    def __init__(self, ranks: int = 3, *, base: Key | None = None, **settings: Any) -> None:
        self.names = [f"n{rank}" for rank in range(ranks)]
        self.hub = Hub(members=frozenset(self.names), safe=base)
        self.certifier = Certifier(members=self.hub.members, origin=1, base=base, **settings)
        self.hub.certifier = self.certifier
        self.newest = base.step if base is not None else 0
        if base is not None:
            self.step(base.step, origin=base.origin)

    def step(
        self,
        step: int,
        differs: Mapping[int, str] | None = None,
        *,
        origin: int = 1,
        layout: str = "l",
        finite: bool = True,
        replay: Mapping[int, Replayed] | None = None,
        room: bool = True,
    ) -> None:
        """``differs``: by rank, what it has instead of what all have."""
        self.newest = step
        for rank, name in enumerate(self.names):
            digest = (differs or {}).get(rank, f"d{step}")
            at = Key(step, origin)
            self.hub.report(
                Report(
                    node_id=name,
                    whole=frozenset({at}),
                    seen=frozenset({at}),
                    floor=step,
                    ranks=(rank,),
                    prints={at: {rank: Print(layout=layout, digest=digest, finite=finite)}},
                    replays=((rank, replay[rank]),) if replay is not None and rank in replay else (),
                    room=room,
                )
            )

    def replayed(
        self,
        step: int,
        part: int,
        *,
        differs: Mapping[int, str] | None = None,
        state: Mapping[int, str] | None = None,
        **more: Any,
    ) -> None:
        said = {
            rank: Replayed(
                step=step,
                part=part,
                parts=PARTS,
                what=f"part {part}",
                digest=(differs or {}).get(rank, "same"),
                **more,
            )
            for rank in range(len(self.names))
        }
        self.step(step, state, replay=said)

    @property
    def safe(self) -> Key | None:
        return self.hub.safe

    def findings(self) -> list[Finding]:
        found, self.certifier.findings = self.certifier.findings, []
        return found

    def told(self) -> list[Covered]:
        found, self.certifier.told = self.certifier.told, []
        return found


# -- state ------------------------------------------------------------------------------------------------------------


def test_a_key_whose_equals_differ_never_becomes_safe() -> None:
    group = Group()
    group.step(1)
    group.step(2, {1: "flipped"})
    assert group.safe == key(1) and group.hub.verdict().is_dead(key(2))
    assert group.findings() == [Finding(check="state", key=key(2), groups=((0, 2), (1,)), trusted=key(1))]
    group.step(3, {1: "still"})
    assert group.safe == key(1) and group.findings() == [], "one finding is enough"


def test_a_key_whose_equals_agree_is_verified() -> None:
    group = Group()
    group.step(1)
    assert group.hub.verdict().verified == (key(1),)


def test_what_is_not_finite_is_safe_and_not_verified() -> None:
    group = Group()
    group.step(1)
    group.step(2, finite=False)
    assert group.safe == key(2) and group.hub.verdict().verified == ()


def test_one_alone_is_not_verified_and_that_is_told_once() -> None:
    group = Group(1)
    group.step(1)
    group.step(2)
    assert group.safe == key(2) and group.hub.verdict().verified == ()
    assert group.told() == [Covered(check="state", ranks=(), alone=(0,))]


def test_ranks_that_never_agreed_are_not_held_to_it() -> None:
    """A sharded optimizer, parameters of their own."""
    group = Group(4)
    group.step(1, {2: "own", 3: "another"})
    group.step(2, {2: "x", 3: "y"})
    assert group.safe == key(2) and group.findings() == [] and group.hub.verdict().verified == ()
    assert group.told() == [Covered(check="state", ranks=(0, 1), alone=(2, 3))]
    group.step(3, {0: "flipped", 2: "x", 3: "y"})
    assert [f.groups for f in group.findings()] == [((0,), (1,))]


def test_shards_are_compared_along_the_replicated_dimension() -> None:
    group = Group(4)
    for step in (1, 2):
        group.step(step, {0: f"left {step}", 1: f"right {step}", 2: f"left {step}", 3: f"right {step}"})
    assert group.hub.verdict().verified == (key(2),)
    group.step(3, {0: "left", 1: "right", 2: "left", 3: "wrong"})
    assert [f.groups for f in group.findings()] == [((1,), (3,))]


def test_what_agreed_when_it_was_restored_is_held_to_it_from_the_first_step_on() -> None:
    base = Key(7, 0)
    group = Group(base=base)
    group.step(8, {2: "flipped"})
    assert group.safe == base and [f.groups for f in group.findings()] == [((0, 1), (2,))]


def test_another_layout_is_not_compared() -> None:
    group = Group(2)
    group.step(1)
    group.hub.report(Report(node_id="n0", whole=frozenset({key(2)}), seen=frozenset({key(2)}), floor=2, ranks=(0,)))
    assert group.findings() == []


def test_if_all_differ_from_each_other_it_is_the_program() -> None:
    """Local SGD that begins after a while."""
    group = Group(3)
    group.step(1)
    group.told()
    group.step(2, {0: "a", 1: "b", 2: "c"})
    assert group.safe == key(2) and group.findings() == []
    assert [t.alone for t in group.told()] == [(0, 1, 2)]
    group.step(3, {0: "a", 1: "b", 2: "c"})
    assert group.safe == key(3)


def test_if_they_differ_in_the_same_way_again_it_is_the_program() -> None:
    first = Group(2)
    first.step(1)
    first.step(2, {0: "a", 1: "b"})
    assert first.certifier.undecided == (key(2), {0: "a", 1: "b"})
    again = Group(2, base=Key(1, 0), questioned={2: {0: "a", 1: "b"}})
    again.step(2, {0: "a", 1: "b"})
    assert again.safe == key(2) and again.findings() == []


def test_the_same_steps_made_again_tell_who_was_wrong() -> None:
    group = Group(2, base=Key(1, 0), questioned={2: {0: "d2", 1: "flipped"}})
    group.step(2)
    (finding,) = group.findings()
    assert finding.check == "again" and finding.ranks == (1,) and finding.groups == ((0,), (1,))


def test_if_neither_had_it_nobody_is_accused() -> None:
    group = Group(2, base=Key(1, 0), questioned={2: {0: "x", 1: "y"}})
    group.step(2)
    assert group.findings() == []


def test_a_majority_leaves_no_question() -> None:
    group = Group(3)
    group.step(1)
    group.step(2, {1: "flipped"})
    assert group.certifier.undecided is None


def test_where_it_is_only_told_keys_still_become_safe_and_are_not_verified() -> None:
    group = Group(3, holds_back=False)
    group.step(1)
    group.step(2, {1: "flipped"})
    assert group.safe == key(2) and len(group.findings()) == 1 and group.hub.verdict().verified == ()


@pytest.mark.parametrize("ranks", [2, 3])
def test_who_is_not_finite_while_its_equals_are_needs_no_majority(ranks: int) -> None:
    """It has no image, so that the key is never whole anywhere."""
    group = Group(ranks)
    group.step(1)
    for rank, name in enumerate(group.names):
        said = Print(layout="l", digest=NOT_FINITE if rank == 1 else "d2", finite=rank != 1)
        whole = frozenset({key(2)}) if rank != 1 else frozenset()
        group.hub.report(
            Report(node_id=name, whole=whole, seen=whole, floor=1, ranks=(rank,), prints={key(2): {rank: said}})
        )
    (finding,) = group.findings()
    assert finding.check == "state" and finding.ranks == (1,) and finding.trusted == key(1)


def test_if_nobody_is_finite_that_is_the_program() -> None:
    group = Group(2)
    group.step(1)
    for rank, name in enumerate(group.names):
        prints = {key(2): {rank: Print(layout="l", digest=NOT_FINITE, finite=False)}}
        group.hub.report(Report(node_id=name, floor=1, ranks=(rank,), prints=prints))
    assert group.findings() == []


# -- replay -----------------------------------------------------------------------------------------------------------


def rotation(group: Group, first: int) -> None:
    for part in range(PARTS):
        group.replayed(first + part, part)


def test_an_anchor_is_what_all_parts_have_passed_after() -> None:
    group = Group()
    group.step(1)
    group.replayed(2, 0)
    group.replayed(3, 1)
    assert group.hub.verdict().anchor is None and group.hub.verdict().kept == (key(2),)
    group.replayed(4, 2)
    assert group.hub.verdict().anchor == key(2)
    group.step(5)
    verdict = group.hub.verdict()
    assert not verdict.reusable(key(2)) and verdict.reusable(key(1)) and verdict.reusable(key(3))
    rotation(group, 6)
    assert group.hub.verdict().anchor == key(4)
    assert group.hub.verdict().reusable(key(2)) and not group.hub.verdict().reusable(key(4))


def test_a_replay_that_differs_trusts_only_what_this_part_passed_after() -> None:
    group = Group()
    for first in (1, 4, 7):
        rotation(group, first)
    anchor = group.hub.verdict().anchor
    assert anchor is not None
    group.replayed(10, 0, differs={2: "wrong"})
    (finding,) = group.findings()
    assert finding.check == "replay" and finding.groups == ((0, 1), (2,)) and finding.what == "part 0"
    assert finding.trusted is not None and anchor <= finding.trusted <= key(7)


def agreed(*parts: int) -> dict[str, frozenset[int]]:
    return {f"part {part}": frozenset(range(3)) for part in parts}


def test_before_anything_is_certified_nothing_is_trusted() -> None:
    group = Group(agreed=agreed(1))
    group.replayed(1, 0)
    group.replayed(2, 1, differs={0: "wrong"})
    (finding,) = group.findings()
    assert finding.trusted is None and finding.from_start
    later = Group(base=Key(7, 0), agreed=agreed(0))
    later.replayed(8, 0, differs={0: "wrong"})
    assert not later.findings()[0].from_start


def test_a_restored_anchor_is_trusted() -> None:
    group = Group(base=Key(7, 0), certified=True, agreed=agreed(0))
    group.replayed(8, 0, differs={0: "wrong"})
    assert group.findings()[0].trusted == Key(7, 0)


def test_ranks_that_never_agreed_on_a_part_are_not_held_to_it() -> None:
    group = Group()
    for step in (1, 2, 3):
        group.replayed(step, 0, differs={0: f"its own {step}"})
    assert group.findings() == [] and group.certifier.anchor is None
    assert [t.alone for t in group.told() if t.check == "replay" and t.reason] == [(0,)], "told once"
    group.replayed(4, 0, differs={0: "its own", 2: "wrong"})
    assert group.findings()[0].groups == ((1,), (2,)), "the others still are"


def test_the_shards_of_a_layer_are_compared_each_with_its_own_replicas() -> None:
    group, odd = Group(4), {1: "odd", 3: "odd"}
    group.replayed(1, 0, differs=odd, state=odd)
    assert [t.reason for t in group.told() if t.reason] == [] and group.findings() == []
    group.replayed(2, 0, differs={1: "odd", 3: "wrong"}, state=odd)
    assert group.findings()[0].groups == ((1,), (3,))


def test_a_flipped_bit_stays_in_its_shard() -> None:
    group, odd = Group(4), {1: "odd", 3: "odd"}
    group.step(1, odd)
    group.step(2, {**odd, 3: "flipped"})
    assert group.findings()[0].groups == ((1,), (3,)) and group.safe == key(1)


def test_whole_replicas_that_differ_are_the_programs_doing() -> None:
    """Each has summed up the norm for itself, in another order."""
    group, odd = Group(4), {1: "odd", 3: "odd"}
    group.step(1, odd)
    group.step(2, {1: "odd", 2: "other", 3: "other too"})
    assert group.findings() == [] and group.safe == key(2)
    assert "whole replicas differ" in group.told()[-1].reason
    group.step(3, {2: "more"})
    assert group.safe == key(3) and group.hub.verdict().verified == ()


def test_only_those_that_have_agreed_are_said_to_be_covered() -> None:
    group, odd = Group(4), {1: "odd", 3: "odd"}
    group.replayed(1, 0, differs={1: "odd", 3: "its own"}, state=odd)
    (told,) = [t for t in group.told() if t.reason]
    assert (told.ranks, told.alone) == ((0, 2), (1, 3))


def test_a_rank_that_comes_to_hold_other_tensors_is_no_equal_any_more() -> None:
    group = Group()
    group.replayed(1, 0)
    prints = {rank: Print(layout="more" if rank == 0 else "l", digest=f"d{rank == 0}") for rank in range(3)}
    for rank, name in enumerate(group.names):
        group.hub.report(
            Report(
                node_id=name,
                whole=frozenset({key(2)}),
                seen=frozenset({key(2)}),
                floor=2,
                ranks=(rank,),
                prints={key(2): {rank: prints[rank]}},
                room=True,
            )
        )
    assert group.safe == key(2) and group.findings() == []
    assert [t.alone for t in group.told() if t.reason] == [(0,)]
    group.replayed(3, 0, differs={0: "its own"})
    assert group.findings() == []


def test_a_rank_that_parts_in_the_same_way_on_another_node_is_the_programs_doing() -> None:
    first = Group()
    first.step(1)
    first.step(2, {0: "its own"})
    assert first.findings()[0].groups == ((1, 2), (0,))
    again = first.certifier.first_difference
    assert again is not None
    group = Group(base=Key(1, 0), differed={again[0].step: again[1]})
    group.step(2, {0: "its own"})
    assert group.findings() == [] and group.safe == key(2)
    assert any("in the same way" in t.reason for t in group.told())


def test_two_that_never_agreed_accuse_nobody() -> None:
    group = Group(2)
    for step in (1, 2, 3):
        group.replayed(step, 0, differs={0: "its own"})
    assert group.findings() == []


def test_what_goes_on_to_differ_on_another_node_is_the_program() -> None:
    known: dict[str, Any] = {"agreed": agreed(0), "accused": {}, "unlike": set()}
    first = Group(**known)
    first.replayed(1, 0)
    first.replayed(2, 0, differs={1: "later"})
    assert first.findings()[0].groups == ((0, 2), (1,))
    again = Group(base=Key(1, 0), **known)
    again.names[1] = "other"
    again.certifier.members = again.hub.members = frozenset(again.names)
    again.replayed(2, 0, differs={1: "later"})
    assert again.findings() == [] and known["unlike"] == {"part 0"}
    again.replayed(3, 0, differs={1: "later"})
    assert again.findings() == [], "nor is it compared any more"


def test_a_part_in_which_all_differ_is_the_program() -> None:
    group = Group(agreed=agreed(0))
    group.replayed(1, 0, differs={0: "a", 1: "b", 2: "c"})
    assert group.findings() == [] and group.certifier.unlike == {"part 0"}


def test_what_is_wrong_once_is_told_and_certifies_nothing() -> None:
    group = Group()
    group.replayed(1, 0)
    group.replayed(2, 1, steady=False)
    group.replayed(3, 2)
    assert [f.check for f in group.findings()] == ["once"] and group.hub.verdict().anchor is None
    rotation(group, 4)
    assert group.hub.verdict().anchor == key(1)


def test_a_flipped_parameter_is_not_taken_for_wrong_computing() -> None:
    group = Group()
    group.step(1)
    said = {r: Replayed(step=2, part=0, parts=1, what="p", digest="x" if r == 1 else "y") for r in range(3)}
    group.step(2, {1: "flipped"}, replay=said)
    group.step(3, {1: "flipped"}, replay=said)
    assert [f.check for f in group.findings()] == ["state"]


def test_ranks_whose_states_are_their_own_are_not_compared() -> None:
    group = Group(2)
    group.step(1, {0: "a", 1: "b"})
    group.told()
    said = {r: Replayed(step=2, part=0, parts=1, what="p", digest=str(r)) for r in range(2)}
    group.step(2, {0: "a", 1: "b"}, replay=said)
    assert group.findings() == [] and [t.alone for t in group.told()] == [(0, 1)]


def test_other_machines_are_not_compared() -> None:
    group = Group(2)
    group.step(1)
    said = {r: Replayed(step=2, part=0, parts=1, what=f"machine {r}", digest=str(r)) for r in range(2)}
    group.step(2, replay=said)
    assert group.findings() == [] and group.certifier.anchor is None


def test_a_part_that_nobody_can_compute_does_not_stand_in_the_way() -> None:
    group = Group()
    for first in (1, 4, 7):
        group.replayed(first, 0)
        group.replayed(first + 1, 1)
        said = {r: Replayed(step=first + 2, part=2, parts=PARTS, what="", digest="") for r in range(3)}
        group.step(first + 2, replay=said)
    assert group.hub.verdict().anchor is not None


def test_a_part_that_was_doubted_is_cleared_when_it_has_passed_twice() -> None:
    group = Group(2, base=Key(7, 0), doubted="part 1")
    rotation(group, 8)
    assert group.findings() == []
    rotation(group, 11)
    (finding,) = group.findings()
    assert finding.check == "cleared" and finding.key == key(12)
    rotation(group, 14)
    assert group.findings() == []


def test_what_passes_before_the_step_in_doubt_clears_nobody() -> None:
    group = Group(2, base=Key(7, 0), doubted="part 1", doubted_at=15)
    rotation(group, 8)
    rotation(group, 11)
    rotation(group, 14)
    assert group.findings() == []
    rotation(group, 17)
    assert [f.key for f in group.findings()] == [key(18)]


def test_who_does_not_tell_is_not_waited_for_without_end() -> None:
    group = Group(3)
    group.step(1)
    for step in range(2, 10):
        wrong = "wrong" if step == 3 else "same"
        said = {r: Replayed(step=step, part=0, parts=1, what="p", digest=wrong if r == 0 else "same") for r in (0, 1)}
        group.step(step, replay=said)
    assert [f.groups for f in group.findings()] == [((0,), (1,))]


def test_without_room_nothing_is_kept() -> None:
    group = Group()
    for first in (1, 4, 7):
        rotation(group, first)
    assert group.hub.verdict().kept
    group.step(10, room=False)
    group.step(11, room=False)
    assert group.hub.verdict().kept == () and group.hub.verdict().anchor is None
    rotation(group, 12)
    assert all(k >= key(11) for k in group.hub.verdict().kept)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_strangers_do_not_count(ranks: int) -> None:
    group = Group(ranks)
    group.step(1)
    before = group.hub.verdict()
    prints = {key(2): {9: Print(layout="l", digest="x")}}
    assert group.hub.report(Report(node_id="stranger", ranks=(9,), prints=prints)) == before
