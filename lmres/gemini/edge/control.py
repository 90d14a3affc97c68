"""The control port: what other vaults say to this one."""

from __future__ import annotations

import contextlib
import selectors
import socket
from typing import TYPE_CHECKING

from lmres.errors import RecordError
from lmres.gemini import session
from lmres.gemini.edge.channel import Channel
from lmres.gemini.edge.services import Services
from lmres.gemini.session import Message

if TYPE_CHECKING:
    from lmres.gemini.edge.core import VaultCore

MAX_CONNECTIONS = 4096
_BACKLOG = 128


def listen(address: str) -> socket.socket:
    """At a free port of this address; of all addresses if it is not one of this host. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    except OSError:
        return socket.create_server(("", 0), family=family, backlog=_BACKLOG)


class ControlPort:
    """Takes connections of other vaults; what one sends wrongly costs only its connection."""

    def __init__(self, services: Services, core: VaultCore, listener: socket.socket) -> None:
        self._services = services
        self._core = core
        self._listener = listener
        self._names: dict[Channel, str] = {}
        listener.setblocking(False)
        services.loop.watch(listener, self._accept, selectors.EVENT_READ)

    @property
    def visited(self) -> bool:
        """Whether a vault that has an agent is connected: one without speaks to nobody (``VaultCore.part``)."""
        return any(self._names.values())

    def close(self) -> None:
        self._services.loop.unwatch(self._listener)
        self._listener.close()
        for channel in list(self._names):
            channel.close("the vault ends")

    def _accept(self, _: int) -> None:
        try:
            sock, _peer = self._listener.accept()
        except OSError:
            return
        if len(self._names) >= MAX_CONNECTIONS:
            sock.close()
            return
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        channel = Channel(self._services.loop, sock, session.FROM_VAULT, on_message=self._heard, on_close=self._closed)
        self._names[channel] = ""

    def _closed(self, channel: Channel, reason: str) -> None:
        name = self._names.pop(channel, "")
        self._core.seat.forget(channel)
        if name:
            self._services.log(f"vault {name} is gone ({reason})")

    def _heard(self, channel: Channel, message: Message) -> None:
        name = self._names.get(channel, "")
        if not name:
            self._hello(channel, message)
            return
        match message["op"]:
            case "ping":
                channel.send({"op": "pong"})
            case "manifest":
                self._core.replicas.manifest(channel, message)
            case "tell":
                self._core.seat.hear_report(channel, name, message)
            case "have":
                self._have(channel, message)
            case _:
                channel.close(f"{message['op']} came twice")

    def _hello(self, channel: Channel, message: Message) -> None:
        options = self._services.options
        why = ""
        if message["op"] != "hello":
            why = f"hello expected, {message['op']} came"
        elif message["run_id"] != options.run_id:
            why = f"this vault belongs to the run {options.run_id!r}, not to {message['run_id']!r}"
        if why:
            channel.send({"op": "refused", "why": why})
            channel.close(why)
            return
        self._names[channel] = message["node_id"] or "?"
        channel.send({"op": "welcome", "node_id": options.node_id, "parts_port": self._core.parts.port})

    def _have(self, channel: Channel, message: Message) -> None:
        digests = [digest for digest in message["digests"] if isinstance(digest, str)]
        if len(digests) != len(message["digests"]):
            raise RecordError("have.digests: expected a list of text")
        ranks = {digest: found for digest in digests if (found := self._services.contents.ranks(digest))}
        channel.send({"op": "have", "id": message["id"], "ranks": ranks})
