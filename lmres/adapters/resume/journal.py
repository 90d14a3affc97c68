"""What the program has read from its tensors since step 0, and where each step began.

A fast-forward answers the program's reads of scalars (``.item()``, ``float()``, ``if loss < best``) from this log, so
that whatever it keeps in Python values (running means, best values, schedules, what it prints) comes out as it was in
the first life. The log is append-only bytes in memory that the vault owns, so that it survives the worker; an image of
the state covers a prefix of it.

========= =============================================== =====================================================
tag       body                                            meaning
========= =============================================== =====================================================
``S``     step u64, fingerprint u64, iterators u32        a training forward begins after this step
``f``     site u16, float64                               a float was read
``i``     site u16, int64                                 an int
``b``     site u16, u8                                    a bool
``j``     site u16, length u32, JSON                      anything else: big ints, complex, lists
``Z``                                                     what came before is void: the program began anew elsewhere
``r``     site u16 (0), length u32, bytes                 states of the random generators before a batch was fetched
========= =============================================== =====================================================

A site is the line number of the read, modulo 2**16: enough to see that the program went another way.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

_STEP = struct.Struct("<cQQI")
_FLOAT = struct.Struct("<cHd")
_INT = struct.Struct("<cHq")
_BOOL = struct.Struct("<cHB")
_JSON = struct.Struct("<cHI")
_SIZES = {b"Z": 1, b"S": _STEP.size, b"f": _FLOAT.size, b"i": _INT.size, b"b": _BOOL.size}
_INT_RANGE = range(-(1 << 63), 1 << 63)

MAX_VALUE_BYTES = 1 << 20


class JournalError(Exception):
    """The log is full, torn, or not a log: what it holds can not be replayed."""


class Desync(Exception):
    """The program does not read what it read in its first life."""


class Unread(Exception):
    """The first life did not read this, and need not have: it is read by the clock."""


class Mark(NamedTuple):
    """``iterators``: loader iterators created before; ``end``: offset of the first entry after the mark."""

    step: int
    fingerprint: int
    iterators: int
    start: int
    end: int


class Journal:
    """Writes. ``length`` bytes are in use; the rest of the memory is free."""

    def __init__(self, memory: memoryview | bytearray, length: int = 0) -> None:
        self._memory = memory
        self.length = length

    def mark(self, step: int, fingerprint: int, iterators: int) -> None:
        self._room(_STEP.size)
        _STEP.pack_into(self._memory, self.length, b"S", step, fingerprint, iterators)
        self.length += _STEP.size

    def void(self) -> None:
        """Nothing written so far can be replayed any more."""
        self._room(1)
        self._memory[self.length : self.length + 1] = b"Z"
        self.length += 1

    def scalar(self, value: Any, site: int) -> None:
        """Raises JournalError when the value has no form here, or no room is left."""
        site &= 0xFFFF
        kind = type(value)
        if kind is float:
            self._room(_FLOAT.size)
            _FLOAT.pack_into(self._memory, self.length, b"f", site, value)
            self.length += _FLOAT.size
        elif kind is bool:
            self._room(_BOOL.size)
            _BOOL.pack_into(self._memory, self.length, b"b", site, value)
            self.length += _BOOL.size
        elif kind is int and value in _INT_RANGE:
            self._room(_INT.size)
            _INT.pack_into(self._memory, self.length, b"i", site, value)
            self.length += _INT.size
        else:
            self._json(value, site)

    def generators(self, packed: bytes) -> None:
        """The states from which the next batch is fetched."""
        self._bytes(b"r", 0, packed)

    def _json(self, value: Any, site: int) -> None:
        try:
            text = json.dumps(_plain(value)).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise JournalError(
                f"a {type(value).__name__} that was read from a tensor can not be kept: {error}"
            ) from None
        if len(text) > MAX_VALUE_BYTES:
            raise JournalError(
                f"a value of {len(text)} bytes was read from a tensor, at most {MAX_VALUE_BYTES} are kept"
            )
        self._bytes(b"j", site, text)

    def _bytes(self, tag: bytes, site: int, text: bytes) -> None:
        self._room(_JSON.size + len(text))
        _JSON.pack_into(self._memory, self.length, tag, site, len(text))
        start = self.length + _JSON.size
        self._memory[start : start + len(text)] = text
        self.length = start + len(text)

    def _room(self, size: int) -> None:
        if self.length + size > len(self._memory):
            raise JournalError(f"the log of scalars is full: {self.length} of {len(self._memory)} bytes are used")


class Replay:
    """Reads a log of ``length`` bytes, one value after another, between the marks."""

    def __init__(self, memory: memoryview | bytes | bytearray, length: int) -> None:
        """Raises JournalError if the log is torn."""
        self._memory = memory
        self._length = length
        self._at = 0
        self.marks = tuple(_marks(memory, length))
        self.loose: frozenset[int] = frozenset()
        """Sites where the program reads by the clock: in one life, and not in another."""

    @property
    def position(self) -> int:
        return self._at

    def find(self, step: int) -> Mark | None:
        """The newest mark of a step."""
        return next((m for m in reversed(self.marks) if m.step == step), None)

    def go_to(self, mark: Mark) -> None:
        """The next value is the first one after the mark."""
        self._at = mark.end

    def scalar(self, site: int) -> Any:
        """The value read next in the first life. Raises Desync if something else was read there, or nothing; Unread
        if that means nothing at this site."""
        site &= 0xFFFF
        self._pass_loose(site)
        tag = self._tag()
        if tag in (b"", b"S", b"r"):
            if site in self.loose:
                raise Unread
            what = "before this point" if tag == b"" else "in this step"
            raise Desync(f"a value is read in line {site} that the first life did not read {what}")
        found, value, size = _read(self._memory, self._at, tag)
        if found != site:
            if site in self.loose:
                raise Unread
            raise Desync(f"a value is read in line {site}, the first life read one in line {found}")
        self._at += size
        return value

    def _tag(self) -> bytes:
        return bytes(self._memory[self._at : self._at + 1]) if self._at < self._length else b""

    def _pass_loose(self, site: int | None = None) -> None:
        """Past values that only the first life has read, by the clock."""
        while self.loose and self._tag() not in (b"", b"S", b"r"):
            found, _, size = _read(self._memory, self._at, self._tag())
            if found == site or found not in self.loose:
                return
            self._at += size

    def generators(self) -> bytes | None:
        """The states noted here, None if none were."""
        self._pass_loose()
        if self._tag() != b"r":
            return None
        _, _, size = _JSON.unpack_from(self._memory, self._at)
        start = self._at + _JSON.size
        self._at = start + size
        return bytes(self._memory[start : start + size])

    def pass_mark(self, step: int) -> None:
        """A training forward begins after ``step``. Raises Desync if the first life was elsewhere then."""
        self._pass_loose()
        mark = next((m for m in self.marks if m.start == self._at), None) if self._at < self._length else None
        if mark is None:
            left = sum(m.start > self._at for m in self.marks)
            raise Desync(f"values were not read that the first life read before a forward ({left} forwards are left)")
        if mark.step != step:
            raise Desync(f"a forward begins after step {step}, in the first life it began after step {mark.step}")
        self._at = mark.end


def _marks(memory: Any, length: int) -> list[Mark]:
    marks, at = [], 0
    while at < length:
        tag = bytes(memory[at : at + 1])
        if tag == b"S" and at + _STEP.size <= length:
            _, step, fingerprint, iterators = _STEP.unpack_from(memory, at)
            marks.append(Mark(step, fingerprint, iterators, at, at + _STEP.size))
        elif tag == b"Z":
            marks.clear()
        at += _size(memory, at, tag, length)
    if at != length:
        raise JournalError(f"the log of scalars is torn: its last entry ends at {at}, the log at {length}")
    return marks


def _size(memory: Any, at: int, tag: bytes, length: int) -> int:
    if tag in (b"j", b"r") and at + _JSON.size <= length:
        return _JSON.size + int(_JSON.unpack_from(memory, at)[2])
    size = _SIZES.get(tag)
    if size is None:
        raise JournalError(f"the log of scalars is torn: found {tag!r} at byte {at} of {length}")
    return size


def _read(memory: Any, at: int, tag: bytes) -> tuple[int, Any, int]:
    match tag:
        case b"f":
            _, site, number = _FLOAT.unpack_from(memory, at)
            return site, number, _FLOAT.size
        case b"i":
            _, site, number = _INT.unpack_from(memory, at)
            return site, number, _INT.size
        case b"b":
            _, site, flag = _BOOL.unpack_from(memory, at)
            return site, bool(flag), _BOOL.size
        case _:
            _, site, size = _JSON.unpack_from(memory, at)
            start = at + _JSON.size
            return site, _unplain(json.loads(bytes(memory[start : start + size]))), _JSON.size + size


def _plain(value: Any) -> Any:
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, (bool, int)):
        return value
    raise TypeError("not a number")


def _unplain(value: Any) -> Any:
    if isinstance(value, list):
        return [_unplain(item) for item in value]
    if isinstance(value, dict):
        if "complex" in value:
            real, imaginary = value["complex"]
            return complex(float.fromhex(real), float.fromhex(imaginary))
        return float.fromhex(value["float"])
    return value
