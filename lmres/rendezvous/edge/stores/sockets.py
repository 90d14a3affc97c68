"""Sockets with deadlines: name lookup, connecting, keepalive. Shared by the store's client and server.

Rules:

1. Every step ends by its deadline, the lookup of a name too: the resolver of the C library has no timeout, so it
   runs in a thread that is left behind when it is late.
2. Outcomes are told apart by what a caller can do: refused (nobody listens there now) or unavailable (no answer).
3. A connection whose two ends are the same socket is refused: connecting to a free local port in the range of
   ephemeral ports may meet itself (TCP simultaneous open).
"""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lmres.errors import StoreRefused, StoreUnavailable

LISTEN_BACKLOG = 1024
KEEPALIVE_IDLE_S = 60
KEEPALIVE_INTERVAL_S = 15
KEEPALIVE_PROBES = 4
"""A dead host's connection ends after 60 + 4 * 15 = 120 s."""
_LOOKUP_POLL_S = 0.05


class Deadline:
    """A moment of the local monotonic clock."""

    __slots__ = ("_end_s", "timeout_ms")

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._end_s = time.monotonic() + timeout_ms / 1000

    def left_s(self) -> float:
        """Seconds left, 0 or less when it has passed."""
        return self._end_s - time.monotonic()

    def must_left_s(self, what: str) -> float:
        """Seconds left. Raises StoreUnavailable, saying what did not happen in time, when there are none."""
        left = self.left_s()
        if left <= 0:
            raise StoreUnavailable(f"{what} within {self.timeout_ms} ms")
        return left


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One address to connect to, as ``socket.getaddrinfo`` gives it."""

    family: socket.AddressFamily
    address: tuple[object, ...]

    def __str__(self) -> str:
        return f"{self.address[0]} port {self.address[1]}"


def keep_alive(sock: socket.socket) -> None:
    """No delay for small frames, and an end within about 120 s to a connection whose peer is dead."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    # Keepalive is not sent while data is unacknowledged: this bounds that case.
    total_ms = (KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_PROBES) * 1000
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, total_ms)


def lookup(host: str, port: int, deadline: Deadline, cancelled: threading.Event) -> tuple[Target, ...]:
    """The addresses of a host, in the system's order of preference.

    Raises StoreUnavailable if there is none, or none in time: a name may appear later (a cluster's name service
    learns of a host when it is up).
    """
    if is_ip_address(host):
        try:
            return _getaddrinfo(host, port, socket.AI_NUMERICHOST)
        except OSError as error:  # an IPv6 address with the name of an interface that this host lacks
            raise StoreUnavailable(f"address {host} cannot be used on this host: {error}") from error
    answers: queue.SimpleQueue[tuple[Target, ...] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(_getaddrinfo(host, port, 0))
        except (OSError, UnicodeError) as error:
            answers.put(error if isinstance(error, OSError) else OSError(str(error)))

    threading.Thread(target=ask, name="lmres-lookup", daemon=True).start()
    while not cancelled.is_set():
        left_s = deadline.must_left_s(f"name {host!r} was not resolved")
        try:
            answer = answers.get(timeout=min(left_s, _LOOKUP_POLL_S))
        except queue.Empty:
            continue
        if isinstance(answer, OSError):
            raise StoreUnavailable(
                f"name {host!r} cannot be resolved ({answer}): check the rendezvous endpoint"
            ) from answer
        return answer
    raise StoreUnavailable(f"connection closed while name {host!r} was looked up")


def connect_any(
    targets: tuple[Target, ...], deadline: Deadline, on_socket: Callable[[socket.socket], None]
) -> socket.socket:
    """The first connection that succeeds, in order; each address gets an equal share of the time left.

    ``on_socket`` gets each socket before it connects, so that another thread can shut it down. Raises StoreRefused
    if an address refused and none timed out, else StoreUnavailable.
    """
    refused = False
    late = False
    reasons: list[str] = []
    for index, target in enumerate(targets):
        left_s = deadline.must_left_s(f"no connection to {target}")
        try:
            return _connect(target, left_s / (len(targets) - index), on_socket)
        except ConnectionRefusedError as error:
            refused = True
            reasons.append(f"{target}: {error.strerror or error}")
        except OSError as error:
            late = late or isinstance(error, TimeoutError)
            reasons.append(f"{target}: {error.strerror or error}")
    text = "; ".join(reasons) or "no address"
    if refused and not late:
        raise StoreRefused(f"nobody listens ({text})")
    raise StoreUnavailable(f"no connection within {deadline.timeout_ms} ms ({text})")


def is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _connect(target: Target, timeout_s: float, on_socket: Callable[[socket.socket], None]) -> socket.socket:
    sock = socket.socket(target.family, socket.SOCK_STREAM)
    try:
        on_socket(sock)
        sock.settimeout(timeout_s)
        sock.connect(target.address)
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError("connected to itself")
        keep_alive(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _getaddrinfo(host: str, port: int, flags: int) -> tuple[Target, ...]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return tuple(
        Target(family=family, address=tuple(address))
        for family, _, _, _, address in infos
        if family in (socket.AF_INET, socket.AF_INET6)
    )
