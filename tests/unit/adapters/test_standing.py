"""A worker that is asked to stand still: where, how long, and what it tells. The clock moves when it sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lmres.adapters.resume.standing import NEXT, STAND_S, CanNotSave, Standing


class Agent:
    """Asks by a word that changes at set times."""

    def __init__(self, *words: tuple[float, int]) -> None:
        self.words = words
        self.now_s = 100.0
        self.began_s = self.now_s
        self.told: list[tuple[int, int, str]] = []
        self.gone_on: list[int] = []
        self.marks: list[float] = []
        self.standing = Standing(self, lambda: self.now_s, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    @property
    def passed_s(self) -> float:
        return self.now_s - self.began_s

    def pause_at(self) -> int:
        return next((word for since_s, word in reversed(self.words) if self.passed_s >= since_s), 0)

    def paused(self, step: int, *, not_before: int = 0, problem: str = "") -> None:
        self.told.append((step, not_before, problem))

    def goes_on(self, step: int) -> None:
        self.gone_on.append(step)

    def alive(self) -> None:
        self.marks.append(self.passed_s)

    def boundary(self, step: int, save: Callable[[], bool] = lambda: True) -> bool:
        """Whether it stood there."""
        if not self.standing.is_asked(step):
            return False
        self.standing.stand(step, save)
        return True


def test_nobody_asks() -> None:
    agent = Agent()
    assert not agent.boundary(5) and agent.passed_s == 0


def test_it_stands_at_the_step_that_is_meant_and_saves_there() -> None:
    agent = Agent((0, 7), (2, 0))
    assert not agent.boundary(5) and not agent.boundary(6)
    saved = []
    assert agent.boundary(7, lambda: bool(saved.append(7)) or True)
    assert saved == [7] and agent.told == [(7, 0, "")]
    assert agent.passed_s == pytest.approx(2, abs=0.1)


def test_the_next_boundary_is_only_a_stop_and_what_follows_is_the_step() -> None:
    agent = Agent((0, NEXT), (0.5, 8), (3, 0))
    assert agent.boundary(7)
    assert agent.told == [] and agent.passed_s == pytest.approx(0.5, abs=0.1)
    assert agent.boundary(8) and agent.told == [(8, 0, "")]


def test_while_it_stands_it_is_seen_to_live() -> None:
    agent = Agent((0, 7), (1, 0))
    agent.boundary(7)
    gaps = [b - a for a, b in zip(agent.marks, agent.marks[1:], strict=False)]
    assert max(gaps) < 0.1 and len(agent.marks) < 30


def test_it_goes_on_after_a_bounded_time_and_ignores_that_word() -> None:
    agent = Agent((0, NEXT))
    assert agent.boundary(7)
    assert agent.passed_s == pytest.approx(STAND_S, abs=0.1)
    assert not agent.boundary(8)
    agent.words = ((0, 9),)
    assert not agent.boundary(8) and agent.standing.is_asked(9), "another word is another request"


def test_a_state_that_is_not_saved_at_once_is_tried_again() -> None:
    agent = Agent((0, 7), (1, 0))
    answers: Iterator[bool] = iter([False, False, True])
    agent.boundary(7, lambda: next(answers))
    assert agent.told == [(7, 0, "")]


@pytest.mark.parametrize(
    ("why", "told"),
    [(CanNotSave(not_before=11), (7, 11, "")), (CanNotSave(problem="not finite"), (7, 0, "not finite"))],
)
def test_what_can_not_be_saved_is_told_once(why: CanNotSave, told: tuple[int, int, str]) -> None:
    agent = Agent((0, 7), (1, 0))

    def save() -> bool:
        raise why

    agent.boundary(7, save)
    assert agent.told == [told]


def test_a_step_that_has_passed_is_told_and_not_stood_for() -> None:
    agent = Agent((0, 7))
    assert agent.boundary(9)
    assert agent.told == [(9, 10, "")] and agent.passed_s < 0.1
    assert not agent.boundary(10)


def test_one_that_goes_on_unasked_takes_back_that_it_stands() -> None:
    agent = Agent((0, 7))
    assert agent.boundary(7)
    assert agent.told == [(7, 0, "")] and agent.gone_on == [7]
    let_go = Agent((0, 7), (1, 0))
    assert let_go.boundary(7)
    assert let_go.gone_on == []
