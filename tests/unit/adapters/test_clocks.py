"""Which names of a program may come from a clock."""

from __future__ import annotations

import pytest

from lmres.adapters.resume.clocks import volatile_names


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
    assert volatile_names(source) == {"end", "val", "sum"}


def test_keywords_are_followed_too() -> None:
    assert "seconds" in volatile_names("def log(step, seconds): pass\nlog(1, seconds=time.time())")
