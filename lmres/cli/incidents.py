"""``lmres incidents``: the recoveries of a run, and the timeline of one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lmres.cli.command import Command, Output
from lmres.cli.incident import Incident, NodePhases, SeenWorker, Witness
from lmres.cli.incident_events import choose_run, incidents_of_events, read_events
from lmres.cli.incident_records import incidents_of_run
from lmres.cli.observer import Observer
from lmres.cli.run_selection import add_run_options, chosen_run_id, select_run
from lmres.cli.status import unreadable, unreadable_lines
from lmres.cli.text import clean, columns, cut, names, seconds, table, wrap
from lmres.errors import ConfigError
from lmres.fields import shown
from lmres.rendezvous.edge.phases import PHASES

LAST = "last"
MAX_LINES = 20
SHOWN_FRAMES = 6


def choose(incidents: Sequence[Incident], wanted: str | None) -> list[Incident]:
    """All, the last, or the one with this ID. Raises ConfigError with the valid ones."""
    if wanted is None:
        return list(incidents)
    if wanted == LAST:
        return list(incidents[-1:])
    found = [i for i in incidents if str(i.id) == wanted]
    if not found:
        valid = ", ".join(str(i.id) for i in incidents)
        there = f"valid here: {valid}, {LAST}" if valid else "the run has had none"
        raise ConfigError(f"no incident {shown(wanted)}; {there}")
    return found


# -- for people -------------------------------------------------------------------------------------------------------


def render_list(incidents: Sequence[Incident], width: int) -> list[str]:
    """One line each."""
    rows = [["ID", "CLASS", "ACTION", "TOTAL", "FIRST CAUSE"]]
    for i in incidents:
        total = "-" if i.total_s is None else f"{i.total_s:.2f} s"
        rows.append([str(i.id), clean(i.failure_class, 30), clean(i.action, 20), total, clean(i.cause)])
    return table(rows, width=width, shrink=(4,))


def render_timeline(incident: Incident, width: int) -> list[str]:
    """What was seen, what was decided, how long each phase took."""
    total = f"recovered in {incident.total_s:.2f} s" if incident.total_s is not None else "not timed yet"
    if incident.action in ("stop", "pending"):
        total = {"stop": "the run was stopped", "pending": "not answered yet"}[incident.action]
    head = f"incident {incident.id}: {clean(incident.failure_class, 60)}, {clean(incident.action, 60)}, {total}"
    lines = [cut(head, width), "", f"  evidence, in order of arrival ({len(incident.evidence)})"]
    for witness in incident.evidence:
        lines += _witness_lines(witness, width)
    if not incident.evidence:
        lines.append("    none: nothing had failed")
    if incident.workers:
        lines += ["", "  what the workers were doing"]
        for worker in incident.workers:
            lines += _worker_lines(worker, width)
    return [*lines, "", *_plan_lines(incident, width), "", *_phase_lines(incident.phases, width)]


def _worker_lines(worker: SeenWorker, width: int) -> list[str]:
    """One line each, and the innermost frames of the stack."""
    what = f"{clean(worker.phase, 20)} for {seconds(worker.phase_s)} s" if worker.phase else "nothing known"
    step = f", step {worker.step}" if worker.step is not None else ""
    last = f", last collective {clean(worker.last, 120)}" if worker.last else ""
    state = f", state {clean(worker.state, 4)}" if worker.state else ""
    text = f"rank {worker.rank} on {clean(worker.node_id, 128)}: {what}{step}{last}{state}"
    lines = wrap(text, width=width, indent="    ", hanging="      ")
    return [*lines, *(cut(f"      | {clean(line)}", width) for line in worker.stack[-SHOWN_FRAMES:])]


def _moment(at_s: float | None) -> str:
    return "" if at_s is None else f"{at_s:+.2f} s"


def _witness_lines(witness: Witness, width: int) -> list[str]:
    mark = " <- first cause" if witness.first else ""
    seen = f"seen by {clean(witness.reporter, 128)}" if witness.reporter else "kept in the plan"
    pid = f", pid {witness.pid}" if witness.pid is not None else ""
    start = f"    {_moment(witness.at_s):>9}  {clean(witness.weight, 12):<9}  "
    echo = witness.weight == "secondary" and not witness.first  # of another's failure: --json has all of it
    text = f"{clean(witness.headline, 160 if echo else 400)} ({seen}{pid}{_status(witness)}){mark}"
    lines = wrap(text, width=width, indent=start, hanging=" " * len(start))
    if witness.exception is not None and not echo:
        shown_lines = witness.exception.last_lines[-MAX_LINES:]
        lines += [cut(f"{' ' * len(start)}| {clean(line.rstrip())}", width) for line in shown_lines]
    return lines


def _status(witness: Witness) -> str:
    status = witness.exit_status
    if status is None or witness.exception is not None:
        return ""
    return f", signal {-status}" if status < 0 else f", exit code {status}"


def _plan_lines(incident: Incident, width: int) -> list[str]:
    if incident.plan_id is None:
        return wrap(f"no plan yet: {clean(incident.reason, 2000)}", width=width, indent="  ", hanging="    ")
    moment = _moment(incident.plan_at_s)
    when = f" at {moment}" if moment else ""
    lines = [f"  plan {clean(incident.plan_id, 60)}{when}: {clean(incident.action, 20)}"]
    lines += wrap(clean(incident.reason, 2000), width=width, indent="    ")
    if incident.exit_code is not None:
        lines.append(f"    the agents end with exit code {incident.exit_code}")
    if incident.action != "stop":
        for move in incident.moves:
            changed = move.before is not None and move.before != move.after
            text = f"{clean(move.before, 128)} -> {clean(move.after, 128)}" if changed else clean(move.after, 128)
            lines.append(f"    slot {move.slot}: {text}")
        lines += wrap(f"standby: {names(incident.standby)}", width=width, indent="    ")
    for item in incident.quarantined:
        reason = f": {clean(item.reason)}" if item.reason else ""
        lines += wrap(f"quarantined {clean(item.node_id, 128)}{reason}", width=width, indent="    ", hanging="      ")
    for node_id, reason in (incident.dismissed or {}).items():
        lines += wrap(f"dismissed {clean(node_id, 128)}: {clean(reason)}", width=width, indent="    ", hanging="      ")
    if incident.charged:
        lines += wrap(f"spends one of --max-restarts: {names(incident.charged)}", width=width, indent="    ")
    return lines


def _phase_lines(phases: Sequence[NodePhases], width: int) -> list[str]:
    if not phases:
        return ["  phases: no node has reported"]
    known = [p for p in PHASES if any(n.phases.get(p) is not None for n in phases)]
    rows = [["NODE", *(p.removesuffix("_s") for p in known)]]
    rows += [[clean(n.node_id, 128), *(seconds(n.phases.get(p)) for p in known)] for n in phases]
    return ["  phases in seconds", *table(rows, width=width, shrink=(0,), indent="    ")]


def render(value: Mapping[str, Any], incidents: Sequence[Incident], *, listed: bool, width: int) -> str:
    """With ``listed`` the list and the timeline of the newest, else the timeline alone."""
    if not incidents:
        lines = [f"run {clean(value['run_id'])}: no incidents"]
    elif listed:
        lines = [f"run {clean(value['run_id'])}", *render_list(incidents, width), ""]
        lines += render_timeline(incidents[-1], width)
    else:
        lines = render_timeline(incidents[0], width)
    return "\n".join(lines + unreadable_lines(value["unreadable"], width))


# -- the command ------------------------------------------------------------------------------------------------------


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id", metavar="ID", nargs="?", help=f"of one incident (the generation it began), or '{LAST}'; without: all"
    )
    parser.add_argument(
        "--events",
        metavar="FILE_OR_DIR",
        nargs="+",
        help="read events.jsonl of these agents (files or state folders) instead of the store",
    )
    add_run_options(parser)


def _run(arguments: argparse.Namespace, output: Output) -> int:
    if arguments.events:
        log = read_events(arguments.events)
        run_id, events = choose_run(log, chosen_run_id(arguments, os.environ))
        source, found, problems = "events", incidents_of_events(events), log.unreadable
    else:
        selection = select_run(arguments)
        with Observer(selection) as observer:
            snapshot = observer.read()
        source, run_id = "store", selection.run_id
        found, problems = incidents_of_run(snapshot.view), unreadable(snapshot)
    chosen = choose(found, arguments.id)
    value = {
        "run_id": run_id,
        "source": source,
        "incidents": [asdict(incident) for incident in chosen],
        "unreadable": problems,
    }
    output.emit(value, render(value, chosen, listed=arguments.id is None, width=columns()))
    return 0


COMMAND = Command(
    name="incidents",
    help="the recoveries of a run, and evidence, plan and phases of one",
    configure=_configure,
    run=_run,
)
