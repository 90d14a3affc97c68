"""Connections between neighbours over real sockets: what breaks is told, what says goodbye or is silent is not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lmres.rendezvous.edge.link import Hello, read_hello
from lmres.rendezvous.edge.neighbours import MAX_ACCEPTED, Neighbours
from lmres.rendezvous.state import Member

RUN = "contract"
ROOT = Path(__file__).parents[2]


def member(name: str, port: int, *, incarnation: str = "", address: str = "127.0.0.1") -> Member:
    return Member(
        node_id=name,
        incarnation=incarnation or f"{name}.1",
        address=address,
        host=name,
        boot_id=name,
        pid=1,
        pid_start=1,
        failure_domain=name,
        pulse_port=port,
    )


def wait_until(what: str, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s:.0f} s for: {what}"
        time.sleep(0.005)


class Group:
    """Neighbours in this process. All know each other after ``meet``."""

    def __init__(self) -> None:
        self.nodes: dict[str, Neighbours] = {}
        self.members: dict[str, Member] = {}

    def add(self, name: str, *, address: str = "127.0.0.1") -> Neighbours:
        node = Neighbours(run=RUN, address=address, poke=lambda: None)
        self.nodes[name] = node
        self.members[name] = member(name, node.port, address=address)
        node.start()
        return node

    def meet(self) -> None:
        everybody = tuple(self.members.values())
        for name, node in self.nodes.items():
            node.follow(self.members[name], everybody)

    def linked(self, *pairs: str) -> None:
        """Each pair of names is connected, seen from both ends."""
        for one, other in [(p[0], p[1]) for p in pairs] + [(p[1], p[0]) for p in pairs]:
            if one in self.nodes:
                incarnation = self.members[other].incarnation
                node = self.nodes[one]
                wait_until(f"{one} is connected to {other}", lambda n=node, i=incarnation: i in n.connected)

    def broken(self, name: str) -> list[str]:
        return [b.incarnation for b in self.nodes[name].broken]


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    for node in made.nodes.values():
        node.close()
    assert not [t for t in threading.enumerate() if t.name == "lmres-neighbours"]


@pytest.fixture
def peer(group: Group) -> Iterator[subprocess.Popen[bytes]]:
    """Process ``p``, which knows the group's nodes ``a`` and ``b`` and is known to them."""
    for name in "ab":
        group.add(name)
    ports = json.dumps({n: node.port for n, node in group.nodes.items()})
    command = [sys.executable, "-m", "tests.contract.neighbours_peer", "p", ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        group.members["p"] = member("p", int(process.stdout.readline()))
        group.meet()
        group.linked("ab", "ap", "bp")
        yield process
        process.kill()


class Relay:
    """A place between a caller and a listener that can break what goes through it."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._pairs: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._serve()

    def _serve(self) -> None:
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to), 5)
            self._pairs += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(4096):
                other.sendall(data)
        except OSError:
            pass

    def break_all(self) -> None:
        pairs, self._pairs = self._pairs, []
        for sock in pairs:
            with contextlib.suppress(OSError):  # the other end was faster
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def shut(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.break_all()

    def open_again(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self._serve()


def test_a_killed_peer_is_told_of_by_all_that_were_connected(group: Group, peer: subprocess.Popen[bytes]) -> None:
    peer.kill()
    for name in "ab":
        wait_until(f"{name} has noticed", lambda n=name: group.broken(n) == ["p.1"])
    number = group.nodes["a"].broken[0].number
    group.meet()  # it is not yet declared lost: what was told stands
    time.sleep(1.0)
    assert [b.number for b in group.nodes["a"].broken] == [number], "told once"
    del group.members["p"]
    group.meet()
    wait_until("its loss is known, and no more told", lambda: not group.broken("a") and not group.broken("b"))
    group.linked("ab")


def test_a_stopped_peer_is_silent_and_not_told_of(group: Group, peer: subprocess.Popen[bytes]) -> None:
    os.kill(peer.pid, signal.SIGSTOP)
    time.sleep(1.0)
    assert not group.broken("a") and not group.broken("b")
    os.kill(peer.pid, signal.SIGCONT)


def test_who_leaves_says_goodbye(group: Group) -> None:
    for name in "abc":
        group.add(name)
    group.meet()
    group.linked("ab", "bc", "ca")
    group.nodes["b"].close()
    for name in "ac":
        wait_until(f"{name} has heard it", lambda n=name: "b.1" not in group.nodes[n].connected)
    time.sleep(0.5)  # they call again, and nobody listens
    assert not group.broken("a") and not group.broken("c")


def test_a_break_on_the_way_is_mended_and_not_told_of(group: Group) -> None:
    """``a`` calls ``b`` through a relay; the way breaks for a moment."""
    a, b = group.add("a"), group.add("b")
    relay = Relay(b.port)
    through = replace(group.members["b"], pulse_port=relay.port)
    a.follow(group.members["a"], (group.members["a"], through))
    b.follow(group.members["b"], (group.members["a"], replace(group.members["b"])))
    group.linked("ab")
    for _ in range(3):
        relay.break_all()
        time.sleep(0.05)
    group.linked("ab")
    assert not group.broken("a") and not group.broken("b")
    relay.shut()


def test_a_way_that_stays_broken_is_told_of_until_it_is_back(group: Group) -> None:
    """Only ``a`` keeps a connection here: the other one does not know it as a member."""
    a, b = group.add("a"), group.add("b")
    relay = Relay(b.port)
    through = replace(group.members["b"], pulse_port=relay.port)
    b.follow(group.members["b"], (group.members["b"],))
    a.follow(group.members["a"], (group.members["a"], through))
    group.linked("ab")
    relay.shut()
    wait_until("a has noticed", lambda: group.broken("a") == ["b.1"])
    first = a.broken[0].number
    relay.open_again()
    wait_until("a is connected again", lambda: not group.broken("a") and "b.1" in a.connected)
    relay.shut()
    wait_until("a has noticed again", lambda: group.broken("a") == ["b.1"])
    assert a.broken[0].number > first


def test_what_was_never_reached_proves_nothing(group: Group) -> None:
    a = group.add("a")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    me = group.members["a"]
    a.follow(me, (me, member("x", port), member("y", group.add("b").port, incarnation="another.1")))
    time.sleep(1.0)
    assert not a.broken and not a.connected


def test_another_incarnation_at_the_same_place_is_not_the_one_that_was_known(group: Group) -> None:
    a, b = group.add("a"), group.add("b")
    group.meet()
    group.linked("ab")
    # The same process registers anew: it says goodbye under the old name, and is met under the new one.
    group.members["b"] = replace(group.members["b"], incarnation="b.2")
    b.follow(group.members["b"], tuple(group.members.values()))
    wait_until("the old connections are closed", lambda: "b.1" not in a.connected)
    assert not a.broken
    a.follow(group.members["a"], tuple(group.members.values()))
    group.linked("ab")


def test_two_connections_each_in_a_larger_ring(group: Group) -> None:
    for name in "abcdefg":
        group.add(name)
    group.meet()
    group.linked("ab", "ac", "bc", "bd", "ga", "gb", "fg", "fa")
    wait_until("four connections each", lambda: all(len(n.connected) == 4 for n in group.nodes.values()))
    for name in "bc":
        group.nodes.pop(name).close()
        del group.members[name]
    group.meet()
    group.linked("ad", "ae", "ga", "gd")
    assert not any(n.broken for n in group.nodes.values())


def test_ipv6(group: Group) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on the loopback interface")
    for name in "ab":
        group.add(name, address="::1")
    group.meet()
    group.linked("ab")


def test_a_name_as_address(group: Group) -> None:
    for name in "ab":
        group.add(name, address="localhost")
    group.meet()
    group.linked("ab")


def test_without_a_port_an_agent_still_calls_others(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    a = group.add("a", address="192.0.2.77")  # not an address of this host
    assert a.port == 0
    assert sum("noticed by its lease only" in r.message for r in caplog.records) == 1
    group.add("b")
    group.meet()
    group.linked("ab")


def test_strangers_are_turned_away(group: Group) -> None:
    a, b = group.add("a"), group.add("b")
    group.meet()
    group.linked("ab")
    hello = Hello(run="another", node_id="b", incarnation="b.1", to="a.1").encode()
    for words in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 9000, b"[]\n", hello, b'{"lmres": 1}\n', b"bye\n"):
        with socket.create_connection(("127.0.0.1", a.port), 5) as stranger:
            stranger.settimeout(10)
            stranger.sendall(words)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(100) == b""
    with socket.create_connection(("127.0.0.1", a.port), 5) as caller:
        caller.settimeout(10)
        caller.sendall(Hello(run=RUN, node_id="b", incarnation="b.1", to="a.0").encode())
        answer = read_hello(caller.makefile("rb").readline().strip())
        assert answer is not None and answer.incarnation == "a.1"
        assert caller.recv(100) == b"", "who asks for another is told who is here, no more"
    crowd = [socket.create_connection(("127.0.0.1", a.port), 5) for _ in range(MAX_ACCEPTED + 10)]
    group.linked("ab")
    for sock in crowd:
        sock.close()
    assert not a.broken and not b.broken


def test_close_before_start_and_twice() -> None:
    node = Neighbours(run=RUN, address="127.0.0.1", poke=lambda: None)
    port = node.port
    node.close()
    node.close()
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_at_rest_nothing_wakes_it(group: Group) -> None:
    for name in "abc":
        group.add(name)
    group.meet()
    group.linked("ab", "bc", "ca")
    wait_until("nothing is due", lambda: all(n._until() is None for n in group.nodes.values()))
