"""A connection to another vault that is kept up: tried again every second, and known to be down within two.

A dead host closes nothing; so both ends of a link say something every half second while nothing else is said.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
from collections.abc import Callable, Mapping
from typing import Any

from lmres.gemini import session
from lmres.gemini.edge.channel import Channel
from lmres.gemini.edge.services import Services
from lmres.gemini.session import Message, Peer

PING_S = 0.5
RETRY_S = 1.0
SILENCE_S = 2.0
_CONNECT_S = 2.0


class Link:
    """``on_up`` after each welcome, ``on_down`` when it is lost again; ``on_message`` gets what the other one says."""

    def __init__(
        self,
        services: Services,
        peer: Peer,
        generation: Callable[[], int],
        *,
        on_up: Callable[[Message], None],
        on_down: Callable[[str], None],
        on_message: Callable[[Message], None],
    ) -> None:
        self.peer = peer
        self.up = False
        self.reason = "no connection yet"
        self._services = services
        self._generation = generation
        self._on_up = on_up
        self._on_down = on_down
        self._on_message = on_message
        self._channel: Channel | None = None
        self._connecting: socket.socket | None = None
        self._closed = False
        self._heard_s = 0.0
        self._last_reason = ""
        self._connect()

    def send(self, message: Mapping[str, Any]) -> None:
        """Lost when the link is not up: ``on_up`` says everything anew."""
        if self._channel is not None and self.up:
            self._channel.send(message)

    def close(self) -> None:
        self._closed = True
        self._drop_connecting()
        if self._channel is not None:
            self._channel.close("not needed any more")

    # -- connecting

    def _connect(self) -> None:
        if self._closed:
            return
        try:
            # An address, not a name, stands in the plan: no lookup happens here.
            family = socket.AF_INET6 if ":" in self.peer.address else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = sock.connect_ex((self.peer.address, self.peer.port))
        except OSError as error:
            self._failed(f"{error.strerror or error}")
            return
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._failed(errno.errorcode.get(code, str(code)))
            return
        self._connecting = sock
        self._services.loop.watch(sock, lambda _: self._connected(sock), selectors.EVENT_WRITE)
        self._services.loop.after(_CONNECT_S, lambda: self._late(sock))

    def _late(self, sock: socket.socket) -> None:
        if self._connecting is sock:
            self._drop_connecting()
            self._failed(f"no connection within {_CONNECT_S:g} s")

    def _connected(self, sock: socket.socket) -> None:
        if self._connecting is not sock:
            return
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        met_itself = code == 0 and sock.getsockname() == sock.getpeername()
        if code or met_itself:
            self._drop_connecting()
            self._failed(errno.errorcode.get(code, str(code)) if code else "nobody listens there")
            return
        self._connecting = None
        self._services.loop.unwatch(sock)
        self._heard_s = self._services.loop.attended_s
        self._channel = Channel(
            self._services.loop, sock, session.TO_VAULT, on_message=self._heard, on_close=self._lost
        )
        options = self._services.options
        self._channel.send(
            {"op": "hello", "run_id": options.run_id, "node_id": options.node_id, "generation": self._generation()}
        )
        self._services.loop.after(PING_S, lambda channel=self._channel: self._ping(channel))  # type: ignore[misc]

    def _drop_connecting(self) -> None:
        if self._connecting is not None:
            self._services.loop.unwatch(self._connecting)
            with contextlib.suppress(OSError):
                self._connecting.close()
            self._connecting = None

    # -- connected

    def _heard(self, channel: Channel, message: Message) -> None:
        self._heard_s = self._services.loop.attended_s
        op = message["op"]
        if op == "welcome":
            if message["node_id"] != self.peer.node_id:
                channel.close(f"{message['node_id']} answers there")
                return
            self.up = True
            self.reason = ""
            self._last_reason = ""
            self._on_up(message)
        elif op == "refused":
            channel.close(message["why"])
        elif op != "pong":
            self._on_message(message)

    def _ping(self, channel: Channel) -> None:
        if channel.closed:
            return
        silent_s = self._services.loop.attended_s - self._heard_s
        if silent_s > SILENCE_S:
            channel.close(f"silent for {silent_s:.1f} s")
            return
        channel.send({"op": "ping"})
        self._services.loop.after(PING_S, lambda: self._ping(channel))

    def _lost(self, channel: Channel, reason: str) -> None:
        if channel is not self._channel:
            return
        self._channel = None
        self._failed(reason)

    def _failed(self, reason: str) -> None:
        was_up, self.up = self.up, False
        self.reason = reason
        if self._closed:
            return
        if reason != self._last_reason:
            self._last_reason = reason
            peer = self.peer
            self._services.log(f"no link to {peer.node_id} at {peer.address}:{peer.port}: {reason}")
        if was_up:
            self._on_down(reason)
        self._services.loop.after(RETRY_S, self._connect)
