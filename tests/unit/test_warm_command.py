"""Which commands are warmed, and which differences of environment are allowed."""

from __future__ import annotations

import pytest

from lmres.adapters.bootstrap import protect, watching
from lmres.rendezvous.edge.workers.warm_command import (
    LAUNCH_VARIABLES,
    Program,
    Refused,
    difference,
    environment_refused,
    parse,
)

PYTHON = "/opt/venv/bin/python3.11"


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("-u train.py", Program(script="train.py")),
        ("-u train.py -c -I --no-python", Program(script="train.py")),
        ("-u -m pkg.train --lr 1", Program(module="pkg.train")),
        ("-uB -X dev -Xutf8=1 -W error -Wignore train.py", Program(script="train.py")),
        ("-OO -u -X pycache_prefix=/x folder", Program(script="folder")),
        ("-qsPbRxu train.py", Program(script="train.py")),
    ],
)
def test_what_torchrun_starts(words: str, program: Program) -> None:
    assert parse((PYTHON, *words.split()), {PYTHON}) == program


@pytest.mark.parametrize(
    "words",
    [
        "",
        "train.py",  # buffered
        "-u",
        "-u -m",
        "-u -c code",
        "-u -",
        "-u --",
        "-u --check-hash-based-pycs always train.py",
        "-I -u train.py",
        "-E -u train.py",
        "-uS train.py",
        "-ui train.py",
        "-uv train.py",
        "-ud train.py",
        "-u -X importtime train.py",
        "-u -X tracemalloc=5 train.py",
        "-u -X",
        "-u -W",
        "-umtrain",
    ],
)
def test_what_is_not_surely_the_same(words: str) -> None:
    assert isinstance(parse((PYTHON, *words.split()), {PYTHON}), Refused)


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("/usr/bin/numactl", "--physcpubind=0", PYTHON, "-u", "train.py"),
        ("/bin/sh", "-c", "python train.py"),
        ("/opt/other/python", "-u", "train.py"),
        ("torchrun-wrapper", "-u", "train.py"),
    ],
)
def test_other_programs(args: tuple[str, ...]) -> None:
    assert isinstance(parse(args, {PYTHON, "torchrun-wrapper"}), Refused)


def test_an_interpreter_that_talks_about_its_imports() -> None:
    assert environment_refused({"PYTHONVERBOSE": "1"}) == "PYTHONVERBOSE is set"
    assert environment_refused({"PYTHONVERBOSE": "", "PYTHONHASHSEED": "3"}) is None


def test_only_what_a_rank_is_told_may_differ() -> None:
    assert {protect.VARIABLE, watching.VARIABLE} <= LAUNCH_VARIABLES, "what an agent adds to each launch"
    started = {**dict.fromkeys(LAUNCH_VARIABLES, "1"), "A": "1"}
    assert difference(started, dict(started), set(started), True) is None
    for name in LAUNCH_VARIABLES:
        for wanted in ({**started, name: "2"}, {k: v for k, v in started.items() if k != name}):
            assert difference(started, wanted, {"A"}, False) is None
            assert name in (difference(started, wanted, {name}, False) or "")
    gone = {k: v for k, v in started.items() if k != "RANK"}
    assert difference(started, {**started, "RANK": "2"}, (), True) is None
    assert "RANK" in (difference(started, gone, (), True) or "")
    assert "RANK" in (difference(gone, started, (), True) or "")


@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "TORCH_LOGS", "PYTHONPATH", "X"]
)
def test_nothing_else_may(name: str) -> None:
    for started, wanted in (({name: "1"}, {name: "2"}), ({name: "1"}, {}), ({}, {name: ""})):
        assert name in (difference(started, wanted, (), False) or "")
