"""What ``faulthandler`` writes, as frames."""

from __future__ import annotations

import faulthandler
import os
import tempfile

from lmres.rendezvous.edge.workers.stacks import parse, read_stacks
from lmres.scout.sighting import MAX_STACK_LINES

TEXT = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3/threading.py", line 320 in wait
  File "/usr/lib/python3/threading.py", line 900 in _bootstrap

Current thread 0x00007f0000000002 (most recent call first):
  File "/home/me/my work/train.py", line 12 in inner
  File "/home/me/my work/train.py", line 40 in main
  File "<string>", line 1 in <module>

Thread 0x00007f0000000003 [name] (most recent call first):
  File "/home/me/other.py", line 3 in run
"""


def test_the_current_thread_outermost_first() -> None:
    assert parse(TEXT) == (
        "<string>:1 <module>",
        "/home/me/my work/train.py:40 main",
        "/home/me/my work/train.py:12 inner",
    )


def test_of_several_answers_the_last() -> None:
    assert parse(TEXT + "\n" + TEXT.replace("inner", "later"))[-1].endswith("later")


def test_what_is_no_answer() -> None:
    assert parse("") == ()
    assert parse(TEXT[: TEXT.index("Current")]) == ()
    assert parse("Current thread 0x1 (most recent call first):\n  <no Python frame>\n") == ()
    assert parse('Current thread 0x1:\n  File "a.py", line 3 i') == ()


def test_the_innermost_of_many() -> None:
    frames = "\n".join(f'  File "a.py", line {n} in f{n}' for n in range(99))
    found = parse(f"Current thread 0x1 (most recent call first):\n{frames}\n  ...\n")
    assert len(found) == MAX_STACK_LINES
    assert found[-1] == "a.py:0 f0"


def test_this_interpreters_own() -> None:
    def spot() -> str:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            return file.read()

    *_, last = parse(spot())
    assert last.endswith(" spot")
    assert last.startswith(__file__)


def test_nothing_is_sent_to_a_process_without_a_handler() -> None:
    assert read_stacks(os.getpid(), 61, 0, 0.05) == ()
    assert read_stacks(os.getpid(), 0, -1, 0.05) == ()
    assert read_stacks(1 << 30, 61, 0, 0.05) == ()
