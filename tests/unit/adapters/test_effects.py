"""What a program writes on its way back: in a process of its own, since the standard streams are held back as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import builtins, io, json, logging, os, pathlib, pickle, shutil, sys, tempfile, threading, time
import numpy as np, torch
from types import SimpleNamespace
from lmres.adapters.resume.patches.effects import Effects
engine = SimpleNamespace(on_return=[], on_arrival=[])
effects = Effects(torch, engine)
sys.excepthook = lambda *error: (effects.let_go(), sys.__excepthook__(*error))
def patched():
    return builtins.open, io.open, os.replace, os.mkdir, shutil.rmtree, time.sleep, torch.save, tempfile.mkdtemp
originals = patched()
"""


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    file = folder / "program.py"
    file.write_text(HEAD + code)
    done = subprocess.run(
        [sys.executable, str(file)], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    file.unlink()
    return done


def test_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("first life")
    code = """
effects.hold_back()
print("printed"); sys.stderr.write("said"); os.write(1, b"raw"); os.system("echo from a shell")
open("there", "w").write("second life"); pathlib.Path("new").write_text("x"); open("new", "xb").write(b"")
torch.save({}, "a.pt"); np.save("a.npy", np.zeros(1)); pickle.dump({}, open("a.pkl", "wb"))
os.makedirs("deep/er"); os.mkdir("there"); pathlib.Path("deep").mkdir()
os.replace("there", "elsewhere"); os.rename("there", "elsewhere"); pathlib.Path("there").unlink(); os.remove("there")
assert shutil.copy("there", "copied") == "copied"; shutil.move("there", "moved")
shutil.rmtree("."); os.symlink("a", "b")
began = time.time(); time.sleep(30); assert time.time() - began < 10
assert open("there").read() == "first life"
effects.let_go()
assert originals == patched()
print("after"); sys.stderr.write("after")
"""
    done = run(tmp_path, code)
    assert (done.stdout, done.stderr, done.returncode) == ("after\n", "after", 0)
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == {"there": "first life"}


def test_files_that_are_still_open_go_on(tmp_path: Path) -> None:
    for name in ("written", "added", "updated"):
        (tmp_path / name).write_text("first life and more\n")
    code = """
effects.hold_back()
written, added = open("written", "w"), open("added", "a")
updated, fresh = open("updated", "r+"), open("fresh", "wb", buffering=0)
closed = open("closed", "w"); closed.write("x"); closed.close()
written.write("one\\n"); added.write("one\\n"); fresh.write(b"one"); updated.write("0th")
effects.let_go()
written.write("two\\n"); added.write("two\\n"); fresh.write(b"two"); updated.write("2nd")
assert written.name == "written" and updated.seek(0) == 0
"""
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "written").read_text() == "one\ntwo\n"
    assert (tmp_path / "added").read_text() == "first life and more\ntwo\n"
    assert (tmp_path / "fresh").read_bytes() == b"onetwo"
    assert (tmp_path / "updated").read_text() == "fir2ndlife and more\n"
    assert not (tmp_path / "closed").exists()


def test_files_opened_for_appending_before(tmp_path: Path) -> None:
    code = """
effects.watch_appending()
lines, handler = open("lines", "a", buffering=1), logging.FileHandler("log")
logger = logging.getLogger("x"); logger.addHandler(handler); logger.setLevel(logging.INFO)
lines.write("before\\n"); logger.info("before")
effects.hold_back()
lines.write("meanwhile\\n"); logger.info("meanwhile")
effects.let_go()
lines.write("after\\n"); logger.info("after")
"""
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lines").read_text() == "before\nafter\n"
    assert (tmp_path / "log").read_text() == "before\nafter\n"


def test_a_file_written_from_the_start_comes_out_whole(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        'table = open("table", "w"); table.write("a\\n"); effects.hold_back(); table.write("b\\n"); table.flush();'
        ' effects.let_go(); table.write("c\\n")',
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "table").read_text() == "a\nb\nc\n"


def test_temporary_files_are_real_and_leave_nothing(tmp_path: Path) -> None:
    code = """
effects.hold_back()
with tempfile.TemporaryDirectory(dir=".") as scratch:
    inside = pathlib.Path(scratch) / "sub"; inside.mkdir(); (inside / "a").write_text("x")
    os.rename(inside / "a", inside / "b"); assert (inside / "b").read_text() == "x"
assert not os.path.exists(scratch)
with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as draft:
    draft.write("x")
assert os.path.exists(draft.name)
os.replace(draft.name, "settled")
effects.let_go()
"""
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_other_threads_still_wait(tmp_path: Path) -> None:
    code = """
effects.hold_back()
waited = []
def wait():
    began = time.monotonic(); time.sleep(0.2); waited.append(time.monotonic() - began)
thread = threading.Thread(target=wait); thread.start(); thread.join()
effects.let_go()
print(waited[0] > 0.15)
"""
    assert run(tmp_path, code).stdout == "True\n"


def test_the_way_back_speaks_to_the_real_stream(tmp_path: Path) -> None:
    done = run(tmp_path, 'effects.hold_back(); effects.say("at step 3"); print("x"); effects.let_go()')
    assert (done.stdout, done.stderr) == ("", "at step 3\n")


@pytest.mark.parametrize("times", [1, 2])
def test_letting_go_twice_is_letting_go_once(tmp_path: Path, times: int) -> None:
    done = run(tmp_path, f'effects.hold_back(); [effects.let_go() for _ in range({times})]; print("back")')
    assert (done.stdout, done.stderr) == ("back\n", "")
