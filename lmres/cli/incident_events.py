"""The incidents of a run, from the events that its agents have written; for a run whose store is gone.

Each agent tells of every fault and plan that it sees, so the same one stands in several files: it counts once, at its
earliest time. Times of different hosts are compared for display only. A line that can not be read (the last one of an
agent that was killed while it wrote, say) is left out and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmres.cli.incident import PENDING, Failure, Incident, Move, NodePhases, SeenWorker, SetAside, Witness, slowest
from lmres.errors import ConfigError
from lmres.fields import nearest_name, shown
from lmres.rendezvous.edge.phases import PHASES
from lmres.scout.evidence import WEIGHT_ORDER

FILE_NAME = "events.jsonl"
MAX_LINE_BYTES = 1 << 20
MAX_PROBLEMS = 100
_EVENTS = ("fault_detected", "plan_committed", "recovery_completed", "run_finished")

Event = dict[str, Any]


@dataclass(slots=True)
class EventLog:
    """The events that matter here, in order of time, and the lines that could not be read."""

    events: list[Event] = field(default_factory=list)
    unreadable: list[dict[str, str]] = field(default_factory=list)


def read_events(paths: Iterable[str | Path]) -> EventLog:
    """Reads files, or folders that hold one. Raises ConfigError for a path that is neither."""
    log = EventLog()
    for given in paths:
        path = _file(Path(given))
        try:
            with path.open("rb") as file:
                _read_file(file, path, log)
        except OSError as error:
            raise ConfigError(f"--events {path}: can not be read ({error.strerror})") from error
    log.events.sort(key=lambda e: float(e["time"]))
    return log


def _file(path: Path) -> Path:
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        found = f"no {FILE_NAME} in the folder" if path.is_dir() else "no such file"
        raise ConfigError(f"--events {shown(str(path))}: {found}; give an agent's state_dir or its {FILE_NAME}")
    return file


def _read_file(file: Any, path: Path, log: EventLog) -> None:
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        whole = line.endswith(b"\n")
        while not whole and (rest := file.readline(MAX_LINE_BYTES)):  # too long: not ours
            whole, line = rest.endswith(b"\n"), b""
        if not line.strip() or not any(f'"{name}"'.encode() in line for name in _EVENTS):
            if line.strip() and not line.rstrip().endswith(b"}"):
                _problem(log, path, number, "torn or not an event")
            continue
        event = _event(line)
        if event is None:
            _problem(log, path, number, "torn or not an event")
        elif event["event"] in _EVENTS:
            log.events.append(event)


def _problem(log: EventLog, path: Path, number: int, problem: str) -> None:
    if len(log.unreadable) < MAX_PROBLEMS:
        log.unreadable.append({"key": f"{path} line {number}", "problem": problem})


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict):
        return None
    texts = all(isinstance(event.get(name), str) for name in ("event", "run_id", "node_id"))
    fits = texts and _int(event, "generation") is not None and _float(event, "time") is not None
    return event if fits else None


def choose_run(log: EventLog, run_id: str | None) -> tuple[str, list[Event]]:
    """The events of one run: the given one, else the one that was told of last. Raises ConfigError.

    A run id may have been used again. Runs start with a plan of their own; the latest such run is taken.
    """
    ids = sorted({str(e["run_id"]) for e in log.events})
    if run_id is None:
        run_id = str(log.events[-1]["run_id"]) if log.events else ""
    elif run_id not in ids:
        there = nearest_name(run_id, ids) if ids else "the events tell of no fault and no plan"
        raise ConfigError(f"--rdzv-id: no run {shown(run_id)} in these events; {there}")
    events = [e for e in log.events if e["run_id"] == run_id]
    starts: dict[str, float] = {}
    for e in events:
        if e["event"] == "plan_committed" and e.get("action") == "start":
            starts.setdefault(str(e.get("plan_id")), e["time"])
    if len(starts) > 1:
        since = max(starts.values())
        events = [e for e in events if e["time"] >= since]
    return run_id, events


def incidents_of_events(events: Sequence[Event]) -> list[Incident]:
    """Oldest first; ``events`` of one run, in order of time."""
    plans: dict[int, Event] = {}
    for e in _named(events, "plan_committed"):
        plans.setdefault(_int(e, "to_generation") or 0, e)
    found = [
        _incident(events, g, plan, plans.get(g - 1))
        for g, plan in sorted(plans.items())
        if plan.get("action") != "start"
    ]
    newest = max(plans, default=0)
    over = any(_named(events, "run_finished")) or plans.get(newest, {}).get("action") == "stop"
    if plans and not over and any(e["generation"] == newest for e in _named(events, "fault_detected")):
        found.append(_incident(events, newest + 1, None, plans[newest]))
    return found


def _named(events: Sequence[Event], name: str) -> Iterator[Event]:
    return (e for e in events if e["event"] == name)


def _incident(events: Sequence[Event], generation: int, plan: Event | None, before: Event | None) -> Incident:
    told = plan if plan is not None else {}
    reason = _text(told, "reason")
    evidence, start = _evidence(events, generation - 1, reason)
    phases = _phases(events, generation, start)
    first = next((w for w in evidence if w.first), None)
    held = set(_texts(before, "quarantined"))
    earlier = _slots(before)
    return Incident(
        id=generation,
        action=_text(told, "action") or PENDING,
        failure_class=_text(told, "failure_class") or (first.failure_class if first is not None else "unknown"),
        verdict=_text(told, "verdict") or None,
        cause=first.headline if first is not None else reason,
        reason=reason or "not answered by a plan in these events",
        plan_id=_text(told, "plan_id") or None,
        plan_at_s=_since(told, start),
        total_s=slowest(phases),
        evidence=evidence,
        moves=tuple(Move(slot=s, before=earlier.get(s), after=n) for s, n in sorted(_slots(plan).items())),
        standby=_texts(plan, "standby"),
        quarantined=tuple(SetAside(node_id=n, reason=None) for n in _texts(plan, "quarantined") if n not in held),
        charged=None,
        dismissed=None,
        exit_code=None,
        phases=phases,
        workers=_workers(events, generation - 1),
    )


def _workers(events: Sequence[Event], generation: int) -> tuple[SeenWorker, ...]:
    """By rank, as the first event that tells of them has it."""
    found: dict[int, SeenWorker] = {}
    for e in _named(events, "fault_detected"):
        items = e.get("evidence")
        for item in items if e["generation"] == generation and isinstance(items, list) else ():
            rank = _int(item, "rank") if isinstance(item, dict) and "phase" in item else None
            if rank is not None:
                found.setdefault(rank, _seen(rank, item))
    return tuple(found[rank] for rank in sorted(found))


def _seen(rank: int, item: Event) -> SeenWorker:
    blind, phase_ms = bool(_text(item, "blind")), _float(item, "phase_ms")
    groups = item.get("groups")
    marks = [
        mark
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, dict) and isinstance(group.get("recent"), list)
        for mark in group["recent"][-1:]
        if isinstance(mark, dict)
    ]
    mark = max(marks, key=lambda m: _int(m, "step") or 0, default=None)
    last = f"{_text(mark, 'op')} number {_int(mark, 'number')} {_text(mark, 'shape')}".rstrip() if mark else ""
    return SeenWorker(
        rank=rank,
        node_id=_text(item, "reporter"),
        step=None if blind else _int(item, "step"),
        phase="" if blind else _text(item, "phase"),
        phase_s=None if blind or phase_ms is None else phase_ms / 1000,
        state=_text(item, "state"),
        last=last,
        stack=_texts(item, "stack"),
    )


def _evidence(events: Sequence[Event], generation: int, reason: str) -> tuple[tuple[Witness, ...], float | None]:
    """The faults of a generation, each once, and the time of the earliest."""
    seen: dict[str, tuple[Event, Event]] = {}
    for e in _named(events, "fault_detected"):
        details = e.get("evidence")
        item = details[0] if isinstance(details, list) and details and isinstance(details[0], dict) else {}
        if e["generation"] == generation:
            key = json.dumps([e.get("detail"), e.get("failure_class"), item.get("pid"), item.get("weight")])
            if key not in seen or (not _text(seen[key][1], "reporter") and _text(item, "reporter")):
                seen[key] = (seen[key][0] if key in seen else e, item)
    start = min((float(e["time"]) for e, _ in seen.values()), default=None)
    witnesses = [_witness(e, item, start) for e, item in seen.values()]
    blamed = [w for w in witnesses if w.headline and w.headline in reason]
    best = min(blamed or witnesses, key=lambda w: WEIGHT_ORDER.get(w.weight, 9), default=None)
    return tuple(Witness(**{**_fields(w), "first": w is best}) for w in witnesses), start


def _fields(witness: Witness) -> dict[str, Any]:
    return {name: getattr(witness, name) for name in Witness.__slots__}


def _witness(event: Event, item: Event, start: float | None) -> Witness:
    suspects = event.get("suspects")
    suspect = suspects[0] if isinstance(suspects, list) and suspects and isinstance(suspects[0], dict) else {}
    exception = item.get("exception")
    return Witness(
        reporter=_text(item, "reporter"),
        weight=_text(item, "weight") or "unknown",
        failure_class=_text(event, "failure_class") or "unknown",
        headline=_text(event, "detail"),
        node_id=_text(suspect, "node_id") or None,
        rank=_int(suspect, "rank"),
        host=_text(item, "host") or None,
        pid=_int(item, "pid"),
        exit_status=_int(item, "exit_status"),
        step=_int(item, "step"),
        exception=_failure(exception) if isinstance(exception, dict) else None,
        at_s=_since(event, start),
    )


def _failure(exception: Event) -> Failure:
    return Failure(
        type=_text(exception, "type"), message=_text(exception, "message"), last_lines=_texts(exception, "last_lines")
    )


def _phases(events: Sequence[Event], generation: int, start: float | None) -> tuple[NodePhases, ...]:
    found: dict[str, NodePhases] = {}
    for e in _named(events, "recovery_completed"):
        if e["generation"] == generation:
            spans = {name: _float(e, name) for name in PHASES}
            found[str(e["node_id"])] = NodePhases(node_id=str(e["node_id"]), phases=spans, at_s=_since(e, start))
    return tuple(found[n] for n in sorted(found))


# -- what a line may hold is not known beforehand ---------------------------------------------------------------------


def _text(event: Event | None, name: str) -> str:
    value = event.get(name) if event is not None else None
    return value if isinstance(value, str) else ""


def _texts(event: Event | None, name: str) -> tuple[str, ...]:
    value = event.get(name) if event is not None else None
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def _int(event: Event, name: str) -> int | None:
    value = event.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(event: Event, name: str) -> float | None:
    value = event.get(name)
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12
    return float(value) if fits and value is not None else None


def _since(event: Event, start: float | None) -> float | None:
    time = _float(event, "time")
    return None if time is None or start is None else round(time - start, 3)


def _slots(plan: Event | None) -> dict[int, str]:
    active = plan.get("active") if plan is not None else None
    if not isinstance(active, dict):
        return {}
    return {int(s): n for s, n in active.items() if s.isdecimal() and len(s) < 10 and isinstance(n, str)}
