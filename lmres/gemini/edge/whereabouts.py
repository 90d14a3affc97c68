"""Which vaults have which parts: asked of all of them at once, over their control ports."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
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


class Whereabouts:
    """Asks on the first question, and waits at most ``ASK_S`` for all answers. Any thread."""

    def __init__(
        self, sources: Iterable[session.Peer], digests: Iterable[str], *, run_id: str, node_id: str, generation: int
    ) -> None:
        self._sources = [source for source in sources if source.node_id != node_id]
        self._digests = sorted(set(digests))
        self._hello = {"op": "hello", "run_id": run_id, "node_id": node_id, "generation": generation}
        self._lock = threading.Lock()
        self._asked = False
        self._found: dict[str, list[Holder]] = {}
        self._problems: list[str] = []

    def holders(self, digest: str) -> list[Holder]:
        self._ask_all()
        return list(self._found.get(digest, ()))

    @property
    def problems(self) -> list[str]:
        """One line for each vault that gave no answer."""
        return list(self._problems)

    def _ask_all(self) -> None:
        with self._lock:
            if self._asked:
                return
            self._asked = True
            threads = [
                threading.Thread(target=self._ask, args=(source,), name="vault-ask", daemon=True)
                for source in self._sources
            ]
            for thread in threads:
                thread.start()
            end_s = time.monotonic() + ASK_S
            for thread in threads:
                thread.join(max(0.0, end_s - time.monotonic()))
            for thread, source in zip(threads, self._sources, strict=True):
                if thread.is_alive():
                    self._problems.append(
                        f"{source.node_id} at {source.address}:{source.port} gave no answer in {ASK_S} s"
                    )

    def _ask(self, source: session.Peer) -> None:
        try:
            with socket.create_connection((source.address, source.port), timeout=ASK_S) as sock:
                send_line(sock, self._hello)
                reader = LineReader(sock, session.TO_VAULT)
                welcome = self._expect(reader, "welcome")
                send_line(sock, {"op": "have", "id": 1, "digests": self._digests})
                ranks = self._expect(reader, "have")["ranks"]
        except (OSError, LmresError) as error:
            self._problems.append(f"{source.node_id} at {source.address}:{source.port}: {error}")
            return
        for digest, found in ranks.items():
            if isinstance(found, list):
                holder = Holder(
                    node_id=source.node_id,
                    address=source.address,
                    port=welcome["parts_port"],
                    ranks=tuple(rank for rank in found if isinstance(rank, int)),
                )
                self._found.setdefault(digest, []).append(holder)

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
