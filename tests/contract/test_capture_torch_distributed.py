"""Capture and restore in groups of processes: DDP, fully sharded modules, uneven shards. One group of three serves all.

In each case a program trains, is captured, and goes on; another of the same kind, with other values, takes the image
and must end bit for bit where the first did.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORLD = 3
CASES = ("ddp", "fsdp2", "fsdp2-uneven", "fsdp2-after-evaluation", "fsdp2-mixed", "dtensor-columns", "misfit")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("group")
    command = [sys.executable, "-m", "tests.contract.capture_group", str(folder)]
    started = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for rank in range(WORLD)
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * WORLD, "\n".join(errors)[-6000:]
    return [json.loads(Path(folder / f"told-{rank}").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES[:-1])
def test_another_group_goes_on_bit_for_bit(case: str, told: list[dict[str, Any]]) -> None:
    found = [one[case] for one in told if case in one]
    assert len(found) == (2 if case in ("ddp", "fsdp2") else 3)
    for one in found:
        assert one["restored"] == one["captured"]
        assert one["again"] == one["end"]
        assert one["end"] != one["captured"]


def test_replicas_have_one_shared_part(told: list[dict[str, Any]]) -> None:
    one, other = told[0]["ddp"], told[1]["ddp"]
    assert one["shared"] == other["shared"]
    assert one["own"] != other["own"], "their generators differ"


def test_shards_differ_and_cover_all_rows(told: list[dict[str, Any]]) -> None:
    assert told[0]["fsdp2"]["shared"] != told[1]["fsdp2"]["shared"]
    assert [one["fsdp2-uneven"]["rows"] for one in told] == [3, 3, 1]


def test_a_shard_of_another_place_is_refused(told: list[dict[str, Any]]) -> None:
    for one in told:
        assert "was captured as float32" in one["misfit"] or "one tensor" in one["misfit"], one["misfit"]
        assert "on mesh [3] at [" in one["misfit"]
