"""What a vault holds: the records that vaults, agents and the recovery choice share.

An *image* is the state of one rank at one step, in three parts. ``shared`` is what replicas of the rank would have bit
for bit (parameters, optimizer state); ``own`` is a safetensors header over all tensors, then the rank's own ones, so
that own + shared is a valid safetensors file; ``log`` is the prefix of the rank's journal that belongs to the step.

A part *is* its content: equal digest and length mean the same bytes, whoever holds them and for whatever rank or key.
So replicas of data-parallel training count as copies without a word about data-parallel training here.

A *key* names an image: the step, and its origin, which is the generation that captured it. Images of different keys are
never put together, not even for the same step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

PART_NAMES = ("shared", "own", "log")
PartName = Literal["shared", "own", "log"]
Place = Literal["memory", "durable"]
Trust = Literal["unverified", "verified"]

MAX_COPIES = 2000
"""Of one vault: the text of its holdings then fits into one value of the store."""

_DIGEST = re.compile(r"[0-9a-f]{32}")


class Key(NamedTuple):
    """Ordered by step, then origin. Equal to the plain tuple."""

    step: int
    origin: int

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.origin}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """States newer than this step and origin, captured up to generation ``until``, may be wrong."""

    step: int
    origin: int
    until: int

    def covers(self, key: tuple[int, int]) -> bool:
        return key > (self.step, self.origin) and key[1] <= self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """``digest``: xxh3_128 in lower-case hex, over ``length`` bytes."""

    digest: str
    length: int

    def __post_init__(self) -> None:
        if _DIGEST.fullmatch(self.digest) is None:
            raise ValueError(f"part: digest must be 32 lower-case hex digits, found {self.digest!r:.80}")
        if self.length < 0:
            raise ValueError(f"part: length must not be negative, found {self.length}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """An image as one vault knows it: all its parts by digest, and which of them this vault can give (``has``).

    ``finite``: no NaN and no infinity among the shared and own floating-point tensors, as far as was looked.
    """

    rank: int
    step: int
    origin: int
    shared: Part
    own: Part
    log: Part
    has: tuple[str, ...]
    place: Place
    finite: bool
    trust: Trust
    topology: str

    def __post_init__(self) -> None:
        if min(self.rank, self.step, self.origin) < 0:
            found = f"{self.rank}, {self.step}, {self.origin}"
            raise ValueError(f"copy: rank, step and origin must not be negative, found {found}")
        unknown = sorted(set(self.has) - set(PART_NAMES))
        if unknown or len(set(self.has)) != len(self.has):
            raise ValueError(f"copy: has must name parts of {PART_NAMES}, each once, found {self.has!r:.200}")

    @property
    def key(self) -> Key:
        return Key(self.step, self.origin)

    def part(self, name: str) -> Part:
        assert name in PART_NAMES
        part: Part = getattr(self, name)
        return part

    def parts(self) -> Iterator[tuple[str, Part]]:
        return ((name, self.part(name)) for name in PART_NAMES)

    def held(self) -> Iterator[Part]:
        return (self.part(name) for name in self.has)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What a node's vault held when it was frozen in ``generation`` (0: before the first plan).

    ``address`` and ``port``: where its parts can be pulled. ``problem``: why there is nothing, or less than there
    should be. ``ever``: at any time a key was safe here, was restored here or was found in files here, so that to begin
    again at step 0 would lose it; an agent whose vault was replaced keeps it. An image that was only sealed does not
    count: until the first key is safe, step 0 is where the run goes on from.
    """

    node_id: str
    incarnation: str
    generation: int
    address: str = ""
    port: int = 0
    copies: tuple[Copy, ...] = ()
    problem: str = ""
    ever: bool = False

    def __post_init__(self) -> None:
        if not self.node_id or not self.incarnation:
            raise ValueError("holdings: node_id and incarnation must not be empty")
        if self.generation < 0:
            raise ValueError(f"holdings: generation must not be negative, found {self.generation}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"holdings: port must be 0 to 65535, found {self.port}")
        if len(self.copies) > MAX_COPIES:
            raise ValueError(f"holdings: at most {MAX_COPIES} copies can be told, found {len(self.copies)}")
        if self.copies and not (self.address and self.port):
            raise ValueError("holdings: copies without an address and a port to pull them from")


def topology_text(*, nodes: int, local_world_size: int) -> str:
    """Images fit only into a group of the same shape."""
    return f"{nodes * local_world_size} ranks as {nodes} nodes of {local_world_size}"
