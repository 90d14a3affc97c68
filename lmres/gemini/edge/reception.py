"""Who connects to the private socket: the agent, and workers of this host.

The first message says which. Only this user is let in, and only for this run. A worker that comes before the assignment
of its generation waits for it; how long is its own to say.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from lmres.errors import RecordError
from lmres.gemini import session
from lmres.gemini.edge.channel import Channel
from lmres.gemini.edge.core import VaultCore
from lmres.gemini.edge.services import Options, Services
from lmres.gemini.session import Message


class Reception:
    def __init__(self, services: Services, core: VaultCore) -> None:
        self._services = services
        self._core = core
        self._early: list[tuple[Channel, Message, int]] = []
        self._agent: Channel | None = None
        self._without_agent_since_s = services.loop.attended_s
        core.on_assigned = self._admit_early

    def accept(self, channel: Channel, sock_peer: tuple[int, int]) -> None:
        """A new connection, and the process and user at its other end."""
        channel.on_message = lambda channel, message: self._hello(channel, message, sock_peer)

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        """An event, for the agent if there is one."""
        if self._agent is not None:
            self._agent.send({"op": "event", "kind": kind, "generation": self._core.generation, **fields})

    @property
    def away_s(self) -> float:
        """For how long there has been no agent; 0 while there is one."""
        return 0.0 if self._agent is not None else self._services.loop.attended_s - self._without_agent_since_s

    def _hello(self, channel: Channel, message: Message, sock_peer: tuple[int, int]) -> None:
        pid, uid = sock_peer
        run_id = self._services.options.run_id
        why = ""
        if message["op"] != "hello":
            why = f"hello expected, {message['op']} came"
        elif uid != os.geteuid():
            why = f"user {uid} has no business with the vault of user {os.geteuid()}"
        elif message["run_id"] and message["run_id"] != run_id:
            why = f"this is the vault of run {run_id!r}, not of {message['run_id']!r}"
        elif message["role"] == "worker":
            channel.kinds = session.FROM_WORKER
            why = self._worker(channel, session.check(message, session.FROM_WORKER), pid)
        elif message["role"] == "agent":
            why = self._welcome_agent(channel, message)
        else:
            why = f"role {message['role']!r} is unknown"
        self._turn_away(channel, why)

    @staticmethod
    def _turn_away(channel: Channel, why: str) -> None:
        if why:
            channel.send({"op": "refused", "why": why})
            channel.close(why)

    # -- workers

    def _worker(self, channel: Channel, message: Message, pid: int) -> str:
        rank, generation = message["rank"], message["generation"]
        core, assignment = self._core, self._core.assignment
        if generation < core.generation:
            return f"the vault is at generation {core.generation}, the worker of rank {rank} at {generation}"
        if assignment is None or assignment.generation < generation:
            self._early = [(other, heard, by) for other, heard, by in self._early if not other.closed]
            self._early.append((channel, message, pid))
            return ""
        if rank not in assignment.ranks:
            return f"rank {rank} is not assigned to this vault in generation {generation}"
        core.admit(channel, rank, pid)
        return ""

    def _admit_early(self) -> None:
        early, self._early = self._early, []
        for channel, message, pid in early:
            if not channel.closed:
                self._turn_away(channel, self._worker(channel, message, pid))

    # -- the agent

    def _welcome_agent(self, channel: Channel, message: Message) -> str:
        options = self._services.options
        try:
            wanted = Options(**message["options"]) if "options" in message else options
        except TypeError as error:
            return f"options are not understood: {error}"
        if (wanted.node_id, wanted.address) != (options.node_id, options.address):
            return f"this is the vault of {options.node_id} at {options.address}"
        self._services.options = wanted
        if self._agent is not None:
            self._agent.close("another agent came")
        self._agent = channel
        channel.kinds = session.FROM_AGENT
        channel.on_message = self._agent_says
        channel.on_close = self._agent_gone
        channel.send(
            {
                "op": "welcome",
                "pid": os.getpid(),
                "address": wanted.address,
                "port": self._core.control_port,
                "generation": self._core.generation,
            }
        )
        return ""

    def _agent_says(self, channel: Channel, message: Message) -> None:
        answer = partial(self._answer, channel, message.get("id", 0))
        try:
            self._core.agent_says(message, answer)
        except (RecordError, ValueError) as error:
            answer({"refused": str(error)})

    @staticmethod
    def _answer(channel: Channel, number: int, fields: dict[str, Any]) -> None:
        channel.send({"op": "answer", "id": number, **fields})

    def _agent_gone(self, channel: Channel, reason: str) -> None:
        if channel is self._agent:
            self._agent = None
            self._without_agent_since_s = self._services.loop.attended_s
            self._services.log(f"the agent is gone ({reason})")
