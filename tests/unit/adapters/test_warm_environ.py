"""Which looks at the environment a warming process tells of."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lmres.adapters.bootstrap.warm_main import EnvironWatch

BY_PREFIX = "found = {k: v for k, v in os.environ.items() if k.startswith('TQDM_')}"


@pytest.fixture
def watch() -> Iterator[EnvironWatch]:
    watch = EnvironWatch()
    watch.begin()
    yield watch
    watch.end()


def look(code: str, module: str) -> None:
    exec(code, {"__name__": module, "os": os})


def test_a_look_for_a_prefix_is_no_look_at_all_names(watch: EnvironWatch) -> None:
    look(BY_PREFIX, "tqdm.utils")
    assert not watch.listed
    assert watch.read == set()


@pytest.mark.parametrize("code", [BY_PREFIX, "list(os.environ)", "len(os.environ)", "dict(os.environ)"])
def test_any_other_module_has_looked_at_all_names(watch: EnvironWatch, code: str) -> None:
    look(code, "site_tools")
    assert watch.listed


def test_a_single_variable(watch: EnvironWatch) -> None:
    look("os.environ.get('RANK'); os.getenv('HOME')", "site_tools")
    assert watch.read == {"RANK", "HOME"}
    assert not watch.listed
