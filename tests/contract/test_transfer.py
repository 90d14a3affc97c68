"""Transfers: a part comes whole and right, or it does not count; whatever the network and the peer do."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import xxhash

from lmres.errors import DigestMismatch, PartMissing, TransferError, VaultError
from lmres.gemini.edge import transfer_server
from lmres.gemini.edge import transfer_wire as wire
from lmres.gemini.edge.transfer import Puller, PullLimits, ServerLimits, pull
from tests.contract.transfer_kit import (
    BOUND_S,
    RUN,
    Liar,
    Proxy,
    Store,
    guards_hold,
    memory,
    next_request,
    noise,
    open_files,
    reply,
    serving,
    until,
)

MB = 1 << 20
LENGTH = 24 * MB + 5
QUICK = PullLimits(connect_s=2.0, idle_s=0.3, attempts=3)
NO_PART = "0" * 32


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.close()


def from_liar(liar: Liar, digest: str, length: int, **options: object) -> None:
    options = {"run_id": RUN, "limits": QUICK, "timeout_s": BOUND_S, **options}
    pull("127.0.0.1", liar.port, digest, length, memory(length), **options)  # type: ignore[arg-type]


# -- what comes is what was asked for


@pytest.mark.parametrize("streams", [0, 1, 3])
@pytest.mark.parametrize("length", [0, 1, 7, 4097, 2 * MB - 1, 2 * MB, 2 * MB + 1, 16 * MB + 3])
def test_any_size_comes_whole(store: Store, length: int, streams: int) -> None:
    data = noise(length)
    digest = store.add(data)
    into = memory(length)
    with serving(store) as server:
        done = pull(server.address, server.port, digest, length, into, run_id=RUN, streams=streams)
        assert into[:length] == data
        assert guards_hold(into)
        assert (done.digest, done.length, done.received, done.reconnects) == (digest, length, length, 0)
        assert done.state.hexdigest() == digest


def test_a_large_part_over_several_streams(store: Store) -> None:
    data = noise(100_000_000)
    digest = store.add(data)
    into = memory(len(data))
    with serving(store) as server:
        pull(server.address, server.port, digest, len(data), into, run_id=RUN, streams=4)
    assert into[: len(data)] == data


def test_twenty_rounds_of_two_pulls_at_once_over_kept_connections(store: Store) -> None:
    first, second = noise(LENGTH, 1), noise(LENGTH // 3, 2)
    wanted = [(store.add(data), data, memory(len(data))) for data in (first, second)]
    with serving(store) as server, Puller(server.address, server.port, run_id=RUN) as puller:
        for round_ in range(20):
            failures: list[BaseException] = []

            def one(digest: str, data: bytes, into: memoryview) -> None:
                try:
                    into[: len(data)] = bytes(len(data))
                    puller.pull(digest, len(data), into, streams=2)
                    assert into[: len(data)] == data
                except BaseException as error:
                    failures.append(error)  # noqa: B023

            threads = [threading.Thread(target=one, args=each) for each in wanted]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(BOUND_S)
            assert not failures, round_
        assert server.connections <= 4
        until("all sources are released", store.all_released)


def test_a_source_stays_held_until_its_reader_has_read(store: Store) -> None:
    digest = store.add(noise(64 << 10))
    with serving(store) as server:
        sock = socket.create_connection(("127.0.0.1", server.port))
        wire.limit_waits(sock, read_s=BOUND_S, write_s=BOUND_S)
        sock.sendall(wire.MAGIC + wire.pack_frame(wire.hello(run_id=RUN, node_id="")))
        assert wire.read_frame(sock)["refused"] == ""
        ask = wire.Request(op=wire.Op.GET, replies_read=0, digest=NO_PART, offset=0, length=64 << 10)
        sock.sendall(wire.pack_request(ask))
        wire.read_exactly(sock, wire.unpack_reply(wire.read_exactly(sock, wire.REPLY_BYTES)).length)
        ask = wire.Request(op=wire.Op.GET, replies_read=1, digest=digest, offset=0, length=64 << 10)
        sock.sendall(wire.pack_request(ask))
        wire.read_exactly(sock, wire.REPLY_BYTES + (64 << 10))
        sock.sendall(wire.pack_request(ask))  # says that none was read yet
        wire.read_exactly(sock, wire.REPLY_BYTES + (64 << 10))
        assert (store.given, store.released) == (2, 0)
        sock.sendall(wire.pack_request(wire.Request(op=wire.Op.READ_SO_FAR, replies_read=2)))
        until("one is released", lambda: store.released == 1)
        sock.close()
        until("a reader that is gone holds nothing", store.all_released)


# -- the log grows


def test_the_tail_of_a_log_goes_on_from_what_is_there(store: Store) -> None:
    log = noise(5 * MB)
    into = memory(len(log))
    state: xxhash.xxh3_128 | None = None
    have = 0
    with serving(store) as server, Puller("127.0.0.1", server.port, run_id=RUN) as puller:
        for end in (0, 10, 10, 11, 3 * MB, 5 * MB):
            digest = store.add(log[:end])
            done = puller.pull_tail(digest, end, into, have=have, state=state)
            assert done.received == end - have
            assert into[:end] == log[:end]
            have, state = end, done.state
        # Without the state the prefix is hashed again.
        assert puller.pull_tail(store.add(log[: 2 * MB]), 2 * MB, into, have=MB, state=None).received == MB
        assert server.connections == 1


def test_a_tail_on_another_prefix_is_refused(store: Store) -> None:
    log = noise(MB)
    into = memory(MB)
    into[:100] = noise(100, 7)
    before = xxhash.xxh3_128(into[:100])
    with serving(store) as server, Puller("127.0.0.1", server.port, run_id=RUN) as puller:
        with pytest.raises(DigestMismatch, match="from 100 on"):
            puller.pull_tail(store.add(log), MB, into, have=100, state=before)
        assert before.hexdigest() == xxhash.xxh3_128_hexdigest(bytes(into[:100]))  # unchanged
        puller.pull(store.add(log), MB, into)
        assert into[:MB] == log


# -- the network fails


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("streams", [1, 3])
def test_a_cut_connection_resumes_where_it_stopped(store: Store, streams: int, reset: bool) -> None:
    data = noise(LENGTH)
    digest = store.add(data)
    budgets = itertools.chain([5 * MB + 17, 3 * MB, 100, 2 * MB + 1], itertools.repeat(1 << 40))
    into = memory(LENGTH)
    with serving(store) as server, Proxy(server.port, budgets, reset=reset) as proxy:
        done = pull("127.0.0.1", proxy.port, digest, LENGTH, into, run_id=RUN, streams=streams)
        assert into[:LENGTH] == data and guards_hold(into)
        assert done.reconnects == 4
        # Only what had come and was not read yet is sent again.
        assert proxy.forwarded < LENGTH * 1.8


def test_what_came_before_a_cut_is_not_asked_for_again(store: Store) -> None:
    data = noise(2 * MB)
    digest = store.add(data)
    into = memory(2 * MB)
    budgets = iter([MB, MB // 2, 300_000, 1 << 40])
    with serving(store) as server, Proxy(server.port, budgets) as proxy:
        done = pull("127.0.0.1", proxy.port, digest, 2 * MB, into, run_id=RUN)
        assert into[: 2 * MB] == data and done.reconnects == 3
        assert proxy.forwarded < 2 * MB + 4 * 200


@pytest.mark.parametrize("seed", range(20))
def test_cuts_anywhere(store: Store, seed: int) -> None:
    chance = random.Random(seed)
    length = chance.randrange(1, 9 * MB)
    data = noise(length, seed)
    digest = store.add(data)
    budgets = itertools.chain(
        (chance.choice([chance.randrange(1, 60), chance.randrange(60, 3 * MB)]) for _ in range(8)),
        itertools.repeat(1 << 40),
    )
    into = memory(length)
    limits = PullLimits(attempts=9)
    with serving(store) as server, Proxy(server.port, budgets, reset=chance.random() < 0.5) as proxy:
        streams = chance.randrange(1, 4)
        pull("127.0.0.1", proxy.port, digest, length, into, run_id=RUN, streams=streams, limits=limits)
        assert into[:length] == data and guards_hold(into)


def test_a_peer_that_always_breaks_is_given_up(store: Store) -> None:
    digest = store.add(noise(LENGTH))
    with serving(store) as server, Proxy(server.port, itertools.repeat(60)) as proxy:
        with pytest.raises(TransferError, match=rf"part {digest} does not come: 127.0.0.1:{proxy.port} .* 3 times"):
            pull("127.0.0.1", proxy.port, digest, LENGTH, memory(LENGTH), run_id=RUN, limits=QUICK)
        assert proxy.connections <= 8


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(TransferError, match="could not be connected"):
        pull("127.0.0.1", port, NO_PART, 10, memory(10), run_id=RUN, limits=QUICK)


def _serve_alone(told: Connection) -> None:
    store = Store()
    digest = store.add(noise(LENGTH))
    with serving(store) as server:
        told.send((server.port, digest))
        threading.Event().wait()


def test_a_killed_server_ends_the_pull_in_bounded_time() -> None:
    near, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve_alone, args=(far,), daemon=True)
    process.start()
    try:
        port, digest = near.recv()
        with Proxy(port, itertools.repeat(1 << 40), pace_s=0.01) as proxy:
            killer = threading.Thread(
                target=lambda: (until("bytes flow", lambda: proxy.forwarded > 2 * MB), process.kill())
            )
            killer.start()
            began = time.monotonic()
            with pytest.raises(TransferError, match=r"of 25165829 bytes are there"):
                pull("127.0.0.1", proxy.port, digest, LENGTH, memory(LENGTH), run_id=RUN, streams=2, limits=QUICK)
            assert time.monotonic() - began < BOUND_S
            killer.join()
    finally:
        process.kill()
        process.join()


def test_a_server_that_comes_back_is_used_again(store: Store) -> None:
    data = noise(MB)
    digest = store.add(data)
    into = memory(MB)
    with serving(store) as server:
        puller = Puller("127.0.0.1", server.port, run_id=RUN)
        puller.pull(digest, MB, into)
        port = server.port
    into[:MB] = bytes(MB)
    with serving(store, port=port), puller:
        puller.pull(digest, MB, into)
        assert into[:MB] == data


def test_kept_connections_that_have_ended_cost_no_attempt(store: Store) -> None:
    data = noise(20 * MB)
    digest = store.add(data)
    into = memory(len(data))
    limits = ServerLimits(idle_s=0.3)
    puller_limits = PullLimits(attempts=1)
    with (
        serving(store, limits=limits) as server,
        Puller("127.0.0.1", server.port, run_id=RUN, limits=puller_limits) as puller,
    ):
        for _ in range(3):
            puller.pull(digest, len(data), into, streams=4)
            until("idle connections end", lambda: server.connections == 0)


# -- the peer is slow or wrong


def test_a_silent_server_is_given_up() -> None:
    def silent(sock: socket.socket) -> None:
        asked = next_request(sock)
        reply(sock, 100, asked.length)
        sock.sendall(b"x" * (asked.length // 2))
        sock.settimeout(BOUND_S)
        sock.recv(1)

    with Liar(silent) as liar:
        began = time.monotonic()
        with pytest.raises(TransferError, match="sent nothing for too long"):
            from_liar(liar, NO_PART, 100)
        assert time.monotonic() - began < BOUND_S / 2


def test_a_trickling_server_is_given_up_in_the_time_given() -> None:
    def trickle(sock: socket.socket) -> None:
        next_request(sock)
        reply(sock, MB, MB)
        while True:
            sock.sendall(b"x")
            time.sleep(0.02)

    with Liar(trickle) as liar:
        began = time.monotonic()
        with pytest.raises(TransferError, match=r"did not come .* in 1 s"):
            from_liar(liar, NO_PART, MB, timeout_s=1.0)
        assert time.monotonic() - began < 5


def test_a_server_that_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        limits = PullLimits(connect_s=0.3, attempts=2)
        with pytest.raises(TransferError, match="sent nothing for too long, 2 times"):
            pull("127.0.0.1", listener.getsockname()[1], NO_PART, 1, memory(1), run_id=RUN, limits=limits)


@pytest.mark.parametrize(("part_length", "length"), [(99, 99), (101, 101), (100, 99), (100, 101), (100, 1 << 60)])
def test_a_server_that_lies_about_the_length_is_not_believed(part_length: int, length: int) -> None:
    def lie(sock: socket.socket) -> None:
        next_request(sock)
        reply(sock, part_length, length)
        sock.sendall(b"x" * 2000)

    with Liar(lie) as liar, pytest.raises(TransferError, match=r"100 of 100 are expected"):
        from_liar(liar, NO_PART, 100)
    assert liar.connections == 1


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100, b"\xff" * 64, b"\0" * 3])
def test_a_server_that_speaks_something_else(garbage: bytes) -> None:
    with Liar(lambda sock: sock.sendall(garbage)) as liar, pytest.raises(TransferError):
        from_liar(liar, NO_PART, 100)


@pytest.mark.parametrize("streams", [1, 3])
def test_a_flipped_byte_is_found(store: Store, streams: int) -> None:
    data = bytearray(noise(LENGTH))
    digest = xxhash.xxh3_128_hexdigest(bytes(data))
    data[LENGTH // 2] ^= 4
    store.add(bytes(data), digest=digest)
    found = xxhash.xxh3_128_hexdigest(bytes(data))
    with serving(store) as server, pytest.raises(DigestMismatch) as raised:
        pull(server.address, server.port, digest, LENGTH, memory(LENGTH), run_id=RUN, streams=streams)
    for word in (f"127.0.0.1:{server.port}", digest, found):
        assert word in str(raised.value)
    assert isinstance(raised.value, TransferError) and isinstance(raised.value, VaultError)


def test_a_part_that_is_empty_by_length_but_not_by_digest(store: Store) -> None:
    with serving(store) as server, pytest.raises(DigestMismatch):
        pull(server.address, server.port, NO_PART, 0, memory(0), run_id=RUN)


def test_a_missing_part_is_told_at_once(store: Store) -> None:
    digest = store.add(noise(MB))
    with serving(store) as server, Puller(server.address, server.port, run_id=RUN) as puller:
        with pytest.raises(PartMissing, match=NO_PART):
            puller.pull(NO_PART, LENGTH, memory(LENGTH), streams=3)
        puller.pull(digest, MB, memory(MB))


def test_a_part_of_another_length_is_told_at_once(store: Store) -> None:
    digest = store.add(noise(MB))
    with serving(store) as server, pytest.raises(TransferError, match="has 1048576 bytes, none up to 1048577"):
        pull(server.address, server.port, digest, MB + 1, memory(MB + 1), run_id=RUN)


def test_a_source_shorter_than_it_claims_is_not_served(store: Store) -> None:
    digest = store.add(noise(MB))
    fd, offset, length = store.parts[digest]
    os.ftruncate(fd, offset + length - 1)
    with serving(store) as server:
        with pytest.raises(TransferError, match="its file at"):
            pull(server.address, server.port, digest, MB, memory(MB), run_id=RUN)
        assert server.problems  # type: ignore[attr-defined]


def test_a_lookup_that_raises_costs_one_answer(store: Store) -> None:
    digest = store.add(noise(10))
    broken = [True]

    class Broken(Store):
        def lookup(self, digest: str):  # type: ignore[no-untyped-def]
            if broken:
                broken.pop()
                raise KeyError(digest)
            return store.lookup(digest)

    with serving(Broken()) as server, Puller("127.0.0.1", server.port, run_id=RUN) as puller:
        with pytest.raises(PartMissing):
            puller.pull(digest, 10, memory(10))
        puller.pull(digest, 10, memory(10))
        assert "KeyError" in server.problems[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_without_sendfile_bytes_are_copied(store: Store, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, "not here")

    monkeypatch.setattr(transfer_server.os, "sendfile", refuse)
    data = noise(LENGTH)
    into = memory(LENGTH)
    with serving(store) as server:
        pull(server.address, server.port, store.add(data), LENGTH, into, run_id=RUN, streams=2)
    assert into[:LENGTH] == data


# -- who may talk to whom


def test_another_run_is_refused_by_name(store: Store) -> None:
    with serving(store) as server, pytest.raises(TransferError, match=r"belongs to the run 'run/1', not to 'other'"):
        pull(server.address, server.port, NO_PART, 1, memory(1), run_id="other")


def test_another_version_is_refused_with_both_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(store) as server:
        said = {**wire.hello(run_id=RUN, node_id=""), "version": 99}
        monkeypatch.setattr(wire, "hello", lambda **_: said)
        with pytest.raises(TransferError, match=r"version 1 here, not 99"):
            pull(server.address, server.port, NO_PART, 1, memory(1), run_id=RUN)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        wire.MAGIC + b"\xff\xff\xff\xff",
        wire.MAGIC + b"\0\0\0\4nope",
        wire.MAGIC + b"\0\0\0\2[]",
        wire.MAGIC + b"\0\0\xff\0" + b"[" * 0xFF00,
        b"",
    ],
)
def test_strangers_cost_only_their_connection(store: Store, words: bytes) -> None:
    digest = store.add(b"abc")
    with serving(store, limits=ServerLimits(hello_s=0.3)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.settimeout(BOUND_S)
            sock.sendall(words)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(100) == b""
        pull(server.address, server.port, digest, 3, memory(3), run_id=RUN)
        until("strangers are gone", lambda: server.connections == 0)


@pytest.mark.parametrize("tail", [b"\xff" * 48, b"\x01" + b"\0" * 20])
def test_requests_that_make_no_sense(store: Store, tail: bytes) -> None:
    with serving(store, limits=ServerLimits(idle_s=0.3)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.settimeout(BOUND_S)
            sock.sendall(wire.MAGIC + wire.pack_frame(wire.hello(run_id=RUN, node_id="")) + tail)
            while sock.recv(4096):
                pass
        until("it is gone", lambda: server.connections == 0)


def test_a_puller_that_asks_and_does_not_read_is_dropped(store: Store) -> None:
    digest = store.add(noise(LENGTH))
    limits = ServerLimits(stall_s=0.3)
    with serving(store, limits=limits) as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(wire.MAGIC + wire.pack_frame(wire.hello(run_id=RUN, node_id="")))
        ask = wire.Request(op=wire.Op.GET, replies_read=0, digest=digest, offset=0, length=LENGTH)
        sock.sendall(wire.pack_request(ask) * 4)
        until("it is held", lambda: store.given == 1)
        until("it is dropped", lambda: server.connections == 0)
        assert store.all_released()


def test_more_streams_than_connections_get_along(store: Store) -> None:
    data = noise(LENGTH)
    digest = store.add(data)
    into = memory(LENGTH)
    with serving(store, limits=ServerLimits(connections=2)) as server:
        pull(server.address, server.port, digest, LENGTH, into, run_id=RUN, streams=6)
        assert into[:LENGTH] == data


def test_a_busy_server_is_asked_again_and_then_given_up(store: Store) -> None:
    digest = store.add(b"abc")
    with serving(store, limits=ServerLimits(connections=1)) as server:
        holder = Puller("127.0.0.1", server.port, run_id=RUN)
        holder.pull(digest, 3, memory(3))
        with pytest.raises(TransferError, match="all 1 connections are taken, 2 times"):
            pull("127.0.0.1", server.port, digest, 3, memory(3), run_id=RUN, limits=PullLimits(attempts=2))
        threading.Timer(0.3, holder.close).start()
        pull("127.0.0.1", server.port, digest, 3, memory(3), run_id=RUN, limits=PullLimits(attempts=50))


# -- the end


def parts_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("parts-")]


def test_closing_the_server_ends_everything_in_bounded_time(store: Store) -> None:
    digest = store.add(noise(LENGTH))
    with serving(store) as server:
        # Three that never read, and one that says nothing.
        socks = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
        ask = wire.Request(op=wire.Op.GET, replies_read=0, digest=digest, offset=0, length=LENGTH)
        for sock in socks[:3]:
            sock.sendall(wire.MAGIC + wire.pack_frame(wire.hello(run_id=RUN, node_id="")) + wire.pack_request(ask))
        until("all are served", lambda: store.given == 3 and server.connections == 4)
        began = time.monotonic()
        assert server.close()
        assert time.monotonic() - began < 4
        for sock in socks:
            sock.close()
        assert not parts_threads()
        assert server.close()  # again
    with pytest.raises(TransferError):
        pull("127.0.0.1", server.port, digest, LENGTH, memory(LENGTH), run_id=RUN, limits=QUICK)


def test_closing_the_puller_ends_its_pulls(store: Store) -> None:
    digest = store.add(noise(LENGTH))
    with serving(store) as server, Proxy(server.port, itertools.repeat(1 << 40), pace_s=0.02) as proxy:
        puller = Puller("127.0.0.1", proxy.port, run_id=RUN)
        closer = threading.Thread(target=lambda: (until("bytes flow", lambda: proxy.forwarded > MB), puller.close()))
        closer.start()
        began = time.monotonic()
        with pytest.raises(TransferError, match="was ended"):
            puller.pull(digest, LENGTH, memory(LENGTH), streams=3)
        assert time.monotonic() - began < BOUND_S
        closer.join()
        with pytest.raises(TransferError, match="has ended"):
            puller.pull(digest, LENGTH, memory(LENGTH))


def test_a_failed_pull_holds_neither_memory_nor_descriptors(store: Store) -> None:
    digest = store.add(noise(LENGTH))
    kept: list[BaseException] = []
    with serving(store) as server, Proxy(server.port, itertools.repeat(1000)) as proxy:
        before = open_files()
        view = memory(LENGTH)
        try:
            pull("127.0.0.1", proxy.port, digest, LENGTH, view, run_id=RUN, streams=2, limits=QUICK)
        except TransferError as error:
            kept.append(error)
        underlying = view.obj
        view.release()
        underlying.close()  # raises where a view of it is still held
        assert kept
        proxy.close()
        until("descriptors are back", lambda: (gc.collect(), open_files() <= before)[1])


def test_memory_that_does_not_fit_is_refused() -> None:
    puller = Puller("127.0.0.1", 1, run_id=RUN)
    for into, length in ((memoryview(bytes(10)), 10), (memoryview(bytearray(9)), 10), (memoryview(bytearray(9)), -1)):
        with pytest.raises(TransferError, match="can not be pulled into"):
            puller.pull(NO_PART, length, into)
    for digest in ("", "0" * 31, "0" * 31 + "G", "../" + "0" * 29, "A" * 32):
        with pytest.raises(TransferError, match="is not a digest"):
            puller.pull(digest, 1, memory(1))


def test_an_address_that_can_not_be_had(store: Store) -> None:
    with serving(store) as server, pytest.raises(TransferError, match="can not be served at"):
        transfer_server.PartServer(store.lookup, run_id=RUN, address="127.0.0.1", port=server.port)
