"""The agent's end of its vault: starting or adopting the process, telling it what to do, hearing what happened.

Rules:

1. A live vault of the same run and node in the folder is adopted with all it holds; any other is left to its own end.
2. Every call ends in time, with an answer or a ``VaultError``. When the vault is dead each call says so at once.
3. What the vault tells by itself comes as calls of ``on_event(kind, fields)`` from a thread of this module. Kinds:
   ``captured``, ``safe`` (for the first time), ``restored``, ``problem``, ``refused`` (no memory for a rank: the
   numbers), ``no_room`` (for keys that are kept), ``copies`` (how many there are of how many wanted), ``durable``,
   ``verified`` (about once a second), ``covered`` and ``corruption`` (from the hub only: ``certify``), and at last
   ``gone``.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import lmres
from lmres.detached import package_root, start_detached
from lmres.errors import RecordError, VaultError
from lmres.gemini import session
from lmres.gemini.edge import unix
from lmres.gemini.edge.channel import LineReader
from lmres.gemini.edge.services import Options
from lmres.gemini.inventory import Copy
from lmres.gemini.session import Assignment, Message, Prepare

SOCKET_NAME = "vault.sock"
LOG_NAME = "vault.log"
START_S = 20.0
CALL_S = 10.0
FREEZE_S = 30.0

# The package's folders come last, so that no module next to them hides one of the standard library.
_BOOTSTRAP = (
    "import sys, json; sys.path.extend(json.loads(sys.argv.pop(1))); "
    "from lmres.gemini.edge.vault_main import main; main(sys.argv[1:])"
)
Events = Callable[[str, Mapping[str, Any]], None]


@dataclass(slots=True)
class _Call:
    answer: Message | None = None


class Vault:
    """A vault that answers. Calls may come from any thread."""

    def __init__(
        self,
        sock: socket.socket,
        welcome: Message,
        reader: LineReader,
        process: subprocess.Popen[bytes] | None,
        on_event: Events,
    ) -> None:
        self.pid: int = welcome["pid"]
        self.address: str = welcome["address"]
        self.port: int = welcome["port"]
        self.adopted = process is None
        self.ever = False
        self.problem = ""
        """From the last ``freeze``: whether a state was ever safe, restored or found here; what could not be read."""
        self._sock = sock
        self._reader = reader
        self._process = process
        self._on_event = on_event
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._number = 0
        self._gone = ""
        self._ending = False
        self._thread = threading.Thread(target=self._read, name="lmres-vault-agent", daemon=True)
        self._thread.start()

    @classmethod
    def start(
        cls,
        *,
        state_dir: Path,
        run_id: str,
        node_id: str,
        address: str,
        on_event: Events,
        memory_limit_fraction: float = 0.5,
        linger_s: float = 60.0,
        durable_directory: str | None = None,
        durable_every: int | None = None,
        durable_keep: int = 2,
        compare: Literal["off", "report", "hold"] = "off",
        anchors: bool = False,
        timeout_s: float = START_S,
    ) -> Vault:
        """Raises VaultError when no vault can be had."""
        options = Options(
            run_id=run_id,
            node_id=node_id,
            address=address,
            memory_limit_fraction=memory_limit_fraction,
            linger_s=linger_s,
            durable_directory=durable_directory,
            durable_every=durable_every,
            durable_keep=durable_keep,
            compare=compare,
            anchors=anchors,
        )
        end_s = time.monotonic() + timeout_s
        path = state_dir / SOCKET_NAME
        adopted = cls._adopt(path, options, on_event, timeout_s=min(timeout_s, CALL_S))
        if adopted is not None:
            return adopted
        process = _spawn(path, options)
        try:
            sock = unix.connect(path, max(0.1, end_s - time.monotonic()))
            welcome, reader = _hello(sock, options, max(0.1, end_s - time.monotonic()))
        except (OSError, RecordError) as error:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            tail = _tail(state_dir / LOG_NAME)
            raise VaultError(
                f"the vault did not start within {timeout_s:g} s ({error}); its log ends: {tail}"
            ) from error
        return cls(sock, welcome, reader, process, on_event)

    @classmethod
    def _adopt(cls, path: Path, options: Options, on_event: Events, *, timeout_s: float) -> Vault | None:
        """The live vault of the same run, node and address at this path."""
        try:
            sock = unix.connect(path, timeout_s)
        except OSError:
            return None
        try:
            welcome, reader = _hello(sock, options, timeout_s)
        except (OSError, RecordError):
            sock.close()
            return None
        return cls(sock, welcome, reader, None, on_event)

    # -- calls

    def assign(self, assignment: Assignment) -> None:
        """Tells what to do in a generation. After ``prepare`` when there is something to restore."""
        self._call({"op": "assign", "assignment": session.to_plain(assignment)}, CALL_S)

    def freeze(self, generation: int) -> tuple[Copy, ...]:
        """No grants from now to the next ``assign``. What is held: in slots, for other vaults, and in files."""
        answer = self._call({"op": "freeze", "generation": generation}, FREEZE_S)
        self.ever = self.ever or bool(answer.get("ever"))
        self.problem = str(answer.get("problem", ""))
        return tuple(session.copy_from_plain(copy) for copy in answer.get("copies", ()))

    def prepare(self, prepare: Prepare) -> None:
        """Begins to make the image ready; returns at once. The end comes as events, and to the workers that wait."""
        self._call({"op": "prepare", "prepare": session.to_plain(prepare)}, CALL_S)

    def status(self) -> dict[str, Any]:
        status = self._call({"op": "status"}, CALL_S).get("status")
        if not isinstance(status, dict):
            raise VaultError(f"the vault's status is not understood: {status!r:.80}")
        return status

    @property
    def alive(self) -> bool:
        return not self._gone

    def end(self, timeout_s: float = 5.0) -> None:
        """Ends the process and waits for that; kills it when it does not."""
        self._ending = True
        with contextlib.suppress(VaultError):
            self._call({"op": "end"}, timeout_s)
        self._thread.join(timeout_s)
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk that does not answer
                    self._process.wait(timeout_s)
        self._close()

    def release(self) -> None:
        """Lets go of the vault without ending it: it lives on until an agent comes back, or its time is over."""
        self._ending = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        self._close()

    # -- inside

    def _close(self) -> None:
        self._sock.close()
        self._reader.close()

    def _call(self, message: Message, timeout_s: float) -> Message:
        with self._changed:
            self._number += 1
            number = self._number
            call = self._calls[number] = _Call()
        try:
            with self._send_lock:
                if self._gone:
                    raise VaultError(self._gone)
                self._sock.sendall(session.encode({**message, "id": number}))
        except OSError as error:
            self._calls.pop(number, None)
            if isinstance(error, ConnectionError):
                self._thread.join(1.0)  # which finds the same: then it is not alive
            why = "is gone" if isinstance(error, ConnectionError) else "does not read what it is told"
            raise VaultError(f"the vault (process {self.pid}) {why}: {error.strerror or error}") from error
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while call.answer is None and not self._gone and time.monotonic() < end_s:
                self._changed.wait(max(0.0, end_s - time.monotonic()))
            self._calls.pop(number, None)
            gone = self._gone
        if call.answer is None:
            why = gone or f"the vault (process {self.pid}) gave no answer to {message['op']} within {timeout_s:g} s"
            raise VaultError(why)
        if "refused" in call.answer:
            raise VaultError(f"the vault refuses {message['op']}: {call.answer['refused']}")
        return call.answer

    def _read(self) -> None:
        why = "it closed the connection"
        try:
            while (found := self._reader.read()) is not None:
                message, _ = found
                if message["op"] == "answer":
                    with self._changed:
                        call = self._calls.get(message["id"])
                        if call is not None:
                            call.answer = message
                        self._changed.notify_all()
                elif message["op"] == "event":
                    self._tell(message["kind"], {k: v for k, v in message.items() if k not in ("op", "kind")})
        except (OSError, RecordError, ValueError) as error:
            why = str(error)
        with self._changed:
            self._gone = f"the vault (process {self.pid}) is gone: {why}"
            self._changed.notify_all()
        if not self._ending:
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)  # no zombie
            self._tell("gone", {"reason": self._gone})

    def _tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        with contextlib.suppress(Exception):  # the listener's own problem, which must not end this thread
            self._on_event(kind, fields)


def _hello(sock: socket.socket, options: Options, timeout_s: float) -> tuple[Message, LineReader]:
    """Raises OSError or RecordError."""
    sock.settimeout(timeout_s)
    hello = {"op": "hello", "role": "agent", "run_id": options.run_id, "options": asdict(options)}
    sock.sendall(session.encode(hello))
    reader = LineReader(sock, session.TO_AGENT)
    found = reader.read()
    if found is None:
        raise RecordError("it closed the connection")
    message, _ = found
    if message["op"] != "welcome":
        raise RecordError(message.get("why", f"{message['op']} came, welcome expected"))
    # The reading thread waits for ever, a writer must not: the socket stays blocking, with a limit on sending alone.
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(CALL_S), 0))
    return message, reader


def _spawn(path: Path, options: Options) -> subprocess.Popen[bytes]:
    """The socket is bound here, so that whoever connects before the vault serves waits in the listen queue."""
    roots = [package_root(lmres.__file__), *_library_folders()]
    try:
        listener = unix.listen(path)
    except OSError as error:
        raise VaultError(f"the vault's socket {path} can not be made: {error.strerror or error}") from error
    said = json.dumps({**asdict(options), "socket_path": str(path)})
    arguments = [json.dumps(roots), str(listener.fileno()), said]
    try:
        return start_detached(_BOOTSTRAP, arguments, listener=listener, log_path=path.parent / LOG_NAME)
    except OSError as error:
        raise VaultError(f"the vault process can not be started: {error}") from error


def _library_folders() -> list[str]:
    """Where the two libraries of the vault lie."""
    import psutil
    import xxhash

    found = [package_root(module.__file__) for module in (xxhash, psutil) if module.__file__]
    return list(dict.fromkeys(found))


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")[-500:].strip() or "(empty)"
    return "(none)"
