"""The slots of one rank: which may be written, and when. Pure.

A rank has two slots, so that one is whole while the other is written, and two more where older keys are kept for what
replay certifies (``certify``). The rules:

1. A slot goes the ways of ``TRANSITIONS`` and no others. Only a sealed slot is ever readable.
2. A sealed slot is given away when it is of no more use: its key is dead (some vault can never have it), or it is
   older than the safe key and not kept. The slot that holds the safe key stays until a newer one is safe.
3. At most one slot is granted at a time. While nothing can be granted the capture is skipped; training never waits.
4. A writer that dies takes its grant with it: the slot is empty, whatever was in it. What it said is filled is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from enum import Enum
from typing import Final

from lmres.gemini.inventory import Key

SLOTS_PER_RANK: Final = 2
SLOTS_WITH_ANCHORS: Final = 4


class SlotState(Enum):
    EMPTY = "empty"
    GRANTED = "granted"
    """A worker may write it."""
    FILLED = "filled"
    """The worker is done with it; the digests are not known yet."""
    SEALED = "sealed"
    """Whole and readable: its digests are known."""


TRANSITIONS: Final = frozenset(
    {
        (SlotState.EMPTY, SlotState.GRANTED),
        (SlotState.SEALED, SlotState.GRANTED),
        (SlotState.GRANTED, SlotState.FILLED),
        (SlotState.GRANTED, SlotState.EMPTY),
        (SlotState.FILLED, SlotState.SEALED),
        (SlotState.FILLED, SlotState.EMPTY),
        (SlotState.SEALED, SlotState.EMPTY),
        (SlotState.EMPTY, SlotState.SEALED),  # a restored image was put there
    }
)


class SlotTable:
    """States and keys of the slots of one rank."""

    __slots__ = ("_keys", "_pins", "_states")

    def __init__(self, count: int = SLOTS_PER_RANK) -> None:
        self._states = [SlotState.EMPTY] * count
        self._keys: list[Key | None] = [None] * count
        self._pins = [0] * count

    def __len__(self) -> int:
        return len(self._states)

    def state(self, slot: int) -> SlotState:
        return self._states[slot]

    def key(self, slot: int) -> Key | None:
        """The key of what is filled or sealed there."""
        return self._keys[slot]

    def sealed(self) -> Iterator[tuple[int, Key]]:
        for slot, (state, key) in enumerate(zip(self._states, self._keys, strict=True)):
            if state is SlotState.SEALED and key is not None:
                yield slot, key

    def find(self, key: Key) -> int | None:
        """The slot in which this key is filled or sealed."""
        return self._keys.index(key) if key in self._keys else None

    @property
    def granted(self) -> int | None:
        return self._states.index(SlotState.GRANTED) if SlotState.GRANTED in self._states else None

    @property
    def newest(self) -> Key | None:
        return max((key for _, key in self.sealed()), default=None)

    def grantable(self, reusable: Callable[[Key], bool], among: Container[int] | None = None) -> int | None:
        """The slot that may be written next, or None. Empty ones first, then the oldest of those that are reusable.

        ``reusable``: the key is dead, or older than the safe one (``watermark.Verdict.reusable``). ``among``: the slots
        that have memory, None for all.
        """
        if self.granted is not None:
            return None
        slots = [slot for slot in range(len(self)) if among is None or slot in among]
        empty = next((slot for slot in slots if self._states[slot] is SlotState.EMPTY), None)
        if empty is not None:
            return empty
        free = [(key, slot) for slot, key in self.sealed() if slot in slots and self.is_free(slot, reusable)]
        return min(free)[1] if free else None

    def is_free(self, slot: int, reusable: Callable[[Key], bool]) -> bool:
        """Whether a sealed slot is of no more use to anybody."""
        key = self._keys[slot]
        return self._states[slot] is SlotState.SEALED and key is not None and not self._pins[slot] and reusable(key)

    def grant(self, slot: int) -> None:
        assert self._pins[slot] == 0
        self._move(slot, SlotState.GRANTED, None)

    def fill(self, slot: int, key: Key) -> None:
        assert key not in self._keys
        self._move(slot, SlotState.FILLED, key)

    def seal(self, slot: int) -> None:
        self._move(slot, SlotState.SEALED, self._keys[slot])

    def put(self, slot: int, key: Key) -> None:
        """A whole image that did not come from this rank's worker is in an empty slot."""
        self._move(slot, SlotState.SEALED, key)

    def clear(self, slot: int) -> None:
        if self._states[slot] is not SlotState.EMPTY:
            self._move(slot, SlotState.EMPTY, None)

    def pin(self, slot: int) -> None:
        """A sealed slot is being read by someone who can not do with half of it: not granted until unpinned."""
        assert self._states[slot] is SlotState.SEALED
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        assert self._pins[slot] > 0
        self._pins[slot] -= 1

    def is_pinned(self, slot: int) -> bool:
        return self._pins[slot] > 0

    def _move(self, slot: int, state: SlotState, key: Key | None) -> None:
        assert (self._states[slot], state) in TRANSITIONS, f"slot {slot}: {self._states[slot]} to {state}"
        self._states[slot] = state
        self._keys[slot] = key
