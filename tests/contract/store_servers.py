"""Store processes and small clients for the tests of stores. Every process started here is ended here, by its pid."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lmres.rendezvous.edge.stores.spawn import bind_endpoint, start_server
from lmres.rendezvous.edge.stores.tcp import TcpStore
from lmres.rendezvous.edge.stores.wire import Role

LONG_MS = 20_000
"""A timeout that only a failed test reaches, on a busy machine too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    process: subprocess.Popen[bytes]
    host: str
    port: int
    log_path: Path

    def client(self, client_id: str = "a", role: Role = "agent") -> TcpStore:
        return TcpStore((self.host, self.port), client_id=client_id, role=role)

    def ended_within(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def log(self) -> str:
        return self.log_path.read_text()


@contextlib.contextmanager
def running_server(folder: Path, *, host: str = "127.0.0.1", port: int = 0, **options: int) -> Iterator[RunningServer]:
    listener = bind_endpoint([host], port)
    assert listener is not None
    port = listener.getsockname()[1]
    log_path = folder / f"store-{port}.log"
    process = start_server(listener, log_path=log_path, **options)
    try:
        yield RunningServer(process=process, host=host, port=port, log_path=log_path)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait(10)


def run_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A child that runs the code; its standard output is a pipe. The caller ends it."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )


def eventually(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Returns when the condition holds; fails the test if it does not within the time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition did not come true in time"
        time.sleep(0.01)


def read_to_end(sock: socket.socket) -> bytes:
    """All that still comes until the other side closes; a reset is a close too."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(1 << 16):
            received += chunk
    return bytes(received)
