"""Images to write, and a writer process that is killed: what the tests of the durable tier share."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lmres.gemini.edge.durable import Scanned, Span, Written, read_part, write_image
from lmres.gemini.inventory import Copy, Part
from lmres.gemini.layout import Entry, encode_header

RUN = "run/1"
TOPOLOGY = "2 ranks as 2 nodes of 1"


def part(data: bytes) -> Part:
    return Part(digest=xxhash.xxh3_128_hexdigest(data), length=len(data))


@dataclass
class Made:
    """An image and its bytes."""

    image: Copy
    shared: bytes
    own: bytes
    log: bytes

    def write(self, directory: Path, *, run_id: str = RUN, **changed: object) -> Written | None:
        spans: dict[str, Span] = {name: memoryview(getattr(self, name)) for name in ("shared", "own", "log")}
        options = {"run_id": run_id, "image": self.image, **spans, **changed}
        return write_image(directory, **options)  # type: ignore[arg-type]


def make(*, step: int = 10, origin: int = 1, rank: int = 0, length: int = 50_000, seed: int = 0) -> Made:
    """An image of two shared tensors and one own, a valid safetensors file when put together."""
    chance = random.Random(f"{step} {origin} {rank} {seed}")
    count = max(1, length // 8)
    rng = chance.randbytes(33)
    shared = chance.randbytes(4 * count) + chance.randbytes(8 * (count // 2))
    entries = (
        Entry(name="rng", dtype="U8", shape=(33,), begin=0, end=33),
        Entry(name="weight", dtype="I32", shape=(count,), begin=33, end=33 + 4 * count),
        Entry(name="état", dtype="I64", shape=(count // 2, 1), begin=33 + 4 * count, end=33 + len(shared)),
    )
    own = encode_header(entries, {"step": str(step)}) + rng
    log = chance.randbytes(step)
    image = Copy(
        rank=rank, step=step, origin=origin, shared=part(shared), own=part(own), log=part(log),
        has=("shared", "own", "log"), place="durable", finite=True, trust="unverified", topology=TOPOLOGY,
    )  # fmt: skip
    return Made(image=image, shared=shared, own=own, log=log)


def check_whole(found: Scanned) -> None:
    """Every image that a scan shows has the bytes its manifest names."""
    for image in found.images:
        for name, wanted in image.image.parts():
            into = memoryview(bytearray(wanted.length))
            read_part(image, name, into)


def main() -> None:
    """Writes images for ever: to be killed."""
    directory, length, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    made = [make(step=step, rank=rank, length=length, seed=s) for step in (10, 20) for rank in (0, 1) for s in (0, 1)]
    os.write(1, b"ready\n")
    while True:
        chance.choice(made).write(directory)
        os.write(1, b".")


if __name__ == "__main__":
    main()
