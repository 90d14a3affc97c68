"""Having copies made: tells the vaults that shall hold them what was sealed here, and hears what they hold.

Rules:

1. The owner says what there is (a manifest); the holder pulls what it lacks. Nothing is pushed.
2. A manifest is said again while it is not answered, so that a lost word costs time only.
3. A peer that is out of reach for longer than ``OUT_OF_REACH_S`` is counted out: captures go on with fewer copies,
   which is told once. It counts again as soon as it is back; one that has no memory for copies, at the next generation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmres.gemini.edge.links import RETRY_S, Link
from lmres.gemini.edge.services import Services
from lmres.gemini.inventory import Copy, Key
from lmres.gemini.session import Assignment, Message, Peer, to_plain

OUT_OF_REACH_S = 2.0
_SAY_AGAIN_S = 3.0


class _Holder:
    """One peer that shall hold copies of our images."""

    def __init__(self, link: Link, since_s: float) -> None:
        self.link = link
        self.since_s = since_s  # of being out of reach
        self.counted_out = ""
        self.full = ""  # has no memory for copies
        self.held: dict[int, set[Key]] = {}
        self.never: dict[int, set[Key]] = {}

    def has(self, rank: int, key: Key) -> bool:
        return key in self.held.get(rank, ())


class Replicator:
    """``sealed_copies``: what is readable here now."""

    def __init__(
        self,
        services: Services,
        *,
        parts_port: int,
        sealed_copies: Callable[[], list[Copy]],
        on_change: Callable[[], None],
    ) -> None:
        self._services = services
        self._parts_port = parts_port
        self._sealed_copies = sealed_copies
        self._on_change = on_change
        self._holders: dict[Peer, _Holder] = {}
        self._generation = 0
        self._told: tuple[int, int] | None = None
        self._closed = False
        services.loop.after(_SAY_AGAIN_S, self._say_again)

    def assign(self, assignment: Assignment) -> None:
        new = assignment.generation != self._generation
        self._generation = assignment.generation
        wanted = [peer for peer in assignment.peers if peer.node_id != self._services.options.node_id]
        if not assignment.ranks:
            wanted = []
        for peer in [peer for peer in self._holders if peer not in wanted]:
            self._holders.pop(peer).link.close()
        for holder in self._holders.values():
            if new:  # what a peer dropped at the change of generation it has to say again
                holder.held.clear()
                holder.never.clear()
                holder.full = ""
                holder.since_s = self._services.loop.attended_s
        for peer in wanted:
            if peer not in self._holders:
                self._holders[peer] = self._hold(peer)
        self._told = None
        if self._holders:
            self._services.loop.after(OUT_OF_REACH_S + 0.05, self._look)
        self.say_all()

    def say(self, copy: Copy) -> None:
        """Tells every peer that lacks it of an image that is sealed here."""
        for holder in self._holders.values():
            self._manifest(holder, copy)

    def say_all(self) -> None:
        for copy in self._sealed_copies():
            self.say(copy)

    def withdrawn(self, copy: Copy) -> None:
        """Tells every peer that may hold it that this image must not be used."""
        for holder in self._holders.values():
            if holder.has(copy.rank, copy.key):
                holder.link.send(self._message(copy))

    def verdict(self, rank: int, key: Key) -> bool | None:
        """True: every vault that must hold it does. False: one still may. None: one never will."""
        counted = [holder for holder in self._holders.values() if not holder.counted_out]
        if any(key in holder.never.get(rank, ()) for holder in counted):
            return None
        return all(holder.has(rank, key) for holder in counted)

    def status(self) -> dict[str, Any]:
        return {
            "wanted": 1 + len(self._holders),
            "held": 1 + sum(not holder.counted_out for holder in self._holders.values()),
            "peers": {
                peer.node_id: {
                    "up": holder.link.up,
                    "problem": holder.counted_out,
                    "held": {str(rank): list(max(keys)) for rank, keys in sorted(holder.held.items()) if keys},
                }
                for peer, holder in self._holders.items()
            },
        }

    def part(self) -> None:
        """No peer is spoken to, until the next assignment."""
        for holder in self._holders.values():
            holder.link.close()
        self._holders.clear()

    def close(self) -> None:
        self._closed = True
        for holder in self._holders.values():
            holder.link.close()
        self._holders.clear()

    # -- inside

    def _hold(self, peer: Peer) -> _Holder:
        # The link calls back from the loop only, when the holder is in place.
        link = Link(
            self._services,
            peer,
            lambda: self._generation,
            on_up=lambda _: self._up(peer),
            on_down=lambda _: self._down(peer),
            on_message=lambda message: self._heard(peer, message),
        )
        return _Holder(link, self._services.loop.attended_s)

    def _manifest(self, holder: _Holder, copy: Copy) -> None:
        key = copy.key
        if holder.full or holder.has(copy.rank, key) or key in holder.never.get(copy.rank, ()):
            return
        holder.link.send(self._message(copy))

    def _message(self, copy: Copy) -> Message:
        return {
            "op": "manifest",
            "generation": self._generation,
            "copy": to_plain(copy),
            "parts_address": self._services.options.address,
            "parts_port": self._parts_port,
        }

    def _say_again(self) -> None:
        if not self._closed:
            self.say_all()
            self._services.loop.after(_SAY_AGAIN_S, self._say_again)

    def _up(self, peer: Peer) -> None:
        holder = self._holders.get(peer)
        if holder is None:
            return
        # A vault that was started anew holds nothing of what it held.
        holder.held.clear()
        holder.never.clear()
        for copy in self._sealed_copies():
            self._manifest(holder, copy)
        self._look()

    def _down(self, peer: Peer) -> None:
        holder = self._holders.get(peer)
        if holder is not None:
            holder.since_s = self._services.loop.attended_s
            self._services.loop.after(OUT_OF_REACH_S + 0.05, self._look)

    def _heard(self, peer: Peer, message: Message) -> None:
        holder = self._holders.get(peer)
        if holder is None or message["op"] not in ("held", "not_held"):
            return
        rank, key = message["rank"], Key(message["step"], message["origin"])
        if message["op"] == "held":
            keys = holder.held.setdefault(rank, set())
            keys.add(key)
            for old in sorted(keys)[:-8]:
                keys.discard(old)
        elif message.get("full"):
            holder.full = message["why"]
            self._look()
        elif message["final"]:
            never = holder.never.setdefault(rank, set())
            never.add(key)
            for old in sorted(never)[:-8]:
                never.discard(old)
            self._services.log(f"{peer.node_id} will not hold rank {rank}, {key}: {message['why']}")
        else:
            self._services.log(f"{peer.node_id} does not hold rank {rank}, {key} yet: {message['why']}")
            self._services.loop.after(RETRY_S, lambda: self._again(peer, rank, key))
        self._on_change()

    def _again(self, peer: Peer, rank: int, key: Key) -> None:
        holder = self._holders.get(peer)
        for copy in self._sealed_copies():
            if holder is not None and copy.rank == rank and copy.key == key:
                self._manifest(holder, copy)

    def _look(self) -> None:
        """Counts out who is away for too long, and in who is back; tells the agent when that changes."""
        if self._closed:
            return
        now_s = self._services.loop.attended_s
        for holder in self._holders.values():
            away = not holder.link.up and now_s - holder.since_s >= OUT_OF_REACH_S
            holder.counted_out = holder.full or (f"out of reach: {holder.link.reason}" if away else "")
        counts = self.status()
        found = (counts["held"], counts["wanted"])
        if found != (self._told or (found[1], found[1])):
            reasons = [
                f"{peer.node_id}: {holder.counted_out}" for peer, holder in self._holders.items() if holder.counted_out
            ]
            self._services.tell("copies", {"held": found[0], "wanted": found[1], "reason": "; ".join(reasons)})
        self._told = found
        if any(not holder.link.up and not holder.counted_out for holder in self._holders.values()):
            self._services.loop.after(0.5, self._look)
        self._on_change()
