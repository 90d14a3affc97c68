"""Tensors that stay as they were when the loop began."""

from __future__ import annotations

import torch

from lmres.adapters.resume.constants import Constants


def test_untouched_is_constant_and_changed_is_not() -> None:
    table, counter = torch.zeros(3), torch.zeros(3)
    constants = Constants()
    constants.begin({"table": table, "counter": counter})
    counter += 1
    assert table in constants
    assert counter not in constants


def test_what_came_later_is_not_constant() -> None:
    constants = Constants()
    constants.begin({})
    assert torch.zeros(3) not in constants


def test_an_id_that_is_used_again_is_another_tensor() -> None:
    constants = Constants()
    for _ in range(50):
        gone = torch.zeros(3)
        constants.begin({"gone": gone})
        del gone
        assert torch.zeros(3) not in constants


def test_views_share_the_version() -> None:
    table = torch.zeros(3)
    view = table[1:]
    constants = Constants()
    constants.begin({"table": table, "view": view})
    table[0] = 1
    assert view not in constants
