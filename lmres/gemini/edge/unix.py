"""Unix sockets by path, however long: ``sun_path`` has room for 107 bytes, a folder's descriptor for any."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

_MAX_PATH_BYTES = 107


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        _at(path, sock.connect)
    except BaseException:
        sock.close()
        raise
    return sock


def listen(path: Path, backlog: int = 128) -> socket.socket:
    """Replaces a socket file that nobody listens at. Only this user may connect. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        _at(path, sock.bind)
        path.chmod(0o600)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def _at(path: Path, call: Callable[[str], None]) -> None:
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        call(str(path))
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
