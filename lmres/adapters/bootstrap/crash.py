"""What happens when an exception ends the worker.

When one worker fails, its peers fail a moment later of a broken connection. So a failed worker tells the agent at
once, and then stays until the plan is made: its connections stay open, and its peers stay out of it. In order:

1. the report to the agent (bounded, before anything that may be slow);
2. torch's error file, as ``@record`` would have written it, unless it is there already;
3. the hook that would have run without us (the traceback is printed, the user's own hook does its work);
4. the streams are flushed, ``{"kind": "holding"}`` is sent, and the process waits for its release.

Then the interpreter exits with the code it would have had. KeyboardInterrupt is left alone; SystemExit never comes
here. A hook that the user puts over ours later is put under it again at the next optimizer step (``renew``).
"""

from __future__ import annotations

import os
import sys
import time

from lmres.adapters.bootstrap.session import Session, hold_s

TYPE_CHECKING = False  # of ours: importing typing takes longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
REPORT_BYTES = 60 * 1024  # the agent reads lines of 64 KiB
MESSAGE_CHARS = 4096
LAST_LINES = 20
LINE_CHARS = 512


class CrashHook:
    """Keeps our hook outermost in ``sys.excepthook``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ours: ExceptHook | None = None

    def renew(self) -> None:
        """Wrap whatever hook is installed now, if it is not ours."""
        previous = sys.excepthook
        if previous is self._ours:
            return

        def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            _crashed(self._session, previous, kind, value, trace)

        sys.excepthook = self._ours = excepthook


def install(session: Session) -> CrashHook:
    hook = CrashHook(session)
    hook.renew()
    return hook


def _crashed(
    session: Session,
    previous: ExceptHook,
    kind: type[BaseException],
    value: BaseException,
    trace: TracebackType | None,
) -> None:
    if session.crashing or not session.attached or issubclass(kind, (KeyboardInterrupt, SystemExit)):
        previous(kind, value, trace)
        return
    import contextlib

    session.crashing = True  # a user's hook may chain to an older one of ours
    monotonic_ms = time.monotonic_ns() // 1_000_000
    with contextlib.suppress(Exception):
        if session.attachment is not None:
            session.attachment.settle()
    with contextlib.suppress(Exception):
        lines = _format(kind, value, trace)
        session.send(report(session.step, monotonic_ms, f"{kind.__module__}.{kind.__qualname__}", _text(value), lines))
        _write_error_file(kind, value, lines)
    leave = _run(previous, kind, value, trace)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    hold(session)
    if leave is not None:
        raise leave


def hold(session: Session) -> None:
    """Stay until the plan is made."""
    if session.send(b'{"kind": "holding", "monotonic_ms": %d}' % (time.monotonic_ns() // 1_000_000)):
        session.hold(hold_s())


def _run(
    previous: ExceptHook, kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> SystemExit | None:
    """Run the hook below ours. What it raises is shown now as the interpreter would show it, since the process may
    not live to the end of the hold. Its SystemExit sets the exit code, so it is handed on."""
    try:
        previous(kind, value, trace)
    except SystemExit as leave:
        return leave
    except BaseException as error:
        import contextlib

        with contextlib.suppress(Exception):
            sys.stderr.write("Error in sys.excepthook:\n")
            sys.__excepthook__(type(error), error, error.__traceback__)
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(kind, value, trace)
    return None


def _format(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> str:
    try:
        import traceback

        return "".join(traceback.format_exception(kind, value, trace))
    except Exception as error:  # a user's __str__, or no memory left
        return f"{kind.__name__}: (no traceback: {type(error).__name__})\n"


def _text(value: BaseException) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"(no message: {type(error).__name__})"


def report(step: int, monotonic_ms: int, type_name: str, text: str, trace: str) -> bytes:
    """What the agent is told of the exception that ends this worker."""
    import json

    message = {
        "kind": "exception",
        "type": type_name,
        "message": text[:MESSAGE_CHARS],
        "last_lines": [line[:LINE_CHARS] for line in trace.splitlines()[-LAST_LINES:]],
        "step": step,
        "monotonic_ms": monotonic_ms,
    }
    line = json.dumps(message, ensure_ascii=False).encode("utf-8", "backslashreplace")
    if len(line) > REPORT_BYTES:
        message["last_lines"] = []
        line = json.dumps(message).encode("ascii")
    return line


def _write_error_file(kind: type[BaseException], value: BaseException, trace: str) -> None:
    """As torch's ``ErrorHandler.record_exception``, but whole or not at all: torch ends on a torn one."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path or os.path.exists(path):  # noqa: PTH110 (a crashing process imports as little as it can)
        return
    import json

    data = {
        "message": {
            "message": f"{kind.__name__}: {_text(value)}",
            "extraInfo": {"py_callstack": trace, "timestamp": str(int(time.time()))},
        }
    }
    draft = f"{path}.{os.getpid()}"
    with open(draft, "w") as file:
        json.dump(data, file)
    os.replace(draft, path)  # noqa: PTH105
