"""What a store accepts: the port's limits, checked before anything is sent or written.

Every store runs the same check, so that a transaction is good or bad whatever the store type is. A rejected
transaction has had no effect. As in etcd v3 the rule "a key is written at most once" covers deletions too: a Put
below the prefix of a DeletePrefix of the same branch is rejected, in either order.

Two limits are ours, not the port's: the bytes of one transaction and of a whole store. They bound what one client
can make a store hold or send.
"""

from __future__ import annotations

from typing import NoReturn

from lmres.errors import StoreError
from lmres.ports import (
    MAX_KEY_BYTES,
    MAX_TXN_OPS,
    MAX_VALUE_BYTES,
    DeletePrefix,
    Get,
    Op,
    Put,
    Range,
    Txn,
)

MAX_TXN_BYTES = 16 << 20
"""Keys and values of all operations of a transaction."""
MAX_STORE_BYTES = 256 << 20
"""Keys and values of a whole store."""
MAX_WAIT_PREFIXES = 128


class TxnRejected(StoreError):
    """The request breaks a limit of the port. It had no effect: correct the caller, a repetition fails again."""


def check_txn(txn: Txn) -> None:
    """Raises TxnRejected if the transaction breaks a limit."""
    for name, count in (
        ("compares", len(txn.compares)),
        ("success", len(txn.success)),
        ("failure", len(txn.failure)),
    ):
        if count > MAX_TXN_OPS:
            raise TxnRejected(
                f"transaction with {count} entries in {name}, at most {MAX_TXN_OPS} are allowed: split it"
            )
    size = 0
    for compare in txn.compares:
        size += _key_bytes(compare.key)
        _check_revision(compare.mod_revision, f"compare of {compare.key!r}")
    size += _branch_bytes(txn.success) + _branch_bytes(txn.failure)
    if size > MAX_TXN_BYTES:
        raise TxnRejected(f"transaction of {size} bytes, at most {MAX_TXN_BYTES} are allowed: split it")


def check_wait(prefixes: tuple[str, ...]) -> None:
    """Raises TxnRejected if this cannot be waited for."""
    if not 1 <= len(prefixes) <= MAX_WAIT_PREFIXES:
        raise TxnRejected(f"wait for {len(prefixes)} prefixes, 1 to {MAX_WAIT_PREFIXES} expected")
    for prefix in prefixes:
        _text_bytes("prefix", prefix, MAX_KEY_BYTES)


def entry_bytes(key: str, value: str) -> int:
    """What an entry counts towards MAX_STORE_BYTES."""
    return _utf8_length(key) + _utf8_length(value)


def _branch_bytes(ops: tuple[Op, ...]) -> int:
    size = 0
    put: set[str] = set()
    deleted: list[str] = []
    for op in ops:
        match op:
            case Put():
                if op.key in put:
                    raise TxnRejected(f"key {op.key!r} is put twice in one transaction, once is allowed")
                put.add(op.key)
                size += _key_bytes(op.key) + _text_bytes(f"value of key {op.key!r}", op.value, MAX_VALUE_BYTES)
            case Get():
                size += _key_bytes(op.key)
            case DeletePrefix():
                deleted.append(op.prefix)
                size += _text_bytes("prefix", op.prefix, MAX_KEY_BYTES)
            case Range():
                size += _text_bytes("prefix", op.prefix, MAX_KEY_BYTES)
                _check_revision(op.min_mod_revision, f"range of {op.prefix!r}")
            case _:
                unreachable(op)
    for prefix in deleted:
        for key in sorted(put):
            if key.startswith(prefix):
                raise TxnRejected(
                    f"key {key!r} is put and also deleted (prefix {prefix!r}) in one transaction, "
                    "one write of a key is allowed"
                )
    return size


def unreachable(value: NoReturn) -> NoReturn:
    """``typing.assert_never``, which Python 3.10 lacks: a type checker proves that no case is missing."""
    raise AssertionError(f"case not handled: {value!r}")


def _check_revision(revision: int, where: str) -> None:
    if not 0 <= revision < 1 << 63:
        raise TxnRejected(f"{where} with revision {revision}, a number from 0 and below 2**63 expected")


def _key_bytes(key: str) -> int:
    if not key:
        raise TxnRejected("empty key, at least one byte expected")
    return _text_bytes("key", key, MAX_KEY_BYTES)


def _text_bytes(name: str, text: str, most: int) -> int:
    try:
        size = _utf8_length(text)
    except UnicodeEncodeError as error:
        raise TxnRejected(f"{name} {text[:80]!r} is not UTF-8 text: {error.reason}") from error
    if size > most:
        raise TxnRejected(f"{name} {text[:80]!r}… has {size} bytes, at most {most} are allowed")
    return size


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
