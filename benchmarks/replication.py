"""A pull between two vaults, digest checked, against a bare ``sendfile`` and ``recv_into`` of the same bytes.

    python -m benchmarks.replication [--runs 7] [--large] [--streams N] [--json FILE]

Two processes on one host over loopback: the sender's bytes lie in a memfd, the receiver's memory is touched before.
``pair``: one connection, nothing else. ``best pair``: the best of 1, 2 and 4 connections, by its median. ``pull``:
what the vault does, with requests, retries armed and the digest of the whole checked. Runs are interleaved; each
figure is a median. ``ratio``: the speed of the pull over that of the pair, and over that of the best pair.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import multiprocessing
import os
import random
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import xxhash

from lmres.gemini.edge.transfer import PartServer, PartSource, Puller

RUN = "benchmark"
CALL_BYTES = 4 << 20
RANGE = struct.Struct("!QQ")
CONNECTIONS = (1, 2, 4)


def send(length: int, told: Connection) -> None:
    """The sending process: the bytes, a part server, and the bare sender."""
    fd = os.memfd_create("part")
    os.ftruncate(fd, length)
    block = random.Random(1).randbytes(1 << 20)
    with mmap.mmap(fd, length) as memory:
        for start in range(0, length, len(block)):
            memory[start : start + len(block)] = block[: length - start]
        digest = xxhash.xxh3_128_hexdigest(memory)
    source = PartSource(fd=fd, offset=0, length=length)
    server = PartServer(lambda wanted: source if wanted == digest else None, run_id=RUN, address="127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))
    told.send((digest, server.port, listener.getsockname()[1]))
    while True:
        threading.Thread(target=send_bare, args=(listener.accept()[0], fd), daemon=True).start()


def send_bare(sock: socket.socket, fd: int) -> None:
    with sock, contextlib.suppress(OSError):
        start, end = RANGE.unpack(sock.recv(RANGE.size, socket.MSG_WAITALL))
        while start < end:
            start += os.sendfile(sock.fileno(), fd, start, min(end - start, CALL_BYTES))


def receive_bare(port: int, into: memoryview, connections: int) -> float:
    def one(start: int, end: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(RANGE.pack(start, end))
            while start < end:
                start += sock.recv_into(into[start : min(end, start + CALL_BYTES)])

    edges = [len(into) * n // connections for n in range(connections + 1)]
    began = time.perf_counter()
    threads = [threading.Thread(target=one, args=edges[n : n + 2]) for n in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def measure(length: int, runs: int, streams: int) -> dict[str, list[float]]:
    """Seconds of each run, by name."""
    near, far = multiprocessing.Pipe()
    sender = multiprocessing.get_context("spawn").Process(target=send, args=(length, far), daemon=True)
    sender.start()
    far.close()
    digest, port, bare_port = near.recv()
    into = memoryview(mmap.mmap(-1, length))
    for start in range(0, length, mmap.PAGESIZE):
        into[start] = 1
    found: dict[str, list[float]] = {}
    with Puller("127.0.0.1", port, run_id=RUN) as puller:

        def pull() -> float:
            return puller.pull(digest, length, into, streams=streams).duration_s

        todo: dict[str, Callable[[], float]] = {"pull": pull}
        for count in CONNECTIONS:
            todo[f"pair {count}"] = lambda count=count: receive_bare(bare_port, into, count)  # type: ignore[misc]
        for run in range(runs + 1):
            for name, one in todo.items():
                seconds = one()
                if run:  # the first warms up
                    found.setdefault(name, []).append(seconds)
    sender.kill()
    sender.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--large", action="store_true", help="4 GB too (8 GB of memory)")
    parser.add_argument("--streams", type=int, default=0, help="of the pull; 0: as the vault chooses")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    print(
        f"{'GB':>5}{'pull s':>9}{'GB/s':>7}{'pair s':>9}{'GB/s':>7}{'best pair':>11}{'GB/s':>7}"
        f"{'ratio':>8}{'to best':>9}"
    )
    for gigabytes in (0.1, 1.0, 4.0) if args.large else (0.1, 1.0):
        runs = measure(int(gigabytes * 1e9), args.runs, args.streams)
        middle = {name: statistics.median(seconds) for name, seconds in runs.items()}
        pull, pair = middle["pull"], middle["pair 1"]
        best = min(CONNECTIONS, key=lambda count: middle[f"pair {count}"])
        best_s = middle[f"pair {best}"]
        print(
            f"{gigabytes:5.1f}{pull:9.3f}{gigabytes / pull:7.2f}{pair:9.3f}{gigabytes / pair:7.2f}"
            f"{best_s:9.3f}/{best}{gigabytes / best_s:7.2f}{pair / pull:8.2f}{best_s / pull:9.2f}",
            flush=True,
        )
        results.append({"GB": gigabytes, "ratio": pair / pull, "ratio_to_best": best_s / pull, "runs_s": runs})
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
