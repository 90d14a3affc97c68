"""Which names of a program may come from a clock."""

from __future__ import annotations

import pytest

from lmres.adapters.resume.clocks import clocked_lines, names_from, volatile_names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("t0 = time.time()", {"t0"}),
        ("from time import perf_counter\nbegin = perf_counter()", {"begin"}),
        ("t0 = time.time()\ndt = other() - t0\nspeed = n / dt", {"t0", "dt", "speed"}),
        ("now: float = time.monotonic()", {"now"}),
        ("total += time.time() - last", {"total"}),
        ("a, b = step, time.time()", {"b"}),
        ("a, b = both(time.time())", {"a", "b"}),
        ("self.started = time.time()", {"started"}),
        ("times['x'] = time.time()", {"times"}),
        ("if (t := time.time()) > 3: pass", {"t"}),
        ("name = f'run-{os.getpid()}'", {"name"}),
        ("run = uuid.uuid4().hex", {"run"}),
        ("with tempfile.TemporaryDirectory() as folder: pass", {"folder"}),
        ("step = step + 1\nloss = model(x)", set()),
        ("def broken(:", set()),
    ],
)
def test_assignments(source: str, names: set[str]) -> None:
    assert volatile_names(source) == names


def test_meters_are_followed_through_their_parameters() -> None:
    source = """
class Meter:
    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n

end = time.time()
batch = Meter()
batch.update(time.time() - end)
losses.update(loss.item(), 8)
"""
    assert volatile_names(source) == {"end", "val", "sum", "batch"}


def test_keywords_are_followed_too() -> None:
    assert "seconds" in volatile_names("def log(step, seconds): pass\nlog(1, seconds=time.time())")


def test_lines_that_run_by_the_clock() -> None:
    source = """
import time
last = time.time()
for step in range(9):
    if step % 2 and time.time() - last > 5:
        print(loss.item())
        last = time.time()
    total += loss.item()
    due = time.time() > last + 1
    if due:
        tell(loss)
    text = loss.item() if due else None

def tell(loss):
    print(loss.item())

def maybe(loss):
    if time.time() < last:
        return
    print(loss.item())

def other(loss):
    print(loss.item())
"""
    lines = source.splitlines()
    found = clocked_lines(source)
    reads = {i for i, line in enumerate(lines, 1) if "item()" in line}
    steady = {i for i, line in enumerate(lines, 1) if line.startswith("    total")} | {len(lines)}
    assert reads - found == steady


def test_what_grows_by_the_clock_is_volatile() -> None:
    assert "times" in volatile_names("times.append(time.time() - end)")
    assert "times" in volatile_names("self.times.extend([time.time()])")
    assert "self" not in volatile_names("self.update(time.time())")
    assert "losses" not in volatile_names("losses.append(loss.item())")


def test_names_taken_from_a_text() -> None:
    source = """lives = int(os.environ["LIVES"])\nself.n: int = os.getenv("LIVES")\nweight = lives * 2\nother = 3"""
    assert names_from(source, ["LIVES"]) == {"lives", "n"}
    assert names_from("def", ["LIVES"]) == frozenset()
