"""``lmres stop``: ends a run. All its agents stop their workers and end."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

from lmres.cli.command import Command, Output
from lmres.cli.hold import checked_reason, operator
from lmres.cli.observer import NoSuchRun, Observer, Snapshot
from lmres.cli.run_selection import add_run_options, select_run
from lmres.cli.run_view import is_over, run_state
from lmres.cli.text import clean, columns, names, wrap
from lmres.errors import ConfigError, LmresError
from lmres.fields import shown
from lmres.ports import Compare, Put
from lmres.rendezvous.codec import encode
from lmres.rendezvous.state import StopRequest

MAX_WAIT_S = 86_400.0
_LOOK_S = 0.25


class NotEnded(LmresError):
    """The run was told to stop and has not ended in the time given. It may still do so."""


def stop_run(observer: Observer, reason: str) -> dict[str, Any]:
    """Asks for the end, unless it has been asked for. Idempotent."""
    keys = observer.keys

    def change(snapshot: Snapshot) -> tuple[Put, tuple[Compare, ...]] | None:
        view = snapshot.view
        if is_over(view) or view.stop_request() is not None:
            return None
        compares = tuple(Compare(key=k, mod_revision=view.mod_revision(k)) for k in (keys.stop, keys.finished))
        return Put(key=keys.stop, value=encode(StopRequest(reason=reason))), compares

    snapshot, changed = observer.update(change)
    view = snapshot.view
    live, state = [m.node_id for m in view.live_members()], run_state(view)
    request = view.stop_request()
    if is_over(view):
        message = f"the run has {state.name} already ({state.reason})"
    elif changed:
        message = f"the run is being stopped: its {len(live)} agents end their workers, and themselves with exit code 1"
    else:
        message = f"the run is being stopped already ({request.reason if request is not None else ''})"
    return {
        "run_id": observer.selection.run_id,
        "changed": changed,
        "over": is_over(view),
        "reason": request.reason if request is not None else state.reason,
        "agents": live,
        "ended": not live,
        "message": message,
    }


def wait_for_end(
    observer: Observer,
    timeout_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Until the run's last agent has left; the store goes with it. Returns the seconds. Raises NotEnded."""
    start = clock()
    while True:
        try:
            left = [m.node_id for m in observer.read().view.live_members()]
        except NoSuchRun:
            left = []
        waited = clock() - start
        if not left:
            return waited
        if waited >= timeout_s:
            raise NotEnded(f"the run has not ended within {timeout_s:g} s; still there: {names(left)}")
        sleep(min(_LOOK_S, timeout_s - waited))


def _wait_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_WAIT_S:
        raise ConfigError(f"--wait: found {shown(text)}; allowed: seconds, more than 0, at most {MAX_WAIT_S:.0f}")
    return value


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", metavar="TEXT", help="kept with the record and shown to everybody")
    parser.add_argument("--wait", metavar="SECONDS", help="wait this long for the run to end; exit 1 if it has not")
    add_run_options(parser)


def _run(arguments: argparse.Namespace, output: Output) -> int:
    selection = select_run(arguments)
    reason = checked_reason(arguments.reason, f"lmres stop by {operator()}")
    timeout_s = None if arguments.wait is None else _wait_seconds(arguments.wait)
    with Observer(selection) as observer:
        value = stop_run(observer, reason)
        if timeout_s is not None:
            waited_s = wait_for_end(observer, timeout_s)
            value.update(ended=True, waited_s=round(waited_s, 3))
            value["message"] += f"; all agents have ended, after {waited_s:.1f} s"
    output.emit(value, "\n".join(wrap(clean(value["message"], 2000), width=columns())))
    return 0


COMMAND = Command(name="stop", help="end a run: all its agents end", configure=_configure, run=_run)
