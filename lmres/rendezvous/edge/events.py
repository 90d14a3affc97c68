"""The agent's events: one JSON line each in ``events.jsonl``, and torch's elastic events.

Telling never harms the run: a full disk loses lines, which is said once, and training goes on.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic import events as torch_events

log = logging.getLogger("lmres")


class EventLog:
    """Appends events of one agent. Safe to call from any thread."""

    def __init__(self, path: Path, *, run_id: str, node_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._node_id = node_id
        self._lock = threading.Lock()
        self._failed = False
        self.destination = "null"
        """Name of torch's event handler, from ``--event-log-handler``."""

    def emit(self, event: str, generation: int, **fields: Any) -> None:
        """Writes one line. ``fields`` are JSON values; ``generation`` among them wins."""
        record = {
            "time": time.time(),
            "event": event,
            "run_id": self._run_id,
            "node_id": self._node_id,
            "generation": generation,
            **fields,
        }
        line = json.dumps(record, allow_nan=False, default=str) + "\n"
        with self._lock:
            self._append(line)
            self._tell_torch(event, record)

    def _append(self, line: str) -> None:
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, line.encode())
            finally:
                os.close(fd)
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("an event can not be written to %s: %s; training goes on", self._path, error)
            self._failed = True

    def _tell_torch(self, event: str, record: dict[str, Any]) -> None:
        metadata = {k: v if isinstance(v, (str, int, float, bool)) else json.dumps(v) for k, v in record.items()}
        try:
            torch_events.record(
                torch_events.Event(name=f"lmres.{event}", source=torch_events.EventSource.AGENT, metadata=metadata),
                self.destination,
            )
        except Exception:  # a handler of the site's own; whatever it raises must not end the run
            log.warning("torch's event handler %r failed for %s", self.destination, event, exc_info=True)
