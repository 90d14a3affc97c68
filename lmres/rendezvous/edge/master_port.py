"""A free port for the store that rank 0's workers make.

It is kept until the next group forms, so that nobody else is given it in the meantime: bound, not listening, and with
SO_REUSEADDR as rank 0's store has it, which can bind it too and listen.
"""

from __future__ import annotations

import socket


class MasterPort:
    """``number`` may be read by any thread; 0 before the first ``reserve``."""

    def __init__(self) -> None:
        self.number = 0
        self._socket: socket.socket | None = None

    def reserve(self, address: str) -> None:
        """Takes a new port of the address's family and lets go of the old one."""
        self.free()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        taken = socket.socket(family, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("", 0))
        self._socket, self.number = taken, taken.getsockname()[1]

    def free(self) -> None:
        taken, self._socket = self._socket, None
        if taken is not None:
            taken.close()
