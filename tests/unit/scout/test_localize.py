"""Who is named, how surely, and in which words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmres.scout.localize import Localized, localize
from lmres.scout.sighting import OpMark, Phase, WorkerSight
from tests.unit.scout.sights import TIMEOUT_MS, group, marks, sights, worker

ALL = (0, 1, 2, 3)


def waiting(rank: int, number: int = 10, **fields: object) -> WorkerSight:
    return worker(rank, group(number, number - 1, ranks=ALL), **fields)


def late(rank: int, number: int = 9, **fields: object) -> WorkerSight:
    return worker(rank, group(number, ranks=ALL), **fields)


def named(found: Localized) -> list[tuple[str, int]]:
    return [(s.node_id, s.rank) for s in found.suspects]


# -- stopped ----------------------------------------------------------------------------------------------------------


def test_a_stopped_rank_that_is_behind_is_named_with_what_it_has_not_entered() -> None:
    found = localize(sights(waiting(0), waiting(1), late(2, state="T"), waiting(3)))
    assert (found.failure_class, found.verdict, named(found)) == ("hang", "attributed", [("c", 2)])
    assert found.detail == (
        "rank 2 on c has not entered allreduce number 10 (float32[1024]) of the default group after step 5, "
        "in which ranks 0, 1, 3 wait: it is stopped (SIGSTOP), for 3.1 s"
    )


def test_two_stopped_ranks_are_both_named() -> None:
    found = localize(sights(waiting(0), late(1, state="T"), late(2, state="t"), waiting(3)))
    assert named(found) == [("b", 1), ("c", 2)]
    assert "SIGSTOP" in found.detail and "debugger" in found.detail


def test_a_stopped_rank_that_has_come_with_the_others_is_named_while_nobody_is_behind() -> None:
    found = localize(sights(waiting(0), waiting(1), waiting(2, state="T"), waiting(3)))
    assert (found.verdict, named(found)) == ("attributed", [("c", 2)])


def test_a_stopped_rank_that_waits_like_the_others_is_not_the_one_that_is_missing() -> None:
    found = localize(sights(waiting(0), waiting(1, state="T"), late(2), waiting(3)))
    assert named(found) == [("c", 2)]


def test_a_stopped_rank_in_another_group_explains_who_only_passes_the_delay_on() -> None:
    inner = {"name": "7", "ranks": (2, 3)}
    third = worker(2, group(9, ranks=ALL), group(4, 3, **inner))
    fourth = worker(3, group(9, ranks=ALL), group(4, 3, **inner), state="T")
    found = localize(sights(waiting(0), waiting(1), third, replace(fourth, groups=fourth.groups)))
    assert named(found) == [("d", 3)]


@pytest.mark.parametrize(("quiet_ms", "names"), [(TIMEOUT_MS, [("c", 2)]), (100, [("c", 2)])])
def test_state_d_counts_only_if_it_has_been_quiet_for_long(quiet_ms: int, names: list[tuple[str, int]]) -> None:
    found = localize(sights(waiting(0), waiting(1), late(2, state="D", quiet_ms=quiet_ms), waiting(3)))
    assert named(found) == names
    assert ("state D" in found.detail) == (quiet_ms >= TIMEOUT_MS)
    assert found.excused == (quiet_ms < TIMEOUT_MS)


def test_of_a_blind_rank_only_its_state_counts() -> None:
    blind = worker(2, blind="the page has 0 bytes", state="T")
    assert named(localize(sights(waiting(0), waiting(1), blind, waiting(3)))) == [("c", 2)]
    running = localize(sights(waiting(0), waiting(1), replace(blind, state="S"), waiting(3)))
    assert (running.verdict, named(running)) == ("inconclusive", [])


# -- desync -----------------------------------------------------------------------------------------------------------


def with_ops(rank: int, ops: list[tuple[str, str, int]], **fields: object) -> WorkerSight:
    recent = tuple(OpMark(number=i + 1, op=op, shape=shape, step=step) for i, (op, shape, step) in enumerate(ops))
    count = len(ops)
    return worker(rank, group(count, count - 1, ranks=ALL, recent=recent), **fields)


METRIC, GRADS, BARRIER = "float32[1]", "float32[512]", ""
TWO_A_STEP = [("allreduce", METRIC if n % 2 == 0 else GRADS, n // 2) for n in range(8)]


def test_another_shape_names_rank_operation_shapes_and_step() -> None:
    odd = [*TWO_A_STEP[:7], ("allreduce", "float32[640]", 3)]
    found = localize(sights(*(with_ops(r, odd if r == 2 else TWO_A_STEP) for r in ALL)))
    assert (found.failure_class, found.verdict, named(found)) == ("collective_desync", "attributed", [("c", 2)])
    assert found.detail == (
        "in operation number 8 of the default group rank 2 on c entered allreduce (float32[640]) after step 3, "
        "ranks 0, 1, 3 entered allreduce (float32[512]) after step 3"
    )


def test_one_left_out_shows_as_a_shift() -> None:
    odd = [op for i, op in enumerate(TWO_A_STEP) if i != 4]
    found = localize(sights(*(with_ops(r, odd if r == 1 else TWO_A_STEP) for r in ALL)))
    assert named(found) == [("b", 1)]
    assert "it seems that rank 1 has left out allreduce (float32[1]) after step 2" in found.detail


def test_one_left_out_shows_also_while_the_others_wait_in_it() -> None:
    """What follows it there is not known yet; the last time it was what the rank has entered now."""
    plain = [*TWO_A_STEP, ("allreduce", METRIC, 4)]
    odd = [*TWO_A_STEP, ("allreduce", GRADS, 4)]
    found = localize(sights(*(with_ops(r, odd if r == 1 else plain) for r in ALL)))
    assert named(found) == [("b", 1)]
    assert "it seems that rank 1 has left out allreduce (float32[1]) after step 4" in found.detail
    other = localize(sights(*(with_ops(r, [*TWO_A_STEP, ("broadcast", "", 4)] if r == 1 else plain) for r in ALL)))
    assert "left out" not in other.detail


def test_one_too_many_shows_as_a_shift_too() -> None:
    odd = [*TWO_A_STEP[:4], ("broadcast", METRIC, 2), *TWO_A_STEP[4:7]]
    found = localize(sights(*(with_ops(r, odd if r == 1 else TWO_A_STEP) for r in ALL)))
    assert named(found) == [("b", 1)]
    assert "made one operation too many before allreduce (float32[1])" in found.detail


def test_equal_operations_in_different_steps() -> None:
    plain = [("allreduce", GRADS, n) for n in range(6)]
    odd = [op for i, op in enumerate([*plain, ("allreduce", GRADS, 6)]) if i != 3]
    found = localize(sights(*(with_ops(r, odd if r == 3 else plain) for r in ALL)))
    assert (found.failure_class, found.verdict) == ("collective_desync", "inconclusive")
    assert named(found) == [("d", 3)]
    assert "after step 4" in found.detail and "after step 3" in found.detail
    assert "operation number 4" in found.detail


def uneven(rank: int, **fields: object) -> WorkerSight:
    """Rank 3 has made a step without the others."""
    ops = [("allreduce", GRADS, n + (rank == 3 and n > 2)) for n in range(6)]
    return with_ops(rank, ops, **fields)


def test_uneven_steps_count_after_who_waits_for_whom() -> None:
    """Rank 3 joins with fewer inputs, rank 2 is in its loader."""
    behind = worker(2, group(5, ranks=ALL, recent=uneven(2).groups[0].recent[:5]), phase="loader")
    found = localize(sights(uneven(0), uneven(1), behind, uneven(3)))
    assert (found.failure_class, found.verdict, named(found)) == ("hang", "attributed", [("c", 2)])


def test_uneven_steps_alone_or_while_somebody_moves_are_no_failure() -> None:
    moving = localize(sights(*(uneven(r) for r in (0, 1, 3)), uneven(2, quiet_ms=20, phase="user")))
    assert (moving.failure_class, moving.verdict, moving.excused) == ("collective_desync", "inconclusive", True)
    found = localize(sights(*(uneven(r, quiet_ms=20, phase="user") for r in ALL)))
    assert found.failure_class == "hang"


def test_steps_that_always_differed_mean_nothing() -> None:
    """A rank counts from elsewhere, or has no optimizer at all."""
    plain = [("allreduce", GRADS, n) for n in range(6)]
    shifted = [(op, shape, step + 100) for op, shape, step in plain]
    none = [(op, shape, 0) for op, shape, _ in plain]
    found = localize(sights(with_ops(0, plain), with_ops(1, shifted), with_ops(2, none, step=0), with_ops(3, plain)))
    assert found.failure_class == "hang"


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2, 3)])
def test_without_majority_both_sides_are_named(ranks: tuple[int, ...]) -> None:
    odd = [*TWO_A_STEP[:7], ("broadcast", GRADS, 3)]
    made = []
    for r in ranks:
        w = with_ops(r, odd if r % 2 else TWO_A_STEP)
        made.append(replace(w, groups=(replace(w.groups[0], ranks=ranks),)))
    found = localize(sights(*made))
    assert (found.verdict, [s.rank for s in found.suspects]) == ("inconclusive", list(ranks))
    assert "broadcast" in found.detail and "allreduce" in found.detail and "no majority" in found.detail


def test_a_majority_of_those_heard_is_not_one_of_the_group() -> None:
    odd = [*TWO_A_STEP[:7], ("broadcast", GRADS, 3)]
    found = localize(sights(with_ops(0, TWO_A_STEP), with_ops(1, TWO_A_STEP), with_ops(2, odd)), unheard={"d": (3,)})
    assert (found.failure_class, found.verdict) == ("collective_desync", "inconclusive")
    assert found.detail.endswith("not heard: d")


def test_uneven_lists_and_sends_are_no_difference() -> None:
    def one(rank: int) -> WorkerSight:
        recent = (
            OpMark(number=1, op="alltoall_", shape=f"float32[{rank + 1}]", step=1),
            OpMark(number=0, op="send" if rank % 2 else "recv_", shape="float32[4]", step=1),
            OpMark(number=2, op="allreduce_", shape="float32[4]", step=1),
        )
        return worker(rank, group(2, 1, ranks=ALL, recent=recent))

    found = localize(sights(*map(one, ALL)))
    assert (found.failure_class, found.verdict, found.suspects) == ("hang", "inconclusive", ())


def test_rings_that_do_not_overlap_are_not_compared() -> None:
    found = localize(sights(waiting(0, 60), waiting(1, 60), late(2, 20), waiting(3, 60)))
    assert (found.failure_class, named(found)) == ("hang", [("c", 2)])
    assert "has not entered operation number 21 of the default group" in found.detail


# -- wait-for ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("loader", "it waits for its data loader, at train.py:41 slow, for 3.1 s"),
        ("checkpoint_io", "it reads or writes a checkpoint, at train.py:41 slow"),
        ("user", "it is in the program's own code, at train.py:41 slow"),
        ("forward", "it is in forward, at"),
        ("backward", "it is in backward, at"),
        ("optimizer", "it is in the optimizer's step, at"),
        ("start", "it has not made its first step yet, at"),
    ],
)
def test_what_the_missing_rank_does_names_the_cause(phase: Phase, words: str) -> None:
    stack = ("train.py:90 main", "train.py:41 slow", "/v/site-packages/torch/utils/data/dataloader.py:700 __next__")
    found = localize(sights(waiting(0), waiting(1), late(2, phase=phase, stack=stack), waiting(3)))
    assert (found.verdict, named(found)) == ("attributed", [("c", 2)])
    assert words in found.detail, found.detail


def test_a_rank_that_never_used_the_group_is_the_missing_one() -> None:
    found = localize(sights(waiting(0, 1), waiting(1, 1), worker(2, phase="start", step=0), waiting(3, 1)))
    assert named(found) == [("c", 2)]
    assert "has not entered allreduce number 1 (float32[8])" in found.detail


def test_a_spinning_rank_is_said_to_use_the_processor() -> None:
    found = localize(sights(waiting(0), waiting(1), late(2, state="R"), waiting(3)))
    assert "and is using the processor" in found.detail


def test_a_rank_whose_program_has_ended() -> None:
    found = localize(sights(waiting(0), waiting(1), late(2, state="Z"), waiting(3)))
    assert (found.verdict, named(found)) == ("attributed", [("c", 2)])
    assert "its process has ended" in found.detail


def test_who_waits_in_another_group_passes_the_delay_on() -> None:
    """Ranks 0 and 1 wait for 2, which waits for 3, which is in its loader."""
    inner = {"name": "7", "ranks": (2, 3)}
    third = worker(2, group(9, ranks=ALL), group(4, 3, **inner))
    fourth = worker(3, group(9, ranks=ALL), group(3, **inner), phase="loader")
    found = localize(sights(waiting(0), waiting(1), third, fourth))
    assert (found.verdict, named(found)) == ("attributed", [("d", 3)])


def test_a_circle_is_inconclusive_and_named() -> None:
    """Rank 0 waits for 1 in one group, rank 1 for 0 in another."""
    one, two = {"name": "1", "ranks": (0, 1)}, {"name": "2", "ranks": (0, 1)}
    found = localize(
        sights(worker(0, group(5, 4, **one), group(2, **two)), worker(1, group(4, **one), group(3, 2, **two)))
    )
    assert (found.verdict, named(found)) == ("inconclusive", [("a", 0), ("b", 1)])
    assert "rank 0 on a, which waits for rank 1 on b, which waits for rank 0 on a" in found.detail


def test_a_group_that_nobody_comes_out_of_holds_up_another() -> None:
    inner = {"name": "7", "ranks": (2, 3)}
    both = [worker(r, group(9, ranks=ALL), group(4, 3, **inner)) for r in (2, 3)]
    found = localize(sights(waiting(0), waiting(1), *both))
    assert (found.verdict, found.suspects) == ("inconclusive", ())
    assert "group 7 (ranks 2, 3)" in found.detail and "the network, or the backend" in found.detail


def test_backward_with_gradients_on_their_way_is_no_excuse() -> None:
    """Rank 2 hangs in backward, after its first bucket; the others have begun both."""
    third = worker(2, group(9, 8, ranks=ALL), phase="backward")
    found = localize(sights(*(waiting(r, phase="backward") for r in (0, 1, 3)), third))
    assert (found.verdict, named(found)) == ("attributed", [("c", 2)])
    assert "it is in backward" in found.detail


def test_on_an_accelerator_the_others_seem_to_compute() -> None:
    """Operations are begun and taken for over; the program waits for the device elsewhere."""
    found = localize(sights(*(late(r, 10) for r in (0, 1, 3)), late(2, 7, phase="loader")))
    assert (found.verdict, named(found)) == ("attributed", [("c", 2)])


def test_who_is_behind_and_waits_for_something_unknown_is_named_but_not_for_sure() -> None:
    found = localize(sights(waiting(0), waiting(1), late(2, phase="collective"), waiting(3)))
    assert (found.verdict, named(found)) == ("inconclusive", [("c", 2)])
    both = localize(sights(waiting(0), waiting(1), late(2, phase="collective"), late(3, phase="loader")))
    assert (both.verdict, named(both)) == ("attributed", [("d", 3)])


# -- excuses ----------------------------------------------------------------------------------------------------------


def test_who_is_within_its_own_time_excuses_the_others() -> None:
    save = {"phase": "checkpoint_io", "timeout_ms": 600_000}
    found = localize(sights(waiting(0), waiting(1), late(2, quiet_ms=3_100, **save), waiting(3)))
    assert found.excused and named(found) == [("c", 2)]
    over = [waiting(r, quiet_ms=600_100) for r in (0, 1, 3)]
    assert not localize(sights(*over, late(2, quiet_ms=600_050, **save))).excused


def test_a_rank_that_moves_but_never_comes_is_not_excused_for_ever() -> None:
    def after(quiet_ms: int) -> Localized:
        return localize(sights(*(waiting(r, quiet_ms=quiet_ms) for r in (0, 1, 3)), late(2, quiet_ms=20)))

    assert after(TIMEOUT_MS).excused
    assert not after(4 * TIMEOUT_MS).excused


def auto(*workers: WorkerSight) -> Localized:
    """As where the user has set no time."""
    return localize([replace(s, auto=True) for s in sights(*workers)])


@pytest.mark.parametrize(("minutes", "excused"), [(1, True), (5, True), (29, True), (31, False)])
def test_with_auto_a_rank_that_moves_is_excused_for_long_and_never_at_fault(minutes: int, excused: bool) -> None:
    """Rank 0 evaluates, the others wait."""
    others = (waiting(r, quiet_ms=60_000 * minutes, timeout_ms=60_000) for r in (1, 2, 3))
    found = auto(late(0, quiet_ms=20, timeout_ms=600_000), *others)
    assert (found.verdict, named(found), found.excused) == ("inconclusive", [("a", 0)], excused)


def test_with_auto_a_rank_that_stands_still_for_its_own_time_is_at_fault() -> None:
    others = (waiting(r, quiet_ms=600_000, timeout_ms=60_000) for r in (1, 2, 3))
    found = auto(late(0, quiet_ms=600_000, timeout_ms=600_000), *others)
    assert (found.verdict, named(found), found.excused) == ("attributed", [("a", 0)], False)


def test_with_auto_four_times_a_longer_time_counts() -> None:
    others = (waiting(r, quiet_ms=2_000_000, timeout_ms=600_000) for r in (1, 2, 3))
    assert auto(late(0, quiet_ms=20, timeout_ms=600_000), *others).excused


# -- nobody comes out, nobody heard -----------------------------------------------------------------------------------


def test_all_have_entered_and_none_comes_out() -> None:
    found = localize(sights(*map(waiting, ALL)))
    assert (found.verdict, found.suspects, found.excused) == ("inconclusive", (), False)
    assert "all of ranks 0-3 have entered allreduce (float32[1024]) after step 4, number 10" in found.detail


def test_receives_after_asynchronous_operations_do_not_hide_who_sleeps() -> None:
    """Of those it is not known that they are over, so that all seem to be inside but the one."""
    found = localize(sights(waiting(0), waiting(1), worker(2, group(10, 9, ranks=ALL), phase="user"), waiting(3)))
    assert (found.verdict, named(found)) == ("inconclusive", [("c", 2)])
    assert "program's own code" in found.detail and "network" not in found.detail


def test_a_rank_that_sleeps_is_not_hidden_by_a_group_that_seems_stuck() -> None:
    """Rank 2 waits for 3 in a receive; of an operation of theirs it is not known that it is over."""
    third = worker(2, group(9, ranks=ALL), group(4, 3, name="7", ranks=(2, 3)))
    fourth = worker(3, group(4, 3, name="7", ranks=(2, 3)), phase="user")
    only = [worker(r, group(10, 9, ranks=(0, 1, 2))) for r in (0, 1)]
    third = replace(third, groups=(replace(third.groups[0], ranks=(0, 1, 2)), third.groups[1]))
    found = localize(sights(*only, third, fourth))
    assert (found.verdict, named(found)) == ("inconclusive", [("d", 3)])
    assert "network" not in found.detail


def test_without_the_members_of_a_group_who_is_not_heard_may_be_one() -> None:
    odd = [*TWO_A_STEP[:7], ("broadcast", GRADS, 3)]
    made = [with_ops(0, TWO_A_STEP), with_ops(1, TWO_A_STEP), with_ops(2, odd)]
    bare = [replace(w, groups=(replace(w.groups[0], ranks=()),)) for w in made]
    assert localize(sights(*bare)).verdict == "attributed"
    assert localize(sights(*bare), unheard={"d": (3,)}).verdict == "inconclusive"


def test_the_ranks_of_a_silent_node_are_suspects_only_while_nobody_else_is() -> None:
    found = localize(sights(waiting(0), waiting(1), waiting(2)), unheard={"d": (3,)})
    assert (found.verdict, named(found)) == ("inconclusive", [("d", 3)])
    assert found.detail.endswith("not heard: d")
    clear = localize(sights(waiting(0), waiting(1), late(2)), unheard={"d": (3,)})
    assert (clear.verdict, named(clear)) == ("attributed", [("c", 2)])


# -- without collectives ----------------------------------------------------------------------------------------------


def test_the_only_rank_there_is() -> None:
    found = localize(sights(worker(0, phase="loader")))
    assert (found.verdict, named(found)) == ("attributed", [("a", 0)])
    assert "waits for its data loader" in found.detail
    assert "SIGSTOP" in localize(sights(worker(0, state="T"))).detail


def test_one_quiet_rank_among_others_that_are_not() -> None:
    found = localize(sights(*(worker(r, quiet_ms=5) for r in (0, 1, 3)), worker(2, phase="loader")))
    assert (found.verdict, named(found)) == ("attributed", [("c", 2)])


@pytest.mark.parametrize("phase", ["start", "user", "collective", "end"])
def test_who_may_wait_for_another_is_excused_by_it_and_never_at_fault(phase: Phase) -> None:
    """They poll a store or a file, until rank 0 has prepared the data."""

    def after(quiet_ms: int) -> Localized:
        return localize(sights(worker(0, quiet_ms=5), *(worker(r, phase=phase, quiet_ms=quiet_ms) for r in (1, 2))))

    assert (after(3_100).verdict, named(after(3_100)), after(3_100).excused) == ("inconclusive", [("a", 0)], True)
    assert (after(12_000).verdict, after(12_000).excused) == ("inconclusive", False)


def test_one_that_polls_while_the_others_train_is_not_at_fault() -> None:
    found = localize(sights(*(worker(r, quiet_ms=5) for r in (0, 1, 3)), worker(2)))
    assert (found.verdict, found.excused) == ("inconclusive", True)
    # Two ranks: it is no minority either.
    found = localize(sights(worker(0, quiet_ms=5), worker(1)))
    assert (found.verdict, found.excused) == ("inconclusive", True)


def test_one_in_its_own_code_for_whom_others_wait_is_at_fault() -> None:
    """In receives, and just within their own time."""
    others = (worker(r, group(4, ranks=ALL), phase="collective", quiet_ms=2_900) for r in (0, 1, 3))
    found = localize(sights(*others, worker(2, group(4, ranks=ALL))))
    assert (found.verdict, named(found)) == ("attributed", [("c", 2)])


def test_a_phase_of_a_newer_version_is_its_own_code() -> None:
    found = localize(sights(waiting(0), waiting(1), late(2, phase="dreaming"), waiting(3)))
    assert (found.verdict, named(found)) == ("attributed", [("c", 2)])
    assert "is in the program's own code" in found.detail
    assert "own code" in localize(sights(*(worker(r, phase="dreaming") for r in ALL))).detail


@pytest.mark.parametrize(
    ("phase", "words"),
    [("loader", "all wait for their data loader"), ("checkpoint_io", "all read or write a checkpoint")],
)
def test_all_in_the_same_phase_name_it(phase: Phase, words: str) -> None:
    found = localize(sights(*(worker(r, phase=phase) for r in ALL)))
    assert (found.verdict, found.suspects) == ("inconclusive", ())
    assert f"ranks 0-3 {words}" in found.detail


def test_different_phases_and_no_collective_name_nobody() -> None:
    found = localize(sights(worker(0, phase="loader"), worker(1, phase="forward")))
    assert (found.verdict, found.suspects) == ("inconclusive", ())
    assert "rank 0 on a" in found.detail and "rank 1 on b" in found.detail


def test_a_collective_of_which_nothing_is_known_is_a_hint_only() -> None:
    found = localize(sights(*(worker(r, phase="collective") for r in (0, 1, 3)), worker(2, phase="loader")))
    assert (found.verdict, named(found)) == ("inconclusive", [("c", 2)])


def test_nothing_told_at_all() -> None:
    found = localize([])
    assert (found.failure_class, found.verdict, found.suspects) == ("hang", "inconclusive", ())


def test_the_detail_has_a_limit() -> None:
    deep = ("x" * 5_000,)
    found = localize(sights(waiting(0), *(late(r, stack=deep) for r in range(1, 20))))
    assert len(found.detail) <= 1_200 and len(found.suspects) == 19


def test_marks_of_all_ranks_are_equal_here() -> None:
    assert len(marks(30)) == 16


def test_sightings_of_different_moments_accuse_nobody() -> None:
    """One told before the group went on, the others after it."""
    went_on = [worker(r, group(58, 58, ranks=ALL), quiet_ms=40) for r in (0, 1, 3)]
    assert localize(sights(*went_on, worker(2, group(49, 46, ranks=ALL), quiet_ms=2 * TIMEOUT_MS))).excused
