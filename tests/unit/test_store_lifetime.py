"""Who keeps a store process alive, rule by rule."""

from __future__ import annotations

from lmres.rendezvous.edge.stores.lifetime import Lifetime


def lifetime() -> Lifetime:
    return Lifetime(linger_ms=5_000, first_agent_ms=60_000, settle_ms=100)


def test_waits_for_the_first_agent_and_no_longer() -> None:
    life = lifetime()
    life.passed(59_999)
    assert not life.over
    life.passed(1)
    assert life.over


def test_an_agent_keeps_it_alive_for_ever() -> None:
    life = lifetime()
    life.joined("a")
    life.passed(10**9)
    assert not life.over


def test_after_a_bye_it_settles_shortly() -> None:
    life = lifetime()
    life.joined("a")
    life.said_bye("a")
    life.passed(10**9)
    assert not life.over, "the connection is still there"
    life.left("a")
    assert not life.over
    life.passed(100)
    assert life.over


def test_an_agent_that_left_without_a_word_is_expected_back() -> None:
    life = lifetime()
    life.joined("a")
    life.left("a")
    life.passed(4_999)
    assert not life.over
    life.joined("a")
    life.passed(10**9)
    assert not life.over
    life.left("a")
    life.passed(5_000)
    assert life.over


def test_one_that_is_expected_back_outweighs_anothers_bye() -> None:
    life = lifetime()
    life.joined("a")
    life.joined("b")
    life.left("a")
    life.said_bye("b")
    life.left("b")
    life.passed(4_999)
    assert not life.over
    life.passed(1)
    assert life.over


def test_all_connections_of_an_agent_must_be_gone() -> None:
    life = lifetime()
    life.joined("a")
    life.joined("a")
    life.said_bye("a")
    life.left("a")
    life.passed(10**9)
    assert not life.over
    life.left("a")
    life.passed(100)
    assert life.over


def test_a_new_hello_takes_a_bye_back() -> None:
    life = lifetime()
    life.joined("a")
    life.said_bye("a")
    life.joined("a")
    life.left("a")
    life.left("a")
    life.passed(4_999)
    assert not life.over
