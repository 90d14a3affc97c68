"""The talk over a vault's sockets: lines of JSON, checked before anything acts on them. Pure.

One line is one message: an object whose ``op`` names its kind. Each kind has a table of its fields; one that is missing
or of another type makes the whole message a RecordError, and costs the sender its connection. Fields that are not in
the table are kept: a newer version may send more. Descriptors travel beside a line that says how many belong to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from lmres.errors import RecordError
from lmres.gemini.certify import Print, Replayed
from lmres.gemini.inventory import Copy, Key, Part

MAX_LINE_BYTES: Final = 32 << 20
MAX_INT: Final = 2**63 - 1
Message: TypeAlias = dict[str, Any]

_COUNT = "a whole number, not negative"
_TEXT = "text"
_FLAG = "true or false"
_NUMBER = "a number, not negative"
_LIST = "a list"
_OBJECT = "an object"
_KEY = "null or [step, origin]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A vault and where it can be reached. ``port``: its control port."""

    node_id: str
    address: str
    port: int


Source = Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a vault has to do in a generation.

    ``peers`` hold copies of our ranks' images. ``hub``: who decides what is safe, None if this vault does; then
    ``members`` are the nodes it waits for. ``safe``: the key that the generation begins from, None at step 0.
    """

    generation: int
    ranks: tuple[int, ...]
    world_size: int
    topology: str
    safe: tuple[int, int] | None = None
    peers: tuple[Peer, ...] = ()
    hub: Peer | None = None
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Which image to make ready for which ranks. ``sources``: vaults that may have parts of it, ``manifests``: the
    copies of these ranks, any holder's, so that the digests are known."""

    generation: int
    step: int
    origin: int
    ranks: tuple[int, ...]
    sources: tuple[Peer, ...] = ()
    manifests: tuple[Copy, ...] = ()

    @property
    def key(self) -> Key:
        return Key(self.step, self.origin)


FROM_WORKER: Final[Mapping[str, Mapping[str, str]]] = {
    "hello": {"rank": _COUNT, "generation": _COUNT, "run_id": _TEXT},
    "reserve": {"shared_bytes": _COUNT, "own_bytes": _COUNT},
    "seal": {
        "slot": _COUNT,
        "number": _COUNT,
        "step": _COUNT,
        "shared_length": _COUNT,
        "own_length": _COUNT,
        "log_length": _COUNT,
        "finite": _FLAG,
        "all_finite": _FLAG,
        "layout": _TEXT,
        "topology": _TEXT,
        "blocking_ms": _NUMBER,
    },
    "spoilt": {"step": _COUNT, "layout": _TEXT},
    "replayed": {
        "step": _COUNT,
        "part": _COUNT,
        "parts": _COUNT,
        "what": _TEXT,
        "digest": _TEXT,
        "steady": _FLAG,
    },
    "discard": {"slot": _COUNT, "number": _COUNT},
    "withdraw": {"step": _COUNT},
    "await": {},
}
FROM_HOST: Final[Mapping[str, Mapping[str, str]]] = {"hello": {"role": _TEXT, "run_id": _TEXT}}
"""The first message over the private socket, whoever says it."""
TO_WORKER: Final[Mapping[str, Mapping[str, str]]] = {
    "welcome": {},
    "refused": {"why": _TEXT},
    "log": {"bytes": _COUNT, "fds": _COUNT},
    "slot": {"slot": _COUNT, "shared_bytes": _COUNT, "own_bytes": _COUNT, "fds": _COUNT},
    "grant": {"slot": _COUNT, "number": _COUNT},
    "gate": {"step": _COUNT},
    "off": {"why": _TEXT},
    "nothing": {},
    "failed": {"why": _TEXT},
    "restored": {
        "step": _COUNT,
        "origin": _COUNT,
        "source": _TEXT,
        "shared_length": _COUNT,
        "own_length": _COUNT,
        "log_length": _COUNT,
        "bytes": _COUNT,
        "fetch_ms": _NUMBER,
        "fds": _COUNT,
    },
}
FROM_AGENT: Final[Mapping[str, Mapping[str, str]]] = {
    "hello": {"run_id": _TEXT},
    "assign": {"id": _COUNT, "assignment": _OBJECT},
    "freeze": {"id": _COUNT, "generation": _COUNT},
    "prepare": {"id": _COUNT, "prepare": _OBJECT},
    "status": {"id": _COUNT},
    "end": {"id": _COUNT},
}
TO_AGENT: Final[Mapping[str, Mapping[str, str]]] = {
    "welcome": {"pid": _COUNT, "address": _TEXT, "port": _COUNT, "generation": _COUNT},
    "refused": {"why": _TEXT},
    "answer": {"id": _COUNT},
    "event": {"kind": _TEXT},
}
FROM_VAULT: Final[Mapping[str, Mapping[str, str]]] = {
    "hello": {"run_id": _TEXT, "node_id": _TEXT, "generation": _COUNT},
    "manifest": {"copy": _OBJECT, "generation": _COUNT, "parts_address": _TEXT, "parts_port": _COUNT},
    "have": {"id": _COUNT, "digests": _LIST},
    "tell": {"generation": _COUNT, "what": _OBJECT},
    "ping": {},
}
TO_VAULT: Final[Mapping[str, Mapping[str, str]]] = {
    "welcome": {"node_id": _TEXT, "parts_port": _COUNT},
    "refused": {"why": _TEXT},
    "held": {"rank": _COUNT, "step": _COUNT, "origin": _COUNT},
    "not_held": {"rank": _COUNT, "step": _COUNT, "origin": _COUNT, "why": _TEXT, "final": _FLAG},
    "have": {"id": _COUNT, "ranks": _OBJECT},
    "verdict": {"generation": _COUNT, "what": _OBJECT},
    "pong": {},
}


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode() + b"\n"


def decode(line: bytes | bytearray, kinds: Mapping[str, Mapping[str, str]]) -> Message:
    """Raises RecordError if the line is not a whole message of one of these kinds."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"expected a line of JSON, found {bytes(line[:80])!r}") from error
    if not isinstance(message, dict):
        raise RecordError(f"expected a message, found {bytes(line[:80])!r}")
    return check(message, kinds)


def check(message: Message, kinds: Mapping[str, Mapping[str, str]]) -> Message:
    """Raises RecordError if it is not one of these kinds, with all their fields."""
    op = message.get("op")
    fields = kinds.get(op) if isinstance(op, str) else None
    if fields is None:
        raise RecordError(f"expected one of {', '.join(kinds)}, found op {op!r:.80}")
    for name, wanted in fields.items():
        if not _fits(message.get(name), wanted):
            raise RecordError(f"{op}.{name}: expected {wanted}, found {message.get(name)!r:.80}")
    return message


def _fits(value: object, wanted: str) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if wanted == _COUNT:
        return whole and 0 <= value <= MAX_INT  # type: ignore[operator]
    if wanted == _NUMBER:
        return (whole or isinstance(value, float)) and 0 <= value < float("inf")  # type: ignore[operator]
    if wanted == _KEY:
        return value is None or (isinstance(value, list) and len(value) == 2 and all(_fits(v, _COUNT) for v in value))
    kind = {_TEXT: str, _FLAG: bool, _LIST: list, _OBJECT: dict}[wanted]
    return isinstance(value, kind)


class LineBuffer:
    """Bytes in, whole lines out."""

    __slots__ = ("_bytes", "_limit", "_scanned")

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._bytes = bytearray()
        self._scanned = 0
        self._limit = limit

    def add(self, data: bytes) -> None:
        self._bytes += data

    def pop(self) -> bytearray | None:
        """The next whole line, or None. Raises RecordError if a line is longer than the limit."""
        end = self._bytes.find(b"\n", self._scanned)
        if end < 0:
            self._scanned = len(self._bytes)
            if self._scanned > self._limit:
                raise RecordError(f"line of more than {self._limit} bytes")
            return None
        line = self._bytes[:end]
        del self._bytes[: end + 1]
        self._scanned = 0
        return line


# -- records in messages


def to_plain(record: Copy | Assignment | Prepare) -> Message:
    """The record as JSON values."""
    return asdict(record)


def _field(body: Mapping[str, Any], name: str, wanted: str) -> Any:
    value = body.get(name)
    if not _fits(value, wanted):
        raise RecordError(f"{name}: expected {wanted}, found {value!r:.80}")
    return value


def _part(body: Mapping[str, Any]) -> Part:
    return Part(digest=_field(body, "digest", _TEXT), length=_field(body, "length", _COUNT))


def _texts(values: Iterable[object]) -> tuple[str, ...]:
    texts = tuple(values)
    if not all(isinstance(text, str) for text in texts):
        raise RecordError(f"expected a list of text, found {texts!r:.80}")
    return texts  # type: ignore[return-value]


def _counts(values: Iterable[object]) -> tuple[int, ...]:
    counts = tuple(values)
    if not all(_fits(count, _COUNT) for count in counts):
        raise RecordError(f"expected a list of whole numbers, found {counts!r:.80}")
    return counts  # type: ignore[return-value]


def copy_from_plain(body: object) -> Copy:
    """Raises RecordError."""
    if not isinstance(body, dict):
        raise RecordError(f"expected a copy, found {body!r:.80}")
    try:
        return Copy(
            rank=_field(body, "rank", _COUNT),
            step=_field(body, "step", _COUNT),
            origin=_field(body, "origin", _COUNT),
            shared=_part(_field(body, "shared", _OBJECT)),
            own=_part(_field(body, "own", _OBJECT)),
            log=_part(_field(body, "log", _OBJECT)),
            has=_texts(_field(body, "has", _LIST)),
            place=_field(body, "place", _TEXT),
            finite=_field(body, "finite", _FLAG),
            trust=_field(body, "trust", _TEXT),
            topology=_field(body, "topology", _TEXT),
        )
    except ValueError as error:
        raise RecordError(f"copy: {error}") from error


def key_from_plain(body: object) -> Key | None:
    """Raises RecordError."""
    if not _fits(body, _KEY):
        raise RecordError(f"expected {_KEY}, found {body!r:.80}")
    return None if body is None else Key(*body)  # type: ignore[misc]


def keys_from_plain(body: object) -> tuple[Key, ...]:
    """Raises RecordError."""
    if not isinstance(body, list):
        raise RecordError(f"expected a list of keys, found {body!r:.80}")
    return tuple(key for item in body if (key := key_from_plain(item)) is not None)


def replayed_from_plain(body: object) -> Replayed:
    """Raises RecordError."""
    if not isinstance(body, dict):
        raise RecordError(f"expected what was replayed, found {body!r:.80}")
    return Replayed(
        step=_field(body, "step", _COUNT),
        part=_field(body, "part", _COUNT),
        parts=_field(body, "parts", _COUNT),
        what=_field(body, "what", _TEXT),
        digest=_field(body, "digest", _TEXT),
        steady=_field(body, "steady", _FLAG),
    )


def prints_to_plain(prints: Mapping[Key, Mapping[int, Print]]) -> list[Any]:
    return [
        [key, [[rank, said.layout, said.digest, said.finite] for rank, said in sorted(by_rank.items())]]
        for key, by_rank in sorted(prints.items())
    ]


def prints_from_plain(body: object) -> dict[Key, dict[int, Print]]:
    """Raises RecordError."""
    found: dict[Key, dict[int, Print]] = {}
    try:
        for key, by_rank in body:  # type: ignore[attr-defined]
            said = found.setdefault(Key(*_counts(key)), {})
            for rank, *texts, finite in by_rank:
                layout, digest = _texts(texts)
                said[_counts([rank])[0]] = Print(layout=layout, digest=digest, finite=finite is True)
    except (TypeError, ValueError) as error:
        raise RecordError(f"expected prints of images, found {body!r:.80}") from error
    return found


def peer_from_plain(body: object) -> Peer:
    if not isinstance(body, dict):
        raise RecordError(f"expected a peer, found {body!r:.80}")
    return Peer(
        node_id=_field(body, "node_id", _TEXT),
        address=_field(body, "address", _TEXT),
        port=_field(body, "port", _COUNT),
    )


def assignment_from_plain(body: Mapping[str, Any]) -> Assignment:
    """Raises RecordError."""
    safe = _field(body, "safe", _KEY)
    return Assignment(
        generation=_field(body, "generation", _COUNT),
        ranks=_counts(_field(body, "ranks", _LIST)),
        world_size=_field(body, "world_size", _COUNT),
        topology=_field(body, "topology", _TEXT),
        safe=None if safe is None else (safe[0], safe[1]),
        peers=tuple(peer_from_plain(peer) for peer in _field(body, "peers", _LIST)),
        hub=None if body.get("hub") is None else peer_from_plain(body["hub"]),
        members=_texts(_field(body, "members", _LIST)),
    )


def prepare_from_plain(body: Mapping[str, Any]) -> Prepare:
    """Raises RecordError."""
    return Prepare(
        generation=_field(body, "generation", _COUNT),
        step=_field(body, "step", _COUNT),
        origin=_field(body, "origin", _COUNT),
        ranks=_counts(_field(body, "ranks", _LIST)),
        sources=tuple(peer_from_plain(peer) for peer in _field(body, "sources", _LIST)),
        manifests=tuple(copy_from_plain(copy) for copy in _field(body, "manifests", _LIST)),
    )
