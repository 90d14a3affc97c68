"""A process that never trained goes on from an image, and ends bit for bit where the first one does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.unit.adapters import capture_kit as kit


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """For each program, here and elsewhere: digest when captured, at the end, and torch's view of the end."""
    folder = tmp_path_factory.mktemp("images")
    here = {}
    for name in kit.PROGRAMS:
        program = kit.build(name, 5)
        program.run(kit.BEFORE)
        own, shared = kit.to_bytes(program.state())
        (folder / f"{name}.own").write_bytes(own)
        (folder / f"{name}.shared").write_bytes(shared)
        captured = kit.digest(program.state())
        program.run(kit.AFTER)
        here[name] = [captured, kit.digest(program.state()), kit.seen_by_torch(program)]
    command = [sys.executable, "-m", "tests.unit.adapters.capture_kit", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return here, json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", sorted(kit.PROGRAMS))
def test_another_process_goes_on_bit_for_bit(name: str, ends: tuple[dict[str, list[str]], ...]) -> None:
    here, there = ends
    assert there[name] == here[name]
