"""A worker's end of the vault: memory to write into, given when it may be written.

Rules:

1. Nothing here makes training wait. ``poll_grant`` looks at a field; sealing is one small message that is never waited
   for; a thread reads what the vault says and maps (and touches) memory. Only ``await_restore`` waits, with a bound.
2. A grant is used once: sealed or discarded. After that its memory is not written until it is granted again.
3. Every error is a ``VaultError``, and final: protection of this worker goes off, training goes on. A forked child
   (a data loader's worker) has no vault.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmres.errors import RecordError, StateError, VaultError
from lmres.gemini import session
from lmres.gemini.edge import unix
from lmres.gemini.edge.channel import LineReader
from lmres.gemini.edge.populate import populate

LOG_CAPACITY_BYTES = 1 << 30
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grant:
    """A slot to write: ``shared`` and ``own`` are writable and at least as long as was reserved."""

    slot: int
    number: int
    shared: memoryview
    own: memoryview


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restored:
    """An image to go on from. Views are read-only and hold until the first grant of this worker is sealed.

    ``log_length``: how much of ``WorkerVault.log`` belongs to it. ``source``: local, peer, replica or durable.
    ``bytes``: of the image. ``fetch_ms``: how long the vault took to have it here, checked.
    """

    step: int
    origin: int
    source: str
    shared: memoryview
    own: memoryview
    log_length: int
    bytes: int
    fetch_ms: float


class _Slot:
    __slots__ = ("own", "shared")

    def __init__(self, shared: memoryview, own: memoryview) -> None:
        self.shared = shared
        self.own = own


class WorkerVault:
    """The connection of one worker. Not for several threads at once."""

    def __init__(self, sock: socket.socket, *, rank: int, generation: int) -> None:
        self.rank = rank
        self.generation = generation
        self._sock = sock
        self._changed = threading.Condition()
        self._error: str | None = None
        self._grant: Grant | None = None
        self._gate = 0
        self._wanted = (0, 0)
        self._slots: dict[int, _Slot] = {}
        self._log: memoryview | None = None
        self._restored: Restored | None = None
        self._restore_answer: str | None = None  # "restored", "nothing", or why it failed
        self._welcomed = False
        self._open = True
        self._reader = threading.Thread(target=self._read, name="lmres-vault", daemon=True)
        _live.add(self)

    @classmethod
    def connect(
        cls, path: str | Path, *, rank: int, generation: int, run_id: str = "", timeout_s: float = _CONNECT_S
    ) -> WorkerVault:
        """``path``: the vault's socket. Raises VaultError when nobody answers there in time."""
        try:
            sock = unix.connect(Path(path), timeout_s)
        except OSError as error:
            raise VaultError(f"no vault answers at {path}: {error.strerror or error}") from error
        sock.settimeout(None)
        vault = cls(sock, rank=rank, generation=generation)
        vault._send({"op": "hello", "role": "worker", "rank": rank, "generation": generation, "run_id": run_id})
        vault._reader.start()
        try:
            vault._wait(lambda: vault._welcomed and vault._log is not None, timeout_s, "the vault's welcome")
        except VaultError:
            vault.close()
            raise
        return vault

    def reserve(self, *, shared_bytes: int, own_bytes: int) -> None:
        """Asks for two slots of this size; returns at once. Again with a larger size when a part has grown."""
        self._wanted = (shared_bytes, own_bytes)
        self._send({"op": "reserve", "shared_bytes": shared_bytes, "own_bytes": own_bytes})

    def poll_grant(self, step: int | None = None) -> Grant | None:
        """The slot that may be written now, or None: skip this capture. The same one until it is used.

        ``step``: the one to be captured. The group may have agreed to capture none before a later one, so that all
        vaults capture the same. None asks for a slot whatever was agreed, but the vault keeps no earlier one.
        """
        if self._error is not None:
            raise VaultError(self._error)
        grant = self._grant
        if grant is None or (step is not None and step < self._gate):
            return None
        if len(grant.shared) < self._wanted[0] or len(grant.own) < self._wanted[1]:
            self.discard(grant)  # it was on its way when more was asked for
            return None
        return grant

    @property
    def gate(self) -> int:
        """No earlier step is captured, as the group has agreed."""
        return self._gate

    def seal(
        self,
        grant: Grant,
        *,
        step: int,
        shared_length: int,
        own_length: int,
        log_length: int,
        finite: bool = True,
        all_finite: bool = True,
        layout: str = "",
        topology: str = "",
        blocking_ms: float = 0.0,
    ) -> None:
        """Everything is written. The vault makes the digests and the image readable.

        ``finite``: the parameters; ``all_finite``: the whole shared part. ``layout``: ranks with the same text may be
        equals, whose shared parts are compared.
        """
        self._used(grant)
        self._send(
            {
                "op": "seal",
                "slot": grant.slot,
                "number": grant.number,
                "step": step,
                "shared_length": shared_length,
                "own_length": own_length,
                "log_length": log_length,
                "finite": finite,
                "all_finite": all_finite,
                "layout": layout,
                "topology": topology,
                "blocking_ms": blocking_ms,
            }
        )

    def spoilt(self, step: int, *, layout: str) -> None:
        """The parameters after this step are not finite, so there is no image of it; equals may have one."""
        self._send({"op": "spoilt", "step": step, "layout": layout})

    def replayed(self, *, step: int, part: int, parts: int, what: str, digest: str, steady: bool) -> None:
        """What came of one of the model's parts, computed anew after this step (``certify.Replayed``)."""
        self._send(
            {
                "op": "replayed",
                "step": step,
                "part": part,
                "parts": parts,
                "what": what,
                "digest": digest,
                "steady": steady,
            }
        )

    def discard(self, grant: Grant) -> None:
        """The slot was not, or not wholly, written. It is granted again."""
        self._used(grant)
        self._send({"op": "discard", "slot": grant.slot, "number": grant.number})

    def withdraw(self, step: int) -> None:
        """The image of this step, captured in this generation, must not be used."""
        self._send({"op": "withdraw", "step": step})

    @property
    def log(self) -> memoryview:
        """Writable, ``LOG_CAPACITY_BYTES`` long, sparse. Only append: what was sealed must not change."""
        if self._log is None:
            raise VaultError(self._error or "the vault has not sent the log yet")
        return self._log

    def await_restore(self, timeout_s: float = 600.0) -> Restored | None:
        """The image this generation begins from; None when it begins from step 0. Raises StateError when no
        source had it whole, VaultError when the vault gave no answer."""
        self._restore_answer = None
        self._send({"op": "await"})
        what = f"the state of rank {self.rank} for generation {self.generation}"
        self._wait(lambda: self._restore_answer is not None, timeout_s, what)
        answer = self._answer()
        if answer not in ("restored", "nothing"):
            raise StateError(answer)
        return self._restored if answer == "restored" else None

    def close(self) -> None:
        """Ends the connection. A grant that was not sealed is lost. Views stay mapped while somebody has them."""
        self._fail("the connection to the vault was closed")
        self._open = False
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._reader.is_alive() and threading.current_thread() is not self._reader:
            self._reader.join(5.0)
        self._sock.close()
        self._grant = None
        self._slots.clear()
        self._restored = None

    # -- the other end

    def _send(self, message: session.Message) -> None:
        if self._error is not None:
            raise VaultError(self._error)
        line = session.encode(message)
        try:
            sent = self._sock.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._fail(f"the vault is gone ({error.strerror or error})")
            raise VaultError(str(self._error)) from error
        if sent < len(line):
            self._fail("the vault does not read what it is told: it hangs or was stopped")
            raise VaultError(str(self._error))

    def _answer(self) -> str:
        return self._restore_answer or ""

    def _used(self, grant: Grant) -> None:
        if self._error is None and (self._grant is None or self._grant.number != grant.number):
            raise VaultError(f"grant {grant.number} of slot {grant.slot} was used already, or is of another connection")
        self._grant = None

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                if self._error is not None:
                    raise VaultError(self._error)
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise VaultError(f"{what} did not come within {timeout_s:g} s")
                self._changed.wait(min(left_s, 1.0))

    def _fail(self, why: str) -> None:
        with self._changed:
            if self._error is None:
                self._error = why
            self._changed.notify_all()

    def _read(self) -> None:
        reader = LineReader(self._sock, session.TO_WORKER)
        try:
            while True:
                found = reader.read()
                if found is None:
                    self._fail("the vault is gone (it closed the connection)")
                    return
                message, fds = found
                try:
                    self._take(message, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        except (OSError, RecordError, ValueError) as error:
            self._fail(f"the connection to the vault broke: {error}")
        finally:
            reader.close()

    def _take(self, message: session.Message, fds: list[int]) -> None:
        op = message["op"]
        if op == "slot":
            shared = _map(fds[0], message["shared_bytes"])
            own = _map(fds[1], message["own_bytes"])
            self._slots[message["slot"]] = _Slot(shared, own)
            return
        if op == "restored":
            self._take_restored(message, fds)
        elif op == "log":
            self._log = _map(fds[0], message["bytes"], touch=False)
        elif op == "grant":
            slot = self._slots[message["slot"]]
            self._grant = Grant(slot=message["slot"], number=message["number"], shared=slot.shared, own=slot.own)
        elif op == "gate":
            self._gate = message["step"]
        elif op in ("refused", "off"):
            self._fail(message["why"])
        with self._changed:
            if op == "welcome":
                self._welcomed = True
            elif op == "nothing":
                self._restore_answer = "nothing"
            elif op == "restored":
                self._restore_answer = "restored"
            elif op == "failed":
                self._restore_answer = message["why"]
            self._changed.notify_all()

    def _take_restored(self, message: session.Message, fds: list[int]) -> None:
        self._restored = Restored(
            step=message["step"],
            origin=message["origin"],
            source=message["source"],
            shared=_map_readonly(fds[0], message["shared_length"]),
            own=_map_readonly(fds[1], message["own_length"]),
            log_length=message["log_length"],
            bytes=message["bytes"],
            fetch_ms=message["fetch_ms"],
        )

    def _forget(self) -> None:
        """In a forked child: the connection is the parent's."""
        self._error = "a forked process has no vault"
        self._changed = threading.Condition()
        with contextlib.suppress(OSError):
            self._sock.close()


def _map(fd: int, length: int, *, touch: bool = True) -> memoryview:
    memory = mmap.mmap(fd, max(length, 1), mmap.MAP_SHARED)
    view = memoryview(memory)
    if touch:
        with contextlib.suppress(OSError):  # the first copy is slower then
            populate(view)
    return view[:length]


def _map_readonly(fd: int, length: int) -> memoryview:
    return memoryview(mmap.mmap(fd, max(length, 1), mmap.MAP_SHARED, mmap.PROT_READ))[:length]


_live: weakref.WeakSet[WorkerVault] = weakref.WeakSet()


def _after_fork() -> None:
    for vault in list(_live):
        vault._forget()


os.register_at_fork(after_in_child=_after_fork)
