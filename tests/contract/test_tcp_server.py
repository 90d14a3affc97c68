"""The store process: how long it lives, what a freeze costs, and what hostile peers cost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmres.errors import StoreLost, StoreRefused, StoreUnavailable
from lmres.ports import Get, Put, Range, Txn
from lmres.rendezvous.edge.stores import wire
from lmres.rendezvous.edge.stores.limits import TxnRejected
from lmres.rendezvous.edge.stores.tcp import TcpStore
from tests.contract.store_servers import LONG_MS, RunningServer, eventually, read_to_end, running_server

READ_ALL = Txn(success=(Range(prefix=""),))
HELLO = wire.PREAMBLE + wire.encode_frame({"op": "hello", "client_id": "raw", "role": "observer"})
LONG_S = LONG_MS / 1000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path) as running:
        yield running


def put(store: TcpStore, key: str, value: str = "v") -> int:
    return store.transact(Txn(success=(Put(key=key, value=value),)), timeout_ms=LONG_MS).revision


def raw(server: RunningServer, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection((server.host, server.port), timeout=LONG_S)
    sock.sendall(data)
    return sock


# -- lifetime


def test_ends_at_once_after_the_last_bye(server: RunningServer) -> None:
    first, second = server.client("a"), server.client("b")
    put(first, "x")
    put(second, "y")
    first.bye(timeout_ms=LONG_MS)
    assert not server.ended_within(0.6), "b is still there"
    second.bye(timeout_ms=LONG_MS)
    assert server.ended_within(4), "no linger (5 s) after a bye"
    assert server.process.returncode == 0
    assert "no agent left" in server.log()


def test_a_clone_keeps_its_agent_there(server: RunningServer) -> None:
    store = server.client("a")
    clone = store.clone()
    put(store, "x")
    put(clone, "y")
    store.bye(timeout_ms=LONG_MS)
    assert not server.ended_within(0.6)
    assert clone.transact(READ_ALL, timeout_ms=LONG_MS).revision == 2
    clone.close()
    assert server.ended_within(4), "the bye counts for the client id"


def test_lingers_after_an_unclean_close_and_takes_the_agent_back(tmp_path: Path) -> None:
    with running_server(tmp_path, linger_ms=1_500) as server:
        store = server.client("a")
        revision = put(store, "x")
        store.close()
        assert not server.ended_within(0.7)
        again = server.client("a")
        assert again.transact(READ_ALL, timeout_ms=LONG_MS).revision == revision
        assert not server.ended_within(2.5), "the agent is back"
        again.close()
        assert server.ended_within(LONG_S)


def test_observers_do_not_keep_it_alive(tmp_path: Path) -> None:
    with running_server(tmp_path, first_agent_ms=800) as server:
        observer = server.client("cli", role="observer")
        assert observer.transact(READ_ALL, timeout_ms=LONG_MS).revision == 0
        assert server.ended_within(LONG_S), "no agent ever came"
        with pytest.raises(StoreUnavailable):
            observer.transact(READ_ALL, timeout_ms=LONG_MS)
        with pytest.raises(StoreRefused):
            observer.transact(READ_ALL, timeout_ms=LONG_MS)


def test_an_observers_bye_means_nothing(server: RunningServer) -> None:
    store, observer = server.client("a"), server.client("a", role="observer")
    put(store, "x")
    observer.bye(timeout_ms=LONG_MS)
    assert not server.ended_within(0.5)
    put(store, "y")


def test_signals_to_end_are_ignored(server: RunningServer) -> None:
    store = server.client()
    put(store, "x")
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(server.process.pid, signum)
    assert not server.ended_within(0.5)
    put(store, "y")


_PARENT = """
import os, sys, time
from pathlib import Path
from lmres.rendezvous.edge.stores.spawn import bind_endpoint, start_server
listener = bind_endpoint(["127.0.0.1"], 0)
port = listener.getsockname()[1]
process = start_server(listener, log_path=Path(sys.argv[1]))
print(port, process.pid, flush=True)
time.sleep(60)
"""


def test_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert parent.stdout is not None
        port, pid = map(int, parent.stdout.readline().split())
        store = TcpStore(("127.0.0.1", port), client_id="other")
        put(store, "x")
        assert os.getsid(pid) == pid
        os.killpg(parent.pid, signal.SIGINT)
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait(LONG_S)
        put(store, "y")
        store.bye(timeout_ms=LONG_MS)
        eventually(lambda: _gone(pid))
    finally:
        parent.kill()
        parent.communicate(timeout=LONG_S)


def _gone(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True


def test_a_killed_client_process_counts_as_an_unclean_close(tmp_path: Path) -> None:
    code = (
        "import sys, time; from lmres.rendezvous.edge.stores.tcp import TcpStore; "
        "TcpStore(('127.0.0.1', int(sys.argv[1])), client_id='c').connect_probe(timeout_ms=20000); "
        "s = TcpStore(('127.0.0.1', int(sys.argv[1])), client_id='c'); s.connect_probe(timeout_ms=20000); "
        "print('up', flush=True); time.sleep(60)"
    )
    with running_server(tmp_path, linger_ms=500) as server:
        client = subprocess.Popen([sys.executable, "-c", code, str(server.port)], stdout=subprocess.PIPE, text=True)
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "up\n"
            assert not server.ended_within(1.5)
        finally:
            client.kill()
            client.communicate(timeout=LONG_S)
        assert server.ended_within(LONG_S)


def test_nothing_of_torch_is_in_the_server(server: RunningServer) -> None:
    put(server.client(), "x")
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "torch" not in maps
    inherited = [str(entry.readlink()) for entry in Path(f"/proc/{server.process.pid}/fd").iterdir()]
    assert sum(target.startswith("socket:") for target in inherited) <= 5, inherited
    assert not [target for target in inherited if "store-" not in target and target.startswith("/tmp")]


def test_a_restarted_server_is_a_lost_store_not_an_empty_one(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        store = server.client()
        clone = store.clone()
        put(store, "x")
        put(clone, "y")
        fresh = store.clone()
        server.process.kill()
        server.process.wait()
        with pytest.raises(StoreUnavailable):
            store.transact(READ_ALL, timeout_ms=LONG_MS)
        with running_server(tmp_path, port=server.port) as second:
            for client in (store, fresh):
                with pytest.raises(StoreLost, match="another process than before"):
                    client.transact(READ_ALL, timeout_ms=LONG_MS)
            newcomer = second.client("new")
            assert newcomer.transact(READ_ALL, timeout_ms=LONG_MS).revision == 0
            newcomer.close()


# -- a frozen server


def test_a_frozen_server_costs_the_timeout_and_then_goes_on(tmp_path: Path) -> None:
    with running_server(tmp_path, linger_ms=1_000) as server:
        store = server.client("a")
        idle = server.client("idle")
        waiting = server.client("waiting")
        revision = put(store, "x")
        idle.connect_probe(timeout_ms=LONG_MS)
        woken: list[bool] = []
        waiter = threading.Thread(
            target=lambda: woken.append(waiting.wait(("y",), after_revision=revision, timeout_ms=LONG_MS))
        )
        waiter.start()
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            for attempt in (store, server.client("b")):
                started = time.monotonic()
                with pytest.raises(StoreUnavailable, match="within 400 ms"):
                    attempt.transact(READ_ALL, timeout_ms=400)
                assert 0.3 < time.monotonic() - started < 5
            time.sleep(2.0)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        put(store, "y")
        put(idle, "z")
        waiter.join(LONG_S)
        assert woken == [True]
        waiting.close()
        idle.close()
        store.bye(timeout_ms=LONG_MS)


def test_when_all_left_while_it_was_frozen_the_linger_starts_at_the_wake(tmp_path: Path) -> None:
    with running_server(tmp_path, linger_ms=2_000) as server:
        store = server.client("a")
        revision = put(store, "x")
        os.kill(server.process.pid, signal.SIGSTOP)
        store.close()
        time.sleep(3.0)  # longer than the linger
        os.kill(server.process.pid, signal.SIGCONT)
        assert not server.ended_within(0.5)
        again = server.client("a")
        assert again.transact(READ_ALL, timeout_ms=LONG_MS).revision == revision
        again.bye(timeout_ms=LONG_MS)
        assert server.ended_within(LONG_S)


def test_frozen_in_the_middle_of_the_linger(tmp_path: Path) -> None:
    with running_server(tmp_path, linger_ms=2_000) as server:
        store = server.client("a")
        revision = put(store, "x")
        store.close()
        time.sleep(0.5)
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        reconnecting = server.client("a")
        results: list[int] = []
        thread = threading.Thread(
            target=lambda: results.append(reconnecting.transact(READ_ALL, timeout_ms=LONG_MS).revision)
        )
        thread.start()
        time.sleep(0.2)
        os.kill(server.process.pid, signal.SIGCONT)
        thread.join(LONG_S)
        assert results == [revision], "who came during the freeze is served"
        assert not server.ended_within(2.5)
        reconnecting.bye(timeout_ms=LONG_MS)


def test_a_late_reply_is_never_taken_for_the_next_one(server: RunningServer) -> None:
    store = server.client()
    put(store, "x")
    os.kill(server.process.pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable):
        store.transact(Txn(success=(Put(key="late", value=""),)), timeout_ms=100)
    os.kill(server.process.pid, signal.SIGCONT)
    for index in range(20):
        ((entry,),) = store.transact(
            Txn(success=(Put(key="k", value=str(index)), Get(key="k"))), timeout_ms=LONG_MS
        ).reads
        assert entry.value == str(index)


# -- hostile peers


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * 100,
        os.urandom(5000),
        wire.PREAMBLE + os.urandom(4) + b"garbage" * 100,
        wire.PREAMBLE + struct.pack(">I", 5000) + b"x" * 5000,
        wire.PREAMBLE + wire.encode_frame({"op": "txn"}),
        wire.PREAMBLE + wire.encode_frame({"op": "hello", "client_id": "", "role": "agent"}),
        wire.PREAMBLE + wire.encode_frame({"op": "hello", "client_id": "a", "role": "king"}),
        HELLO + struct.pack(">I", 0xFFFFFFFF),
        HELLO + struct.pack(">I", wire.MAX_FRAME_BYTES + 1),
        HELLO + struct.pack(">I", 3) + b"\xff\xfe\xfd",
        HELLO + struct.pack(">I", 100_000) + b"[" * 100_000,
        HELLO + wire.encode_frame({"op": "txn", "id": 1, "txn": [[], [["steal", "x"]], []]}),
        HELLO + wire.encode_frame({"op": "txn", "id": 1, "txn": [[], [["put", "x", 1]], []]}),
        HELLO + wire.encode_frame({"op": "txn", "id": True, "txn": [[], [], []]}),
        HELLO + wire.encode_frame({"op": "wait", "id": 1, "prefixes": "x", "after": 0, "timeout_ms": 1}),
        HELLO + wire.encode_frame({"op": "wait", "id": 1, "prefixes": ["x"], "after": 0, "timeout_ms": 10**30}),
        HELLO + wire.encode_frame({"op": "wait", "id": 1, "prefixes": ["absent"], "after": 0, "timeout_ms": 10**5}) * 2,
    ],
)
def test_who_is_not_understood_is_dropped_with_one_short_line(server: RunningServer, data: bytes) -> None:
    store = server.client()
    put(store, "x")
    with raw(server) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
        read_to_end(sock)
    assert put(store, "x") == 2
    lines = [line for line in server.log().splitlines() if "dropped" in line]
    assert len(lines) == 1
    assert len(lines[0]) < 400


def test_half_a_frame_waits_and_costs_nobody_else(server: RunningServer) -> None:
    frame = HELLO + wire.encode_frame({"op": "ping", "id": 5})
    store = server.client()
    with raw(server, frame[:-3]) as sock:
        assert put(store, "x") == 1
        sock.sendall(frame[-3:])
        sock.shutdown(socket.SHUT_WR)
        assert read_to_end(sock).endswith(b'{"id":5,"ok":true}')
    with raw(server, frame[:-3]):
        pass
    assert put(store, "x") == 2
    assert "dropped" not in server.log()


def test_who_says_nothing_is_dropped(server: RunningServer) -> None:
    store = server.client()
    put(store, "x")
    with raw(server, wire.PREAMBLE[:5]) as sock:
        assert read_to_end(sock) == b""
    assert "no hello" in server.log()
    assert put(store, "x") == 2


def test_a_client_that_does_not_read_is_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    with running_server(tmp_path, stall_ms=700) as server:
        store = server.client()
        for index in range(12):
            put(store, f"big/{index}", "x" * (1 << 20))
        read = wire.encode_frame({"op": "txn", "id": 1, "txn": [[], [["range", "big/", 0]], []]})
        with raw(server, HELLO + read * 50) as sock:
            eventually(lambda: "left unread" in server.log())
            assert len(read_to_end(sock)) < 40 << 20, "no more than a reply was held for it"
        assert put(store, "small") == 13
        resident = Path(f"/proc/{server.process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
        assert int(resident) < 200_000, "kB"


def test_a_slow_reader_that_reads_is_served(tmp_path: Path) -> None:
    with running_server(tmp_path, stall_ms=1_000) as server:
        store = server.client()
        for index in range(8):
            put(store, f"big/{index}", "x" * (1 << 20))
        read = wire.encode_frame({"op": "txn", "id": 1, "txn": [[], [["range", "big/", 0]], []]})
        received = 0
        with raw(server, HELLO + read) as sock:
            while received < 8 << 20:
                received += len(sock.recv(1 << 19))
                time.sleep(0.05)
        assert "left unread" not in server.log()


def test_a_reply_that_is_too_large_is_an_error_of_that_request_alone(server: RunningServer) -> None:
    store = server.client()
    for index in range(33):
        put(store, f"big/{index:02}", "x" * (1 << 20))
    with pytest.raises(TxnRejected, match="read less at once"):
        store.transact(READ_ALL, timeout_ms=LONG_MS)
    (entries,) = store.transact(Txn(success=(Range(prefix="big/0"),)), timeout_ms=LONG_MS).reads
    assert len(entries) == 10


def test_the_log_is_bounded(server: RunningServer) -> None:
    store = server.client()
    put(store, "x")
    with server.log_path.open("ab") as log:
        log.write(b"y" * (2 << 20))
    with raw(server, b"garbage") as sock:
        read_to_end(sock)
    eventually(lambda: server.log_path.stat().st_size < 1000)
    assert "garbage" in server.log()


def test_a_client_of_another_version_is_told_ours(server: RunningServer) -> None:
    with raw(server, wire.PREAMBLE.replace(b"001", b"002")) as sock:
        assert read_to_end(sock) == wire.PREAMBLE
