"""What goes over a store connection: a preamble, then frames of a length and one JSON object.

::

    client                                server
    preamble, hello {client_id, role} ──▶
                                      ◀── preamble, welcome {store_id}
    {id, op, …}                       ──▶
                                      ◀── {id, ok} or {id, rejected}

Rules:

1. The preamble is of fixed length in every version and is sent first by the client. It ends in an empty line, so
   that a text service (HTTP and others) that listens here by mistake answers at once and can be named.
2. A connection has one request under way at a time; the reply carries its id.
3. Whatever is received is data: JSON only, each field checked, each size bounded. What does not fit is a RecordError.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, cast

from lmres.errors import RecordError
from lmres.ports import Compare, DeletePrefix, Entry, Get, Op, Put, Range, Txn, TxnResult

VERSION = 1
MAGIC = b"LMRES-STORE "
PREAMBLE = MAGIC + b"%03d\r\n\r\n" % VERSION
PREAMBLE_BYTES = len(PREAMBLE)

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 32 << 20
MAX_HELLO_BYTES = 4096
MAX_CLIENT_ID_CHARS = 512

Role: TypeAlias = Literal["agent", "observer"]
JsonObject: TypeAlias = dict[str, object]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    client_id: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnRequest:
    id: int
    txn: Txn


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRequest:
    id: int
    prefixes: tuple[str, ...]
    after_revision: int
    timeout_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ByeRequest:
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PingRequest:
    id: int


Request: TypeAlias = TxnRequest | WaitRequest | ByeRequest | PingRequest


def encode_frame(message: JsonObject) -> bytes:
    """The frame of a message. The caller compares its length with MAX_FRAME_BYTES where that can be passed."""
    body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def decode_body(body: bytes | bytearray) -> JsonObject:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"frame {bytes(body[:40])!r} is not JSON: {type(error).__name__}") from error
    return cast(JsonObject, _typed(message, dict, "frame"))


def preamble_version(preamble: bytes) -> int | None:
    """The version a preamble of full length names, None if it is not one of this protocol."""
    digits = preamble[len(MAGIC) : len(MAGIC) + 3]
    if preamble != MAGIC + digits + b"\r\n\r\n" or not digits.isdigit():
        return None
    return int(digits)


def hello_to_json(hello: Hello) -> JsonObject:
    return {"op": "hello", "client_id": hello.client_id, "role": hello.role}


def hello_from_json(message: JsonObject) -> Hello:
    if message.get("op") != "hello":
        raise RecordError(f"first request is {_short(message.get('op'))}, 'hello' expected")
    client_id = _text(message.get("client_id"), "client_id")
    if not 1 <= len(client_id) <= MAX_CLIENT_ID_CHARS:
        raise RecordError(f"client_id of {len(client_id)} characters, 1 to {MAX_CLIENT_ID_CHARS} expected")
    role = message.get("role")
    if role == "agent":
        return Hello(client_id=client_id, role="agent")
    if role == "observer":
        return Hello(client_id=client_id, role="observer")
    raise RecordError(f"role is {_short(role)}, 'agent' or 'observer' expected")


def request_to_json(request: Request) -> JsonObject:
    match request:
        case TxnRequest():
            return {"id": request.id, "op": "txn", "txn": txn_to_json(request.txn)}
        case WaitRequest():
            return {
                "id": request.id,
                "op": "wait",
                "prefixes": request.prefixes,
                "after": request.after_revision,
                "timeout_ms": request.timeout_ms,
            }
        case ByeRequest():
            return {"id": request.id, "op": "bye"}
        case PingRequest():
            return {"id": request.id, "op": "ping"}


def request_from_json(message: JsonObject) -> Request:
    request_id = _whole(message.get("id"), "id")
    match message.get("op"):
        case "txn":
            return TxnRequest(id=request_id, txn=txn_from_json(message.get("txn")))
        case "wait":
            return WaitRequest(
                id=request_id,
                prefixes=_each(message.get("prefixes"), "prefixes", lambda item: _text(item, "prefix")),
                after_revision=_whole(message.get("after"), "after"),
                timeout_ms=_whole(message.get("timeout_ms"), "timeout_ms"),
            )
        case "bye":
            return ByeRequest(id=request_id)
        case "ping":
            return PingRequest(id=request_id)
        case other:
            raise RecordError(f"op is {_short(other)}, txn, wait, bye or ping expected")


def txn_to_json(txn: Txn) -> list[object]:
    return [
        [[compare.key, compare.mod_revision] for compare in txn.compares],
        [_op_to_json(op) for op in txn.success],
        [_op_to_json(op) for op in txn.failure],
    ]


def txn_from_json(value: object) -> Txn:
    compares, success, failure = _fields(value, "txn", 3)
    return Txn(
        compares=_each(compares, "compares", _compare_from_json),
        success=_each(success, "success", _op_from_json),
        failure=_each(failure, "failure", _op_from_json),
    )


def result_to_json(result: TxnResult) -> list[object]:
    reads = [
        [[entry.key, entry.value, entry.create_revision, entry.mod_revision] for entry in read] for read in result.reads
    ]
    return [result.succeeded, result.revision, reads]


def result_from_json(value: object) -> TxnResult:
    succeeded, revision, reads = _fields(value, "result", 3)
    return TxnResult(
        succeeded=boolean(succeeded, "succeeded"),
        revision=_whole(revision, "revision"),
        reads=_each(reads, "reads", lambda read: _each(read, "read", _entry_from_json)),
    )


def boolean(value: object, name: str) -> bool:
    return cast(bool, _typed(value, bool, name))


def _op_to_json(op: Op) -> list[object]:
    match op:
        case Put():
            return ["put", op.key, op.value]
        case DeletePrefix():
            return ["delete", op.prefix]
        case Range():
            return ["range", op.prefix, op.min_mod_revision]
        case Get():
            return ["get", op.key]


def _op_from_json(value: object) -> Op:
    match _typed(value, list, "operation"):
        case ["put", str(key), str(text)]:
            return Put(key=key, value=text)
        case ["delete", str(prefix)]:
            return DeletePrefix(prefix=prefix)
        case ["range", str(prefix), revision]:
            return Range(prefix=prefix, min_mod_revision=_whole(revision, "min_mod_revision"))
        case ["get", str(key)]:
            return Get(key=key)
        case other:
            raise RecordError(f"operation {_short(other)}: put, delete, range or get with its fields expected")


def _compare_from_json(value: object) -> Compare:
    key, revision = _fields(value, "compare", 2)
    return Compare(key=_text(key, "key"), mod_revision=_whole(revision, "mod_revision"))


def _entry_from_json(value: object) -> Entry:
    key, text, create_revision, mod_revision = _fields(value, "entry", 4)
    return Entry(
        key=_text(key, "key"),
        value=_text(text, "value"),
        create_revision=_whole(create_revision, "create_revision"),
        mod_revision=_whole(mod_revision, "mod_revision"),
    )


def _fields(value: object, name: str, count: int) -> list[object]:
    fields = cast(list[object], _typed(value, list, name))
    if len(fields) != count:
        raise RecordError(f"{name} has {len(fields)} fields, {count} expected")
    return fields


def _each(value: object, name: str, convert: Callable[[object], _T]) -> tuple[_T, ...]:
    return tuple(convert(item) for item in cast(list[object], _typed(value, list, name)))


def _text(value: object, name: str) -> str:
    return cast(str, _typed(value, str, name))


def _whole(value: object, name: str) -> int:
    # bool is an int in Python, but never a count on the wire.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise RecordError(f"{name} is {_short(value)}, a whole number from 0 expected")
    return value


def _typed(value: object, kind: type, name: str) -> object:
    if not isinstance(value, kind):
        raise RecordError(f"{name} is {_short(value)}, {kind.__name__} expected")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
