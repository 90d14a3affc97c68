"""Connections to the neighbours in the ring, which say at once that a peer's process is gone (``parting.py``).

One thread owns all sockets and waits for them; it has a timer only while it calls somebody. A connection that breaks
without goodbye leads to a call to the same peer: who answers is there, and the call becomes the new connection. What
nobody answers is published in ``broken`` for the next round; it is withdrawn when the peer is heard again.

Evidence is only given of a peer that had been greeted under its incarnation: an address that was never reached proves
nothing. Without a listener, or if this thread fails, the agent goes on; its leases are still watched.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lmres.rendezvous.edge.link import BYE, Hello, Link, call, is_refusal, listen, read_hello
from lmres.rendezvous.parting import Answer, Break, neighbours, speaks_of_death
from lmres.rendezvous.rounds import Broken
from lmres.rendezvous.state import Member

log = logging.getLogger("lmres")

CALL_S = 0.5
"""So long a call may go unanswered by the peer's kernel."""
GREET_S = 5.0
AGAIN_FIRST_S, AGAIN_MAX_S = 0.25, 15.0
CUT_SHORT_TRIES = 3
"""Calls that were taken and dropped without a word: the listener was about to close, or to come back."""
MAX_ACCEPTED = 64
CLOSE_S = 2.0


@dataclass(slots=True, eq=False)
class _Peer:
    """``how``: a break that is being looked into. ``broken``: the number of the break that is told of, 0 for none."""

    node_id: str
    incarnation: str
    wanted: bool = False
    greeted: bool = False
    call: Link | None = None
    how: Break | None = None
    broken: int = 0
    tries: int = 0
    cut_short: int = 0
    again_at: float | None = None


class Neighbours:
    """``follow`` and ``close`` are for other threads; ``port``, ``broken`` and ``connected`` may be read by any.

    ``connected``: the incarnations to which a connection stands.
    """

    def __init__(self, *, run: str, address: str, poke: Callable[[], None]) -> None:
        self._run, self._poke = run, poke
        self.broken: tuple[Broken, ...] = ()
        self.connected: frozenset[str] = frozenset()
        self._listener: socket.socket | None = None
        try:
            self._listener = listen(address)
        except OSError as error:
            log.warning(
                "no port can be opened on %s (%s): that this agent is killed is noticed by its lease only",
                address,
                error,
            )
        self.port: int = self._listener.getsockname()[1] if self._listener is not None else 0
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._lock = threading.Lock()
        self._given: tuple[Member, tuple[Member, ...]] | None = None
        self._news = self._closing = False
        self._me: Member | None = None
        self._directory: dict[str, Member] = {}
        self._peers: dict[str, _Peer] = {}
        self._links: set[Link] = set()
        self._selector = selectors.DefaultSelector()
        self._count = 0
        self._thread = threading.Thread(target=self._run_guarded, name="lmres-neighbours", daemon=True)

    # -- for other threads --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def follow(self, me: Member, members: tuple[Member, ...]) -> None:
        """The live members as they are now. ``me`` is not among them while this agent is not registered."""
        with self._lock:
            if self._given is not None and self._given[0] is me and self._given[1] is members:
                return
            self._given, self._news = (me, members), True
        self._nudge()

    def close(self) -> None:
        """Says goodbye and lets go of everything. Bounded."""
        with self._lock:
            self._closing = True
        self._nudge()
        if self._thread.ident is None:
            self._let_go()
        else:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.warning("the connections to this agent's neighbours could not be closed in %.0f s", CLOSE_S)

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it has ended
            self._wake.send(b"x")

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run_guarded(self) -> None:
        try:
            self._loop()
        except Exception:
            log.exception(
                "connections to neighbours are given up; that an agent is killed is noticed by its lease only"
            )
        finally:
            self._let_go()

    def _let_go(self) -> None:
        for link in sorted(self._links, key=id):
            self._drop(link, say=BYE)
        self.broken, self.connected = (), frozenset()
        with contextlib.suppress(OSError):
            self._selector.close()
        for sock in (self._listener, self._woken, self._wake):
            if sock is not None:
                sock.close()

    def _loop(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(self._until()):
                if key.fileobj is self._woken:
                    self._drain()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._links:
                    self._serve(key.data)
            with self._lock:
                closing, news, given = self._closing, self._news, self._given
                self._news = False
            if closing:
                return
            if news and given is not None:
                self._learn(*given)
            self._expire(time.monotonic())
            self._publish()

    def _until(self) -> float | None:
        """Seconds until something is due; None while everything is at rest."""
        due = [link.end_by for link in self._links if link.end_by is not None]
        due += [peer.again_at for peer in self._peers.values() if peer.again_at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _expire(self, now: float) -> None:
        for link in [x for x in self._links if x.end_by is not None and x.end_by <= now]:
            peer = self._peers.get(link.peer)
            taken = link.stage == "greeting"
            self._drop(link)
            if link.called and peer is not None:
                # A listener that takes calls and does not speak is that of a stopped process.
                self._answered(peer, Answer.THERE if taken else Answer.NONE)
        for peer in [p for p in self._peers.values() if p.again_at is not None and p.again_at <= now]:
            peer.again_at = None
            if peer.call is None:
                self._call(peer)

    def _publish(self) -> None:
        told = sorted((p for p in self._peers.values() if p.broken), key=lambda p: p.broken)
        self.connected = frozenset(link.peer for link in self._links if link.stage == "open")
        broken = tuple(Broken(node_id=p.node_id, incarnation=p.incarnation, number=p.broken) for p in told)
        if broken != self.broken:
            self.broken = broken
            self._poke()

    # -- who is there -------------------------------------------------------------------------------------------------

    def _learn(self, me: Member, members: tuple[Member, ...]) -> None:
        """Lets go of those that have gone, and calls new neighbours."""
        if self._me is None or self._me.incarnation != me.incarnation:
            for link in list(self._links):
                self._drop(link, say=BYE)
            self._peers.clear()
        self._me = me
        self._directory = {m.incarnation: m for m in members}
        for peer in [p for p in self._peers.values() if p.incarnation not in self._directory]:
            for link in [x for x in self._links if x.peer == peer.incarnation]:
                self._drop(link, say=BYE)
            del self._peers[peer.incarnation]
        wanted = {m.incarnation: m for m in neighbours(members, me)}
        for peer in self._peers.values():
            if peer.wanted and peer.incarnation not in wanted:
                peer.wanted, peer.again_at = False, None
                if peer.call is not None and peer.how is None:
                    self._drop(peer.call, say=BYE)
        for incarnation, member in wanted.items():
            peer = self._peer(member.node_id, incarnation)
            if not peer.wanted:
                peer.wanted, peer.tries = True, 0
                if peer.call is None:
                    self._call(peer)

    def _peer(self, node_id: str, incarnation: str) -> _Peer:
        return self._peers.setdefault(incarnation, _Peer(node_id=node_id, incarnation=incarnation))

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if sum(not link.called for link in self._links) >= MAX_ACCEPTED:
            sock.close()
            return
        self._keep(Link(sock, called=False, stage="greeting", end_by=time.monotonic() + GREET_S), selectors.EVENT_READ)

    def _call(self, peer: _Peer) -> None:
        """A call whose outcome ``_answered`` is told."""
        member = self._directory.get(peer.incarnation)
        if member is None or not member.pulse_port:
            self._answered(peer, Answer.NONE)
            return
        try:
            sock = call(member.address, member.pulse_port)
        except OSError as error:
            self._answered(peer, Answer.REFUSED if is_refusal(error.errno) else Answer.NONE)
            return
        link = Link(sock, called=True, stage="calling", end_by=time.monotonic() + CALL_S, peer=peer.incarnation)
        peer.call = link
        self._keep(link, selectors.EVENT_WRITE)

    def _keep(self, link: Link, events: int) -> None:
        self._links.add(link)
        self._selector.register(link.sock, events, link)

    def _drop(self, link: Link, *, say: bytes = b"") -> None:
        if link not in self._links:
            return
        self._links.discard(link)
        peer = self._peers.get(link.peer)
        if peer is not None and peer.call is link:
            peer.call = None
        if say and link.stage == "open":
            link.send(say)
        with contextlib.suppress(OSError, KeyError, ValueError):
            self._selector.unregister(link.sock)
        link.sock.close()

    def _serve(self, link: Link) -> None:
        if link.stage == "calling":
            self._called(link)
            return
        lines, ended = link.read()
        for line in lines:
            if link not in self._links:
                return
            if link.stage == "greeting":
                self._greeted(link, read_hello(line))
            elif line + b"\n" == BYE:
                self._parted_well(link)
        if ended is not None and link in self._links:
            self._ended(link, ended)

    def _called(self, link: Link) -> None:
        """The peer's kernel has answered."""
        peer, me = self._peers[link.peer], self._me
        code = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._drop(link)
            self._answered(peer, Answer.REFUSED if is_refusal(code) else Answer.NONE)
            return
        assert me is not None
        link.stage, link.end_by = "greeting", time.monotonic() + GREET_S
        self._selector.modify(link.sock, selectors.EVENT_READ, link)
        hello = Hello(run=self._run, node_id=me.node_id, incarnation=me.incarnation, to=peer.incarnation)
        if not link.send(hello.encode()):
            self._ended(link, Break.CLOSED)

    def _greeted(self, link: Link, hello: Hello | None) -> None:
        if not link.called:
            self._answer_greeting(link, hello)
            return
        peer = self._peers[link.peer]
        if hello is None or hello.run != self._run or hello.incarnation != peer.incarnation:
            self._drop(link)
            self._answered(peer, Answer.REFUSED)  # somebody else has the port now
            return
        link.settle()
        self._heard(peer)
        self._answered(peer, Answer.THERE)
        if not peer.wanted:
            self._drop(link, say=BYE)

    def _answer_greeting(self, link: Link, hello: Hello | None) -> None:
        me = self._me
        if hello is None or me is None or hello.run != self._run:
            self._drop(link)
            return
        said = link.send(Hello(run=self._run, node_id=me.node_id, incarnation=me.incarnation).encode())
        if not said or hello.to != me.incarnation:
            self._drop(link)
            return
        link.peer = hello.incarnation
        link.settle()
        self._heard(self._peer(hello.node_id, hello.incarnation))

    def _heard(self, peer: _Peer) -> None:
        peer.greeted, peer.broken, peer.how = True, 0, None
        peer.tries = peer.cut_short = 0

    def _parted_well(self, link: Link) -> None:
        """It said goodbye: it is going, or does not need this connection."""
        peer = self._peers.get(link.peer)
        self._drop(link)
        if peer is not None and peer.wanted and link.called:
            self._call_again_later(peer)

    def _ended(self, link: Link, how: Break) -> None:
        """Closed without goodbye."""
        peer, stage = self._peers.get(link.peer), link.stage
        self._drop(link)
        if peer is None:
            return
        if stage == "open":
            self._broke(peer, how)
        elif link.called:
            peer.cut_short += 1
            if peer.cut_short < CUT_SHORT_TRIES:
                self._call(peer)
            else:
                peer.cut_short = 0
                self._answered(peer, Answer.REFUSED)

    def _broke(self, peer: _Peer, how: Break) -> None:
        if peer.call is not None and peer.call.stage == "open":
            return  # if the peer is gone, that one breaks too
        if peer.how is not Break.CLOSED:
            peer.how = how
        if peer.call is None:
            peer.again_at = None
            self._call(peer)

    def _answered(self, peer: _Peer, answer: Answer) -> None:
        """What a call has shown, together with the break that led to it."""
        how, peer.how = peer.how, None
        if how is not None and peer.greeted and not peer.broken and speaks_of_death(how, answer):
            self._count += 1
            peer.broken = self._count
        if peer.wanted and peer.call is None:
            self._call_again_later(peer)

    def _call_again_later(self, peer: _Peer) -> None:
        peer.again_at = time.monotonic() + min(AGAIN_MAX_S, AGAIN_FIRST_S * 2**peer.tries)
        peer.tries = min(peer.tries + 1, 10)
