"""The agent's events: one JSON line each in ``events.jsonl``, and torch's elastic events.

Telling never harms the run: a thread of its own writes, so that a slow disk or a slow handler of the site holds nobody
up; a full disk or a full queue loses lines, which is said once, and training goes on.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic import events as torch_events

log = logging.getLogger("lmres")

MAX_QUEUED = 10_000
CLOSE_S = 2.0


class EventLog:
    """Appends events of one agent. ``emit`` may be called from any thread, takes microseconds and raises nothing."""

    def __init__(self, path: Path, *, run_id: str, node_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._node_id = node_id
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_QUEUED)
        self._failed = False
        self._full = False
        self.destination = "null"
        """Name of torch's event handler, from ``--event-log-handler``."""
        self._thread = threading.Thread(target=self._run, name="lmres-events", daemon=True)
        self._thread.start()

    def emit(self, event: str, generation: int, **fields: Any) -> None:
        """Hands one event to the writer. ``fields`` are JSON values."""
        record = {
            "time": time.time(),
            "event": event,
            "run_id": self._run_id,
            "node_id": self._node_id,
            "generation": generation,
            **fields,
        }
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            if not self._full:
                self._full = True
                log.warning("events are lost: their writer does not keep up; training goes on")

    def close(self) -> None:
        """Writes what is queued; waits for a moment only."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            record = self._queue.get()
            if record is None:
                return
            try:
                self._append(json.dumps(record, default=str) + "\n")
            except (ValueError, TypeError) as error:
                log.warning("event %s can not be written: %s", record.get("event"), error)
            self._tell_torch(record)

    def _append(self, line: str) -> None:
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.write(fd, line.encode("utf-8", "backslashreplace"))
            finally:
                os.close(fd)
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("an event can not be written to %s: %s; training goes on", self._path, error)
            self._failed = True

    def _tell_torch(self, record: dict[str, Any]) -> None:
        name = f"lmres.{record['event']}"
        try:
            metadata = {k: v if isinstance(v, (str, int, float, bool)) else json.dumps(v) for k, v in record.items()}
            event = torch_events.Event(name=name, source=torch_events.EventSource.AGENT, metadata=metadata)
            torch_events.record(event, self.destination)
        except Exception:  # a handler of the site's own; whatever it raises must not end the run
            log.warning("torch's event handler %r failed for %s", self.destination, name, exc_info=True)
