"""The store's client alone: foreign services, deadlines while connecting, names and addresses, binding, starting."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmres.errors import ConfigError, StoreProtocolError, StoreRefused, StoreUnavailable
from lmres.ports import Range, Txn
from lmres.rendezvous.edge.stores import wire
from lmres.rendezvous.edge.stores.spawn import bind_endpoint, start_server
from lmres.rendezvous.edge.stores.tcp import TcpStore
from tests.contract.store_servers import LONG_MS, RunningServer, read_to_end, running_server

READ_ALL = Txn(success=(Range(prefix=""),))
LONG_S = LONG_MS / 1000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path) as running:
        yield running


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


# -- foreign services


def serve_once(answer: Callable[[socket.socket], None]) -> tuple[int, threading.Thread]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(LONG_S)

    def serve() -> None:
        with listener:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.settimeout(LONG_S)
                answer(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    return int(listener.getsockname()[1]), thread


def speak_http(sock: socket.socket) -> None:
    received = b""
    while b"\r\n\r\n" not in received:
        received += sock.recv(100)
    sock.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")


def echo(sock: socket.socket) -> None:
    while data := sock.recv(1000):
        sock.sendall(data)


def wrong_id(sock: socket.socket) -> None:
    sock.sendall(wire.PREAMBLE + wire.encode_frame({"op": "welcome", "store_id": "x"}))
    sock.sendall(wire.encode_frame({"id": 999, "ok": [True, 1, []]}))
    read_to_end(sock)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (speak_http, "answers b'HTTP/1.0 400 Bad Request"),
        (lambda sock: sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n"), "SSH-2.0"),
        (echo, "not a welcome"),
        (lambda sock: sock.sendall(wire.PREAMBLE.replace(b"001", b"007")), "speaks version 7"),
        (lambda sock: sock.sendall(wire.PREAMBLE + b"\xff" * 100), "a frame of 4294967295 bytes"),
        (lambda sock: sock.sendall(wire.PREAMBLE + struct.pack(">I", 2) + b"xx"), "not JSON"),
        (wrong_id, "not that of request"),
    ],
)
def test_a_foreign_service_is_named(answer: Callable[[socket.socket], None], words: str) -> None:
    port, thread = serve_once(answer)
    store = TcpStore(("127.0.0.1", port), client_id="a")
    with pytest.raises(StoreProtocolError, match=words) as caught:
        store.transact(READ_ALL, timeout_ms=LONG_MS)
    assert f"127.0.0.1 port {port}" in str(caught.value)
    store.close()
    thread.join(LONG_S)


def test_a_service_that_trickles_does_not_extend_the_timeout() -> None:
    def trickle(sock: socket.socket) -> None:
        sock.sendall(wire.PREAMBLE + struct.pack(">I", 1000))
        for _ in range(100):
            sock.sendall(b"x")
            time.sleep(0.05)

    port, thread = serve_once(trickle)
    store = TcpStore(("127.0.0.1", port), client_id="a")
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="no answer within 400 ms"):
        store.transact(READ_ALL, timeout_ms=400)
    assert time.monotonic() - started < 3
    store.close()
    thread.join(LONG_S)


def test_a_connection_closed_without_an_answer_is_unavailable() -> None:
    port, thread = serve_once(lambda sock: None)
    with pytest.raises(StoreUnavailable):
        TcpStore(("127.0.0.1", port), client_id="a").transact(READ_ALL, timeout_ms=LONG_MS)
    thread.join(LONG_S)


# -- connecting


def test_nobody_listens() -> None:
    started = time.monotonic()
    with pytest.raises(StoreRefused, match="nobody listens"):
        TcpStore(("127.0.0.1", free_port()), client_id="a").connect_probe(timeout_ms=LONG_MS)
    assert time.monotonic() - started < LONG_S / 2


@contextlib.contextmanager
def deaf_endpoint() -> Iterator[int]:
    """A port whose listen queue is full: the kernel drops what comes, so that a connect hangs."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        time.sleep(0.1)
        try:
            yield address[1]
        finally:
            for filler in fillers:
                filler.close()


def test_connecting_ends_in_time() -> None:
    with deaf_endpoint() as port:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no connection within 300 ms") as caught:
            TcpStore(("127.0.0.1", port), client_id="a").connect_probe(timeout_ms=300)
        assert not isinstance(caught.value, StoreRefused)
        assert time.monotonic() - started < 5


def test_close_ends_a_call_that_connects() -> None:
    with deaf_endpoint() as port:
        store = TcpStore(("127.0.0.1", port), client_id="a")
        timer = threading.Timer(0.3, store.close)
        timer.start()
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="closed"):
            store.connect_probe(timeout_ms=LONG_MS)
        assert time.monotonic() - started < LONG_S / 2
        timer.join()


def test_the_addresses_are_tried_in_order(server: RunningServer) -> None:
    store = TcpStore(("store.invalid", server.port), client_id="a", addresses=("::1", "127.0.0.3", "127.0.0.1"))
    store.connect_probe(timeout_ms=LONG_MS)
    assert store.local_address() == "127.0.0.1"
    store.close()


def test_a_name_that_is_unknown_or_slow_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnavailable, match=r"was not resolved|cannot be resolved"):
        TcpStore(("store.invalid", 1), client_id="a").connect_probe(timeout_ms=2_000)
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(LONG_S) and [])
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="was not resolved within 200 ms"):
        TcpStore(("slow.example", 1), client_id="a").connect_probe(timeout_ms=200)
    assert time.monotonic() - started < 5
    release.set()


def test_local_address_and_store_id(server: RunningServer) -> None:
    store = server.client()
    assert (store.local_address(), store.store_id) == (None, None)
    store.connect_probe(timeout_ms=LONG_MS)
    assert store.local_address() == "127.0.0.1"
    assert store.store_id
    assert store.clone().store_id == store.store_id


def test_ipv6_loopback(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    with running_server(tmp_path, host="::1") as server:
        store = server.client()
        store.connect_probe(timeout_ms=LONG_MS)
        assert store.local_address() == "::1"
        store.bye(timeout_ms=LONG_MS)
        assert server.ended_within(LONG_S)


# -- binding and starting


def test_a_port_is_bound_once() -> None:
    first = bind_endpoint(["127.0.0.1"], 0)
    assert first is not None
    with first:
        port = first.getsockname()[1]
        assert first.getsockname()[0] == "127.0.0.1"
        assert bind_endpoint(["127.0.0.1"], port) is None
        assert bind_endpoint(["10.1.2.3"], port) is None, "every interface includes loopback"


def test_loopback_is_served_only_if_all_addresses_are_loopback() -> None:
    both = bind_endpoint(["::1", "127.0.0.1"], 0)
    assert both is not None
    with both:
        assert both.getsockname()[0] == "127.0.0.1", "every process of the host makes the same choice"
    wide = bind_endpoint(["127.0.1.1", "192.0.2.1"], 0)
    assert wide is not None
    with wide, socket.create_connection(("127.0.0.1", wide.getsockname()[1]), timeout=LONG_S):
        assert wide.getsockname()[0] in ("::", "0.0.0.0")


def test_an_address_that_cannot_be_bound_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", denied)
    with pytest.raises(ConfigError, match=r"port 1 .*Permission denied; choose another port"):
        bind_endpoint(["127.0.0.1"], 1)


def test_a_log_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    listener = bind_endpoint(["127.0.0.1"], 0)
    assert listener is not None
    with pytest.raises(ConfigError, match="cannot start the store process"):
        start_server(listener, log_path=tmp_path / "none" / "log")
    assert listener.fileno() == -1


def test_the_frames_are_json_under_a_length() -> None:
    frame = wire.encode_frame({"id": 1, "op": "ping"})
    assert struct.unpack(">I", frame[:4]) == (len(frame) - 4,)
    assert json.loads(frame[4:]) == {"id": 1, "op": "ping"}
