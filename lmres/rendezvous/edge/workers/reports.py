"""What a worker says on its channel: JSON objects, one a line, bounded.

The channel is written by the user's process, so anything may come. A line that is too long, is not JSON or is not an
object is dropped; the first such line of a worker is counted for the caller to report, the rest are silent.
"""

from __future__ import annotations

import json
from typing import Any

LINE_BYTES = 64 * 1024


class ReportReader:
    """Cuts the bytes of one channel into messages."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False
        self.junk = 0

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages completed by ``data``, in order."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            if self._skipping:
                self._skipping = False
                continue
            message = self._decode(line)
            if message is not None:
                found.append(message)
        if len(self._rest) > LINE_BYTES:
            if not self._skipping:
                self.junk += 1
            self._skipping = True
            self._rest = b""
        return found

    def _decode(self, line: bytes) -> dict[str, Any] | None:
        try:
            if len(line) > LINE_BYTES:
                raise ValueError("too long")
            message = json.loads(line, parse_constant=_refuse)
            if not isinstance(message, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError):
            self.junk += 1
            return None
        return message


def _refuse(name: str) -> None:
    """NaN and infinities are no JSON."""
    raise ValueError(name)
