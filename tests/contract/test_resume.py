"""Small programs as people write them: recorded, resumed, and bitwise the same as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.resume_kit import Nursery, Trial

Start = Callable[..., Trial]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery()
    yield found
    found.close()


@pytest.fixture
def program(nursery: Nursery, tmp_path: Path) -> Start:
    return lambda name, *arguments, ranks=1: Trial(nursery, tmp_path, name, *arguments, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_epochs(program: Start, ranks: int) -> None:
    program("epochs.py", ranks=ranks).is_exact(5, 9)


def test_loader_workers(program: Start) -> None:
    program("epochs.py", "--workers", "1", "--epochs", "2", ranks=2).is_exact(5)


def test_cycle(program: Start) -> None:
    program("cycle.py", ranks=2).is_exact(15)


def test_scaler_average_permutation_early_stopping(program: Start) -> None:
    program("averages.py", ranks=2).is_exact(3, 11)


def test_env(program: Start) -> None:
    program("env_step.py", ranks=2).is_exact(9)


def test_another_way_is_stopped(program: Start) -> None:
    program("other_way.py").is_stopped(9, "weight was 0.5, is 1.0", "add_state")


@pytest.mark.parametrize("where", ["before", "after", "end", "zeros", "never"])
def test_where_gradients_are_cleared(program: Start, where: str) -> None:
    program("zero_grad.py", where).is_exact(5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_sync(program: Start, ranks: int) -> None:
    program("no_sync.py", ranks=ranks).is_exact(4)


LOADERS = [
    "plain", "skip", "zip", "prefetch", "ahead", "persistent", "iterable", "iterable_workers", "buckets", "batches",
    "replacement", "weighted", "generator", "generator_workers", "collate", "numpy", "numpy_workers", "curriculum",
    "random_split",
]  # fmt: skip


@pytest.mark.parametrize("kind", LOADERS)
def test_loaders(program: Start, kind: str) -> None:
    program("loaders.py", kind).is_exact(5, 13)


def test_evaluation_between(program: Start) -> None:
    program("evaluates.py").is_exact(7, 20)


def test_two_models_in_turn(program: Start) -> None:
    program("gan.py").is_exact(7, 18)


SCHEDULES = ["onecycle", "lambda", "object", "sequential", "chained", "cyclic", "restarts", "swa", "by_hand"]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules(program: Start, kind: str) -> None:
    program("schedules.py", kind).is_exact(6)


MODELS = [
    "tied", "counting", "layerdrop", "output", "averaged", "teacher", "hook", "unfreeze", "freeze", "contrastive",
    "penalty", "queue", "metric",
]  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_models(program: Start, kind: str) -> None:
    program("models.py", kind).is_exact(9)


def test_what_it_writes(program: Start) -> None:
    program("writes.py").is_exact(6, 10)


def test_a_project_of_several_files(program: Start) -> None:
    program("project/train.py").is_exact(8)


@pytest.mark.parametrize("kind", ["evaluate", "by_hand"])
def test_without_an_optimizer_nothing_is_captured(program: Start, kind: str) -> None:
    trial = program("evaluates_only.py", kind)
    recorded = trial.recorded()
    assert recorded.last_words == trial.clean().last_words
    assert recorded.noted("captured") == []


STOPS = [
    ("shape", "parameter '0.weight'"),
    ("optimizer", "SGD"),
    ("counter", "restarts was 0, is 1"),
    ("entropy", "values[0]"),
    ("arrays", "values["),
    ("draws", "values["),
    ("one_read_more", "after step 4"),
    ("one_read_less", "after step 4"),
    ("text", "numbers['name'] was 'first', is 'second'"),
    ("tensor", "numbers['tensor']"),
    ("batch", "longer[0]"),
    ("shorter", "ended after step 5"),
    ("loss_scale", "longer.len was 0, is 1"),
]


def test_reads_in_a_closure_that_is_called_often_stop_it(program: Start) -> None:
    program("unusual.py", "lbfgs_reads").is_stopped(6, "values were not read", "after step")


def test_a_hook_with_a_memory_is_not_protected_and_says_so(program: Start) -> None:
    recorded = program("groups.py", "hook", ranks=2).live("record", "record")
    assert recorded.codes == [0, 0], recorded.err
    assert "PowerSGDState" in recorded.noted("off")[0][1]
    assert not recorded.noted("captured")


@pytest.mark.parametrize(("kind", "says"), STOPS)
def test_real_differences_stop_it(program: Start, kind: str, says: str) -> None:
    program("stops.py", kind).is_stopped(8, says, "LMRES_RESUME_STEP")


def test_where_programs_hold_things(program: Start) -> None:
    program("holds.py").is_exact(5, 10)


@pytest.mark.parametrize("kind", ["turns", "late", "unused", "static"])
def test_order_of_summation(program: Start, kind: str) -> None:
    program("groups.py", kind, ranks=3).is_exact(4)


UNUSUAL = [
    "closure", "rollback", "skips_bad", "replaced", "evolution", "by_clock", "direct", "lazy", "lbfgs",
]  # fmt: skip


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_loops(program: Start, kind: str) -> None:
    program("unusual.py", kind).is_exact(6)


def test_two_phases(program: Start) -> None:
    """A step is one of the optimizer that has stepped most, so the second one counts when it has made more."""
    program("unusual.py", "phases").is_exact(4, 9)


def test_without_seeds_it_goes_on_as_the_first_life_did(program: Start) -> None:
    trial = program("unusual.py", "unseeded")
    recorded = trial.recorded(7)
    assert trial.resumed(7).last_words == recorded.last_words
