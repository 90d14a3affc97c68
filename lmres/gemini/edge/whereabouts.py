"""Which vaults have which parts: asked of all of them at once, over their control ports."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lmres.errors import LmresError, RecordError
from lmres.gemini import session
from lmres.gemini.edge.channel import LineReader, send_line

ASK_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A vault that has a part. ``port``: where parts are pulled. ``ranks``: whose images it is a part of there."""

    node_id: str
    address: str
    port: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    parts_port: int
    ranks: Mapping[str, object]


class Whereabouts:
    """Asks on the first question, and waits at most ``ASK_S`` for all answers. Any thread."""

    def __init__(
        self, sources: Iterable[session.Peer], digests: Iterable[str], *, run_id: str, node_id: str, generation: int
    ) -> None:
        self._digests = sorted(set(digests))
        self._hello = {"op": "hello", "run_id": run_id, "node_id": node_id, "generation": generation}
        self._lock = threading.Lock()
        self._rounds = 0
        self._silent = tuple(source for source in sources if source.node_id != node_id)
        self._found: dict[str, list[Holder]] = {}
        self._problems: dict[session.Peer, str] = {}

    def holders(self, digest: str) -> list[Holder]:
        self.ask(0)
        return list(self._found.get(digest, ()))

    @property
    def problems(self) -> list[str]:
        """One line for each vault that did not say what it has."""
        return [f"{peer.node_id} at {peer.address}:{peer.port}: {why}" for peer, why in list(self._problems.items())]

    @property
    def rounds(self) -> int:
        """How often was asked."""
        return self._rounds

    @property
    def silent(self) -> tuple[session.Peer, ...]:
        """Those of which nothing was heard: stopped, or cut off. They may have what the others lack."""
        return self._silent

    def ask(self, rounds: int) -> None:
        """Asks those that have not answered, unless that was done more than ``rounds`` times by now."""
        with self._lock:
            if self._rounds > rounds:
                return
            answers: dict[session.Peer, _Answer | Exception] = {}
            threads = [
                threading.Thread(target=self._ask, args=(peer, answers), name="vault-ask", daemon=True)
                for peer in self._silent
            ]
            for thread in threads:
                thread.start()
            end_s = time.monotonic() + ASK_S
            for thread in threads:
                thread.join(max(0.0, end_s - time.monotonic()))
            self._silent = tuple(peer for peer in self._silent if not self._hear(peer, answers.get(peer)))
            self._rounds += 1

    def _hear(self, peer: session.Peer, answer: _Answer | Exception | None) -> bool:
        """Whether it is known now what this vault has."""
        if answer is None or (isinstance(answer, OSError) and not isinstance(answer, ConnectionError)):
            self._problems[peer] = f"no answer in {ASK_S:g} s" if answer is None else str(answer)
            return False
        if isinstance(answer, Exception):
            self._problems[peer] = str(answer)
            return True
        self._problems.pop(peer, None)
        for digest, found in answer.ranks.items():
            if isinstance(found, list):
                holder = Holder(
                    node_id=peer.node_id,
                    address=peer.address,
                    port=answer.parts_port,
                    ranks=tuple(rank for rank in found if isinstance(rank, int)),
                )
                self._found.setdefault(digest, []).append(holder)
        return True

    def _ask(self, peer: session.Peer, answers: dict[session.Peer, _Answer | Exception]) -> None:
        try:
            with socket.create_connection((peer.address, peer.port), timeout=ASK_S) as sock:
                send_line(sock, self._hello)
                reader = LineReader(sock, session.TO_VAULT)
                welcome = self._expect(reader, "welcome")
                send_line(sock, {"op": "have", "id": 1, "digests": self._digests})
                answers[peer] = _Answer(welcome["parts_port"], self._expect(reader, "have")["ranks"])
        except (OSError, LmresError) as error:
            answers[peer] = error

    @staticmethod
    def _expect(reader: LineReader, op: str) -> session.Message:
        found = reader.read()
        if found is None:
            raise RecordError(f"the connection ended, {op} expected")
        message, _ = found
        if message["op"] == "refused":
            raise RecordError(message["why"])
        if message["op"] != op:
            raise RecordError(f"{message['op']} came, {op} expected")
        return message
