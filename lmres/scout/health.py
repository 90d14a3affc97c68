"""Whether a host is fit for training: rules from what was read of it to readings, and from readings to a verdict.

Two kinds of rules:

- *facts* (a device is lost, a link has no carrier, the site's command says so) count at once;
- *trends* (little memory, errors that keep rising) count after ``TREND_READINGS`` in a row.

Fit again after ``GOOD_READINGS`` in a row. What a kernel message tells is an event, not a state: it stands for
``EVENT_STANDS_MS``. A check that could not run changes nothing, in either direction.

Training itself must not make a host unfit: load of the processors is none of these rules, and a group's quota of
processor time that is used up, little memory while workers run, or a clock that jumps, is only told. Nor does what is
far from hurting anybody: shares of a large memory or disk are capped, since 2 % of 2 TB are plenty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

Status = Literal["fit", "unfit", "skipped"]

TREND_READINGS = 3
GOOD_READINGS = 2
EVENT_STANDS_MS = 600_000

MIN_MEMORY_FRACTION = 0.02
MIN_MEMORY_BYTES = 256 << 20
CAP_MEMORY_BYTES = 4 << 30
MIN_DISK_FRACTION = 0.01
MIN_DISK_BYTES = 64 << 20
CAP_DISK_BYTES = 1 << 30
SMALL_PART = 16
"""Of a memory or disk that is small itself, this part of it is enough, whatever the fixed minimum."""

MAX_QUOTA_WAIT = 0.5
MAX_HOT = 0.1
MAX_HOT_EVENTS_PER_S = 10.0
MAX_ERROR_FRACTION, MIN_ERRORS_PER_S = 0.01, 1.0
MAX_DROP_FRACTION, MIN_DROPS_PER_S = 0.05, 50.0
CLOCK_JUMP_MS = 1_000
LASTING_WARNINGS = frozenset({"cpu", "memory", "gpu"})
"""Checks whose warnings are of states, not of events."""
MAX_REASON_CHARS = 200


# -- what was read ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes. ``group_limit``: the lowest limit of a control group, None for none; ``group_free``: what is left under
    it, pages that the kernel can take back included."""

    total: int
    available: int
    group_limit: int | None = None
    group_free: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The file system that holds the agent's folder. Bytes."""

    path: str
    total: int
    free: int
    read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Counters that only rise, None where the system has none. ``quota_wait_us``: how long groups of this process
    have waited for their quota; ``hot_ms`` and ``hot_events``: throttled by heat, of the worst core."""

    at_ms: int
    quota_wait_us: int | None = None
    hot_ms: int | None = None
    hot_events: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The interface that carries ``address``, empty if none does. ``carrier`` None: not told. Counters only rise."""

    at_ms: int
    address: str
    interface: str
    up: bool = True
    carrier: bool | None = None
    packets: int = 0
    errors: int = 0
    drops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Both clocks at one moment."""

    wall_ms: int
    monotonic_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """``lost``: why it does not answer. ``uncorrected``: memory errors since its driver was loaded. ``links_up``: its
    NVLinks that are. None where the device does not tell."""

    index: int
    name: str = ""
    lost: str = ""
    uncorrected: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    links_up: tuple[int, ...] = ()
    celsius: int | None = None
    slowdown_celsius: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """How the site's command ended. ``problem``: why it said nothing about the host; ``line``: its first one."""

    code: int = 0
    line: str = ""
    problem: str = ""


# -- readings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one check says now. ``found``: one line of what was seen, and of why it is unfit or was skipped.

    ``fact``: counts at once. ``lasting_ms``: stands for so long, though the next reading may not show it. ``warning``:
    worth telling, without consequence.
    """

    check: str
    status: Status = "fit"
    found: str = ""
    fact: bool = False
    lasting_ms: int = 0
    warning: str = ""


def skipped(check: str, why: str) -> Reading:
    return Reading(check=check, status="skipped", found=one_line(why))


def memory_reading(now: Memory, *, is_busy: bool = False) -> Reading:
    """``is_busy``: workers run here. What they take, they may take."""
    found = f"{size(now.available)} of memory available of {size(now.total)}"
    unfit = now.available < _floor(now.total, MIN_MEMORY_FRACTION, MIN_MEMORY_BYTES, CAP_MEMORY_BYTES)
    limit = now.group_limit
    if limit is not None and limit < now.total:
        found += f", {size(now.group_free)} below the control group's limit of {size(limit)}"
        unfit = unfit or now.group_free < _floor(limit, MIN_MEMORY_FRACTION, MIN_MEMORY_BYTES, CAP_MEMORY_BYTES)
    if unfit and is_busy:
        return Reading(check="memory", found=found, warning=f"little is left while workers run: {found}")
    return Reading(check="memory", status="unfit" if unfit else "fit", found=found)


def disk_reading(now: Disk) -> Reading:
    if now.read_only:
        return Reading(check="disk", status="unfit", found=f"the file system of {now.path} is read-only", fact=True)
    unfit = now.free < _floor(now.total, MIN_DISK_FRACTION, MIN_DISK_BYTES, CAP_DISK_BYTES)
    found = f"{size(now.free)} free of {size(now.total)} in {now.path}"
    return Reading(check="disk", status="unfit" if unfit else "fit", found=found)


def _floor(total: int, fraction: float, least: int, cap: int) -> float:
    return min(max(total * fraction, min(least, total / SMALL_PART)), cap)


def cpu_reading(before: Cpu | None, now: Cpu) -> Reading:
    if before is None or now.at_ms <= before.at_ms:
        return Reading(check="cpu", found="nothing to compare with yet")
    passed_ms = now.at_ms - before.at_ms
    waited = _rise(before.quota_wait_us, now.quota_wait_us) / 1000 / passed_ms
    warning = ""
    if waited > MAX_QUOTA_WAIT:
        warning = f"the control group's processor quota held it back for {waited:.0%} of the time"
    hot = _rise(before.hot_ms, now.hot_ms) / passed_ms
    if hot > MAX_HOT:
        return _hot(f"a core was throttled by heat for {min(hot, 1):.0%} of the time", warning)
    events = _rise(before.hot_events, now.hot_events) * 1000 / passed_ms
    if now.hot_ms is None and events > MAX_HOT_EVENTS_PER_S:
        return _hot(f"a core was throttled by heat {events:.0f} times a second", warning)
    tells = now.hot_ms is not None or now.hot_events is not None
    found = "no throttling by heat" if tells else "throttling by heat is not told here"
    return Reading(check="cpu", found=found, warning=warning)


def _hot(found: str, warning: str) -> Reading:
    return Reading(check="cpu", status="unfit", found=found, warning=warning)


def _rise(before: int | None, now: int | None) -> int:
    """Of a counter; 0 where it is not told or has begun anew."""
    return max(0, now - before) if before is not None and now is not None else 0


def network_reading(before: Network | None, now: Network) -> Reading:
    same = before is not None and before.address == now.address
    if not now.interface:
        if same and before is not None and before.interface:
            found = f"{before.interface} does not carry {now.address} any more"
            return Reading(check="network", status="unfit", found=found, fact=True)
        return skipped("network", f"no interface here carries {now.address}")
    if not now.up or now.carrier is False:
        state = "is down" if not now.up else "has lost its carrier"
        return Reading(check="network", status="unfit", found=f"{now.interface} ({now.address}) {state}", fact=True)
    found = f"{now.interface} carries {now.address} and is up"
    if not same or before is None or before.interface != now.interface or now.at_ms <= before.at_ms:
        return Reading(check="network", found=found)
    seconds, packets = (now.at_ms - before.at_ms) / 1000, max(1, now.packets - before.packets)
    for word, rise, fraction, least in (
        ("errors", _rise(before.errors, now.errors), MAX_ERROR_FRACTION, MIN_ERRORS_PER_S),
        ("drops", _rise(before.drops, now.drops), MAX_DROP_FRACTION, MIN_DROPS_PER_S),
    ):
        if rise / seconds > least and rise / (packets + rise) > fraction:
            found = (
                f"{now.interface}: {rise / seconds:.0f} {word} a second, {rise / (packets + rise):.0%} of the packets"
            )
            return Reading(check="network", status="unfit", found=found)
    return Reading(check="network", found=found)


def clock_reading(before: Clock | None, now: Clock) -> Reading:
    """Never unfit: nothing here relies on the wall clock, but people who read times of events do."""
    if before is None:
        return Reading(check="clock", found="nothing to compare with yet")
    jumped = (now.wall_ms - before.wall_ms) - (now.monotonic_ms - before.monotonic_ms)
    warning = f"the wall clock jumped by {jumped / 1000:+.1f} s" if abs(jumped) > CLOCK_JUMP_MS else ""
    return Reading(check="clock", found=warning or "no jumps", warning=warning)


def gpu_reading(before: Iterable[Gpu], now: Iterable[Gpu]) -> Reading:
    """The worst of the devices; facts before heat. A link that never was up leads nowhere, and memory errors that were
    counted before count no more. ``before``: as ``gpu_base`` gives it."""
    base = {d.index: d for d in before}
    found = sorted(now, key=lambda d: d.index)
    for device in found:
        fault = _gpu_fault(device, base.get(device.index))
        if fault:
            return Reading(check="gpu", status="unfit", found=f"GPU {device.index}: {fault}", fact=True)
    for device in found:
        if device.celsius is not None and device.slowdown_celsius and device.celsius >= device.slowdown_celsius:
            words = f"GPU {device.index}: {device.celsius} °C, it slows down at {device.slowdown_celsius} °C"
            return Reading(check="gpu", status="unfit", found=words)
    names = ", ".join(sorted({d.name for d in found if d.name}))
    old = [f"{d.uncorrected} on GPU {d.index}" for d in found if d.uncorrected]
    warning = f"memory errors that could not be corrected, from before: {', '.join(old)}" if old else ""
    return Reading(check="gpu", found=f"{len(found)} GPUs without new faults ({names})", warning=warning)


def gpu_base(before: Iterable[Gpu], now: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """What later looks are compared with: devices as they were first seen, counters at their lowest (a reload of the
    driver sets them to 0)."""
    base = {d.index: d for d in before}
    for device in now:
        known = base.setdefault(device.index, device)
        counts = [c for c in (known.uncorrected, device.uncorrected) if c is not None]
        base[device.index] = replace(known, uncorrected=min(counts, default=None))
    return tuple(base.values())


def _gpu_fault(device: Gpu, before: Gpu | None) -> str:
    if device.lost:
        return f"does not answer: {device.lost}"
    new = _rise(before.uncorrected if before is not None else None, device.uncorrected)
    if new:
        return f"{new} new memory errors that could not be corrected"
    if device.remap_failed:
        return "a faulty row of its memory could not be replaced"
    if device.remap_pending:
        return "a faulty row of its memory is to be replaced: it must be reset"
    down = [n for n in (before.links_up if before is not None else ()) if n not in device.links_up]
    if down:
        return f"NVLink {', '.join(map(str, down))} went down"
    return ""


def command_reading(end: CommandEnd) -> Reading:
    if end.problem:
        return skipped("command", end.problem)
    if end.code == 0:
        return Reading(check="command", found=one_line(end.line) or "exit code 0")
    found = one_line(end.line) or f"the health command ended with {end.code}"
    return Reading(check="command", status="unfit", found=found, fact=True)


# -- from readings to a verdict ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``reason``: why the host is unfit, one line; empty while it is fit. It stays as it was first found while the same
    checks say so: numbers in it move with each reading, and nothing follows from that."""

    fit: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Something to tell once. ``kind``: ``skipped``, ``runs`` (again) or ``warning``."""

    check: str
    kind: Literal["skipped", "runs", "warning"]
    text: str


@dataclass(slots=True)
class _Check:
    unfit: bool = False
    reason: str = ""
    bad: int = 0
    good: int = 0
    until_ms: int = 0
    skipped: bool = False
    warnings: int = 0


@dataclass(slots=True)
class Judge:
    """Remembers what each check has said. ``take`` is asked with the readings of one round."""

    _checks: dict[str, _Check] = field(default_factory=dict)

    def take(self, readings: Iterable[Reading], now_ms: int) -> tuple[Verdict, tuple[Said, ...]]:
        said: list[Said] = []
        for reading in readings:
            said += self._take(reading, now_ms)
        return self.verdict(), tuple(said)

    def verdict(self) -> Verdict:
        reasons = [f"{name}: {check.reason}" for name, check in sorted(self._checks.items()) if check.unfit]
        return Verdict(fit=not reasons, reason=one_line("; ".join(reasons)))

    def _take(self, reading: Reading, now_ms: int) -> list[Said]:
        check = self._checks.setdefault(reading.check, _Check())
        if reading.status == "skipped":
            first, check.skipped = not check.skipped, True
            return [Said(check=reading.check, kind="skipped", text=reading.found)] if first else []
        said = []
        if check.skipped:
            check.skipped = False
            said.append(Said(check=reading.check, kind="runs", text=reading.found))
        if reading.status == "unfit":
            _went_bad(check, reading, now_ms)
        else:
            _went_well(check, now_ms)
        return [*said, *_warned(check, reading)]


def _went_bad(check: _Check, reading: Reading, now_ms: int) -> None:
    check.good = 0
    check.bad += 1
    check.until_ms = max(check.until_ms, now_ms + reading.lasting_ms)
    if not check.unfit and (reading.fact or check.bad >= TREND_READINGS):
        check.unfit = True
        check.reason = reading.found


def _went_well(check: _Check, now_ms: int) -> None:
    check.bad = 0
    if now_ms >= check.until_ms:
        check.good += 1
        if check.good >= GOOD_READINGS:
            check.unfit, check.reason = False, ""


def _warned(check: _Check, reading: Reading) -> list[Said]:
    """What lasts (a quota, little memory) is told once, when it has lasted; events (a jump, a message) each time."""
    if not reading.warning:
        check.warnings = 0
        return []
    check.warnings += 1
    if reading.check in LASTING_WARNINGS and check.warnings != TREND_READINGS:
        return []
    return [Said(check=reading.check, kind="warning", text=reading.warning)]


# -- words ------------------------------------------------------------------------------------------------------------


def one_line(text: str) -> str:
    """The first line with something on it, printable, at most ``MAX_REASON_CHARS`` long."""
    for line in text.splitlines():
        plain = "".join(c if c.isprintable() else " " for c in line).strip()
        if plain:
            return plain[:MAX_REASON_CHARS]
    return ""


def size(count: int) -> str:
    if count >= 1 << 30:
        return f"{count / 2**30:.1f} GiB"
    return f"{max(count, 0) / 2**20:.0f} MiB"
