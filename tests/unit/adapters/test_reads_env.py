"""Whether a program asks for its resume step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

READS = {
    "get": 'os.environ.get("LMRES_RESUME_STEP")',
    "getenv": 'os.getenv("LMRES_RESUME_STEP", "0")',
    "item": 'os.environ["LMRES_RESUME_STEP"]',
    "by a constant": "os.environ[NAME]",
    "by the other name": 'os.environ.get("LM_RESILIENCY_TORCHRUN_CHECKPOINT_STEP")',
    "in a function": "asks()",
    "membership": '"LMRES_RESUME_STEP" in os.environ',
}
COPIES = {
    "copy": "os.environ.copy()",
    "dict": "dict(os.environ)",
    "items": "[v for k, v in os.environ.items()]",
    "subprocess": 'subprocess.run(["true"], env={**os.environ})',
    "another name": 'os.environ.get("HOME")',
}
SCRIPT = """
import os, subprocess, sys
from types import SimpleNamespace
from lmres.adapters.resume import reads_env
engine = SimpleNamespace(phase={phase!r}, jump=False)
reads_env.watch(engine)
code = '''
NAME = "LMRES_RESUME_STEP"
def asks():
    return os.environ["LMRES_RESUME_STEP"]
''' if {named!r} else ""
exec(compile(code + {what!r}, "/home/me/train.py", "exec"), {{"os": os, "subprocess": subprocess, "__name__": "train"}})
print(engine.jump)
"""


def asked(what: str, *, phase: str = "setup", named: bool = False) -> bool:
    script = SCRIPT.format(what=what, phase=phase, named=named)
    env = {**os.environ, "LMRES_RESUME_STEP": "5", "LM_RESILIENCY_TORCHRUN_CHECKPOINT_STEP": "5"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


@pytest.mark.parametrize("how", READS)
def test_reading_the_name_is_asking(how: str) -> None:
    assert asked(READS[how], named="NAME" in READS[how] or "asks" in READS[how])


@pytest.mark.parametrize("how", COPIES)
def test_copying_everything_is_not(how: str) -> None:
    assert not asked(COPIES[how])


def test_after_the_first_forward_it_is_too_late() -> None:
    assert not asked(READS["get"], phase="live")
