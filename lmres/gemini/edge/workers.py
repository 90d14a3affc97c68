"""The workers' connections: who they are, when they die, and what they ask.

A worker's death is told by its process, not only by its socket: children it forked (data loaders) keep the socket open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmres.gemini.edge.channel import Channel
from lmres.gemini.edge.loop import Loop
from lmres.gemini.edge.ranks import LocalRank
from lmres.gemini.session import Message

if TYPE_CHECKING:
    from lmres.gemini.edge.core import VaultCore


class WorkerLink:
    """One worker that has said hello."""

    def __init__(self, core: VaultCore, channel: Channel, rank: LocalRank, *, pid: int, loop: Loop) -> None:
        self._core = core
        self._channel = channel
        self._loop = loop
        self.rank = rank
        self.pid = pid
        self.awaits = False
        self._pidfd = -1
        with contextlib.suppress(OSError, AttributeError):  # an old kernel: then the socket alone tells
            self._pidfd = os.pidfd_open(pid)
            loop.watch(self._pidfd, self._died)
        channel.on_message = self._heard
        channel.on_close = self._closed
        self._acts: dict[str, Callable[[Message], None]] = {
            "reserve": self._reserve,
            "seal": self._seal,
            "discard": self._discard,
            "spoilt": self._spoilt,
            "replayed": self._replayed,
            "withdraw": self._withdraw,
            "await": self._await,
        }
        rank.attach(self, core.generation)

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        self._channel.send(message, fds)

    def close(self, reason: str) -> None:
        self._channel.close(reason)

    def _heard(self, channel: Channel, message: Message) -> None:
        act = self._acts.get(message["op"])
        if act is None:
            channel.close(f"{message['op']} came twice")
            return
        try:
            act(message)
        except ValueError as error:
            self.send({"op": "off", "why": str(error)})
            channel.close(str(error))

    def _died(self, _: int) -> None:
        self._loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._channel.close(f"process {self.pid} ended")
        self.rank.died(self)

    def _closed(self, _: Channel, reason: str) -> None:
        self._core.worker_gone(self, reason)

    @property
    def dead(self) -> bool:
        """Its process has ended, as far as can be known."""
        return self._pidfd < 0

    def _reserve(self, message: Message) -> None:
        def reserve() -> None:
            if self.rank.worker is self:
                self.rank.reserve(shared_bytes=message["shared_bytes"], own_bytes=message["own_bytes"])

        self._core.when_restored(self.rank, reserve)

    def _seal(self, message: Message) -> None:
        self.rank.seal(message)
        self._core.changed()

    def _discard(self, message: Message) -> None:
        self.rank.discard(message)
        self._core.changed()

    def _spoilt(self, message: Message) -> None:
        self.rank.spoil(message)
        self._core.changed()

    def _replayed(self, message: Message) -> None:
        self.rank.replay(message)
        self._core.changed()

    def _withdraw(self, message: Message) -> None:
        self._core.withdraw(self.rank, message["step"])

    def _await(self, _: Message) -> None:
        self.awaits = True
        self._core.answer_worker(self)
