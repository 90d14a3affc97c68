from __future__ import annotations

from lmres.gemini.inventory import Key
from lmres.gemini.timeline import in_past

BASES = {2: Key(5, 1), 3: Key(8, 2), 4: Key(7, 2)}
"""Generation 2 began from step 5 of 1, both 3 and 4 from images of 2."""


def test_an_image_is_in_its_own_past() -> None:
    assert in_past(Key(5, 1), Key(5, 1), {})


def test_earlier_steps_of_the_same_generation() -> None:
    assert in_past(Key(4, 1), Key(5, 1), {})
    assert not in_past(Key(6, 1), Key(5, 1), {})


def test_a_generation_left_at_a_step_counts_up_to_it() -> None:
    assert in_past(Key(5, 1), Key(8, 2), BASES)
    assert not in_past(Key(6, 1), Key(8, 2), BASES)
    assert in_past(Key(7, 2), Key(9, 3), BASES)
    assert in_past(Key(5, 1), Key(9, 3), BASES)


def test_a_generation_that_was_given_up_is_no_past() -> None:
    assert not in_past(Key(8, 3), Key(9, 4), BASES)
    assert not in_past(Key(8, 2), Key(9, 4), BASES)


def test_what_is_not_known_is_not_the_past() -> None:
    assert not in_past(Key(1, 1), Key(9, 7), BASES)
    assert not in_past(Key(1, 1), Key(9, 2), {2: Key(5, 2)})


def test_the_future_is_not_the_past() -> None:
    assert not in_past(Key(1, 3), Key(9, 2), BASES)
