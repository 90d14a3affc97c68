"""Watches this host: a thread that reads, every ``interval_s``, what the rules in ``lmres.scout.health`` judge.

What may take long, or for ever (a dead file system, a driver that does not answer, the site's own command), runs in a
thread of its own; while that does not answer, its check is skipped, and the others go on. The first round is waited
for, with a bound, so that an unfit host is known before it is given a place. If the watch itself fails, that is said
once, the host counts as it did, and ``rearm`` tries again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmres.policy import Health
from lmres.scout import health, kernel_log
from lmres.scout.edge import readers
from lmres.scout.edge.gpus import Gpus
from lmres.scout.edge.site_command import SiteCommand
from lmres.scout.health import Judge, Reading, Said, Verdict

log = logging.getLogger("lmres")

FIRST_S = 10.0
LEAST_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What is looked at. ``address``: by which peers reach this host. ``environ``: for the site's command.

    ``on_spawn`` and ``on_gone`` get the process id of the site's command, for whoever ends what is left of this agent.
    ``is_busy``: whether training runs here.
    """

    folder: Path
    address: Callable[[], str]
    environ: Mapping[str, str] = field(default_factory=dict)
    on_spawn: Callable[[int], None] = lambda pid: None
    on_gone: Callable[[int], None] = lambda pid: None
    is_busy: Callable[[], bool] = lambda: False


class Checks:
    """The checks of one policy, and what they last read. For one thread, but for ``stop``.

    ``on_answer`` is called, in another thread, when a slow one has an answer.
    """

    def __init__(self, settings: Health, host: Host, on_answer: Callable[[], None] = lambda: None) -> None:
        self._host = host
        self._checks = settings.checks
        self.timeout_s = max(settings.interval_s, LEAST_TIMEOUT_S)
        self._cpu: Any = None
        self._network: Any = None
        self._clock: Any = None
        self._gpus: Gpus | None = None
        self._seen_gpus: tuple[health.Gpu, ...] = ()
        self._log: readers.KernelLog | None = None
        self._slow: list[_Slow] = []
        if "disk" in self._checks:
            self._slow.append(_Slow("disk", self._disk, self.timeout_s, on_answer))
        if "gpu" in self._checks:
            self._slow.append(_Slow("gpu", self._gpu, self.timeout_s, on_answer))
        self._command: SiteCommand | None = None
        if settings.command is not None:
            self._command = SiteCommand(
                settings.command,
                timeout_s=self.timeout_s,
                env=host.environ,
                on_spawn=host.on_spawn,
                on_gone=host.on_gone,
            )
            run = functools.partial(_command, self._command)
            self._slow.append(_Slow("command", run, self.timeout_s * 1.5, on_answer))

    def read(self, wait_s: float) -> list[Reading]:
        """What the checks say now. Those that take longer than ``wait_s`` are asked, and answer later (``answers``)."""
        for slow in self._slow:
            slow.ask()
        readings = [_guarded(kernel_log.CHECK, self._read_log)]
        if "memory" in self._checks:
            readings.append(_guarded("memory", self._read_memory))
        return [*readings, *self.rates(), *self.answers(wait_s)]

    def rates(self) -> list[Reading]:
        """What follows from the last time to this."""
        readings = [_guarded("clock", self._read_clock)]
        if "cpu" in self._checks:
            readings.append(_guarded("cpu", self._read_cpu))
        if "network" in self._checks:
            readings.append(_guarded("network", self._read_network))
        return readings

    def answers(self, wait_s: float = 0.0) -> list[Reading]:
        """What slow checks have said since they were last asked."""
        end_s = time.monotonic() + wait_s
        found = (slow.answer(max(0.0, end_s - time.monotonic())) for slow in self._slow)
        return [reading for reading in found if reading is not None]

    def stop(self) -> None:
        """Ends the threads of the slow ones, and whatever the site's command has started; bounded. For any thread."""
        for slow in self._slow:
            slow.close()
        if self._command is not None:
            self._command.close()

    def close(self) -> None:
        self.stop()
        if self._log is not None:
            self._log.close()

    # -- the checks ---------------------------------------------------------------------------------------------------

    def _read_memory(self) -> Reading:
        return health.memory_reading(readers.read_memory(), is_busy=self._host.is_busy())

    def _read_clock(self) -> Reading:
        before, self._clock = self._clock, readers.read_clock()
        return health.clock_reading(before, self._clock)

    def _read_cpu(self) -> Reading:
        before, self._cpu = self._cpu, readers.read_cpu(_now_ms())
        return health.cpu_reading(before, self._cpu)

    def _read_network(self) -> Reading:
        address = self._host.address()
        if not address:
            return health.skipped("network", "the address of this host is not known yet")
        before, self._network = self._network, readers.read_network(_now_ms(), address)
        reading = health.network_reading(before, self._network)
        if not self._network.interface and before is not None and before.address == address:
            self._network = before  # what carried it once is remembered
        return reading

    def _read_log(self) -> Reading:
        if self._log is None:
            self._log = readers.KernelLog()
        return kernel_log.judge_lines(self._log.lines(), self._checks).reading

    def _disk(self) -> Reading:
        return health.disk_reading(readers.read_disk(self._host.folder))

    def _gpu(self) -> Reading:
        if self._gpus is None:
            self._gpus = Gpus()
        found = self._gpus.read()
        self._seen_gpus = health.gpu_base(self._seen_gpus, found)
        return health.gpu_reading(self._seen_gpus, found)


def _command(command: SiteCommand) -> Reading:
    return health.command_reading(command.run())


def _guarded(check: str, read: Callable[[], Reading]) -> Reading:
    """A check that fails is skipped, whatever it raises: its failure says nothing about the host."""
    try:
        return read()
    except readers.CannotRead as error:
        return health.skipped(check, str(error))
    except Exception as error:
        return health.skipped(check, f"the check itself failed: {error!r}")


class _Slow:
    """A check in a thread of its own. ``ask`` and ``answer`` are for one other thread."""

    def __init__(self, check: str, read: Callable[[], Reading], limit_s: float, on_answer: Callable[[], None]) -> None:
        self._check = check
        self._on_answer = on_answer
        self._read = read
        self._limit_s = limit_s
        self._asked = threading.Event()
        self._answered = threading.Event()
        self._closing = False
        self._since_s: float | None = None
        self._reading: Reading | None = None
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Unless it is still busy."""
        if self._since_s is not None or self._closing:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"lmres-health-{self._check}", daemon=True)
            thread.start()
            self._thread = thread
        self._since_s = time.monotonic()
        self._answered.clear()
        self._asked.set()

    def answer(self, wait_s: float) -> Reading | None:
        """None while it is busy, and not yet for too long."""
        if self._since_s is None:
            return None
        if self._answered.wait(wait_s):
            self._since_s = None
            return self._reading
        busy_s = time.monotonic() - self._since_s
        if busy_s < self._limit_s:
            return None
        return health.skipped(self._check, f"it has not answered for {self._limit_s:g} s")

    def close(self) -> None:
        """For any thread. Nobody waits for its answer any more."""
        self._closing = True
        self._asked.set()
        self._answered.set()

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._closing:
                return
            self._reading = _guarded(self._check, self._read)
            self._answered.set()
            self._on_answer()


class HealthWatch:
    """The thread; the callbacks are called from it. ``on_armed`` gets the checks that run, and why others can not;
    ``on_change`` each new verdict; ``on_said`` what is worth telling once; ``on_off`` why the watch has failed."""

    def __init__(
        self,
        settings: Health,
        host: Host,
        *,
        on_armed: Callable[[tuple[str, ...], str], None],
        on_change: Callable[[Verdict], None],
        on_said: Callable[[Said], None],
        on_off: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._host = host
        self._on_armed = on_armed
        self._on_change = on_change
        self._on_said = on_said
        self._on_off = on_off
        self._first = threading.Event()
        self._wake = threading.Event()
        self._poked = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._checks: Checks | None = None
        self._has_begun = False
        self.verdict = Verdict()

    def start(self, bound_s: float = FIRST_S) -> None:
        """Returns when the first round is over, or after ``bound_s``: then the host counts as fit so far."""
        self._begin()
        self._first.wait(bound_s)

    def rearm(self) -> bool:
        """Tries again if the watch has failed; says whether it had."""
        if self._closing or not self._has_begun or (self._thread is not None and self._thread.is_alive()):
            return False
        self._begin()
        return True

    def poke(self) -> None:
        """The next round is now."""
        self._poked = True
        self._wake.set()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        checks = self._checks
        if checks is not None:
            checks.stop()
        if self._thread is not None:
            self._thread.join(2.0)

    def _begin(self) -> None:
        self._has_begun = True
        thread = threading.Thread(target=self._run, name="lmres-health", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads can be started here now
            self._first.set()
            self._fail(error)
            return
        self._thread = thread

    def _fail(self, error: Exception) -> None:
        log.warning("the host's health is not watched any more", exc_info=error)
        with contextlib.suppress(Exception):
            self._on_off(repr(error))

    def _run(self) -> None:
        checks = None
        try:
            self._checks = checks = Checks(self._settings, self._host, self._wake.set)
            judge = Judge()
            readings = checks.read(FIRST_S) if not self._closing else []
            if self._closing:
                return
            self._tell_armed(readings)
            self._judge(judge, readings, is_first=True)
            self._first.set()
            while not self._closing:
                self._pause(checks, judge, time.monotonic() + self._settings.interval_s)
                if not self._closing:
                    self._judge(judge, checks.read(0.0))
        except Exception as error:
            self._fail(error)
        finally:
            self._first.set()
            if checks is not None:
                checks.close()

    def _pause(self, checks: Checks, judge: Judge, end_s: float) -> None:
        """Until the next round; answers that come meanwhile count at once."""
        while not self._closing and not self._poked and (left_s := end_s - time.monotonic()) > 0:
            if self._wake.wait(left_s):
                self._wake.clear()
                self._judge(judge, checks.answers())
        self._poked = False

    def _tell_armed(self, readings: list[Reading]) -> None:
        runs = tuple(sorted(r.check for r in readings if r.status != "skipped"))
        without = "; ".join(f"without {r.check} ({r.found})" for r in readings if r.status == "skipped")
        every = f"every {self._settings.interval_s:g} s"
        self._on_armed(runs, f"{every}, {without}" if without else every)

    def _judge(self, judge: Judge, readings: list[Reading], *, is_first: bool = False) -> None:
        """What can not run at first is told by ``on_armed``; but the site's own command was meant to run."""
        verdict, said = judge.take(readings, _now_ms())
        for each in said:
            if not is_first or each.kind != "skipped" or each.check == "command":
                self._on_said(each)
        if verdict != self.verdict:
            self.verdict = verdict
            self._on_change(verdict)


def look_once(settings: Health, host: Host, wait_s: float = FIRST_S, *, apart_s: float = 0.5) -> list[Reading]:
    """One round of all checks, for people; counters are read twice, ``apart_s`` one from the other."""
    checks = Checks(settings, host)
    try:
        found = {r.check: r for r in checks.read(wait_s)}
        time.sleep(apart_s)
        return list({**found, **{r.check: r for r in checks.rates()}}.values())
    finally:
        checks.close()


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
