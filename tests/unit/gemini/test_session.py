from __future__ import annotations

import json
from typing import Any

import pytest

from lmres.errors import RecordError
from lmres.gemini import session
from lmres.gemini.inventory import Copy, Key, Part
from lmres.gemini.session import Assignment, LineBuffer, Peer, Prepare

PART = Part(digest="0" * 32, length=7)
COPY = Copy(
    rank=1,
    step=5,
    origin=2,
    shared=PART,
    own=PART,
    log=PART,
    has=("own", "log"),
    place="memory",
    finite=True,
    trust="unverified",
    topology="2 ranks as 2 nodes of 1",
)
PEER = Peer(node_id="b", address="10.0.0.2", port=4000)
TABLES = (
    session.FROM_WORKER,
    session.TO_WORKER,
    session.FROM_AGENT,
    session.TO_AGENT,
    session.FROM_VAULT,
    session.TO_VAULT,
)


def through_json(record: Any) -> Any:
    return json.loads(json.dumps(session.to_plain(record)))


def test_records_come_back_as_they_were() -> None:
    assert session.copy_from_plain(through_json(COPY)) == COPY
    assignment = Assignment(
        generation=3, ranks=(0, 1), world_size=4, topology="t", safe=(5, 2), peers=(PEER,), hub=PEER, members=("a", "b")
    )
    assert session.assignment_from_plain(through_json(assignment)) == assignment
    first = Assignment(generation=1, ranks=(), world_size=4, topology="t")
    assert session.assignment_from_plain(through_json(first)) == first
    prepare = Prepare(generation=3, step=5, origin=2, ranks=(1,), sources=(PEER,), manifests=(COPY,))
    assert session.prepare_from_plain(through_json(prepare)) == prepare
    assert prepare.key == Key(5, 2)


@pytest.mark.parametrize("field", ["rank", "step", "shared", "has", "place", "finite"])
@pytest.mark.parametrize("value", [None, -1, "x", 1.5, [1], {"digest": "zz"}])
def test_a_copy_that_is_wrong_in_any_field_is_refused(field: str, value: Any) -> None:
    body = through_json(COPY)
    body[field] = value
    if field == "place" and value == "x":
        return  # a place that a newer version may know
    with pytest.raises(RecordError):
        session.copy_from_plain(body)


@pytest.mark.parametrize("field", ["generation", "ranks", "safe", "peers", "members"])
@pytest.mark.parametrize("value", [-1, "x", [None], [1, "2", 3], {"a": 1}])
def test_an_assignment_that_is_wrong_in_any_field_is_refused(field: str, value: Any) -> None:
    body = through_json(Assignment(generation=1, ranks=(0,), world_size=1, topology="t"))
    body[field] = value
    with pytest.raises(RecordError):
        session.assignment_from_plain(body)


def test_each_message_is_checked_field_by_field() -> None:
    good = {"text": "x", "a list": [], "an object": {}, "true or false": True}
    for table in TABLES:
        for op, fields in table.items():
            message = {"op": op, **{name: good.get(wanted, 3) for name, wanted in fields.items()}}
            assert session.decode(session.encode(message), table) == message
            for name in fields:
                lacking = {key: value for key, value in message.items() if key != name}
                with pytest.raises(RecordError, match=f"{op}.{name}"):
                    session.decode(session.encode(lacking), table)


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"1", b'"x"', b"\xff\xfe", b"{}", b'{"op": 3}', b'{"op": "nothing-of-ours"}', b"[" * 100_000],
)
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(RecordError):
        session.decode(line, session.FROM_WORKER)


@pytest.mark.parametrize("value", [True, -1, 1.0, "1", None, 2**63, [1]])
def test_a_count_is_a_whole_number(value: Any) -> None:
    with pytest.raises(RecordError, match=r"withdraw\.step"):
        session.decode(session.encode({"op": "withdraw", "step": value}), session.FROM_WORKER)


def test_fields_of_a_newer_version_do_no_harm() -> None:
    assert session.decode(b'{"op":"await","more":1}', session.FROM_WORKER)["more"] == 1


def test_lines_come_out_whole_however_they_came_in() -> None:
    text = b"one\ntwo\n\nthree\nfou"
    for size in range(1, len(text)):
        lines, found = LineBuffer(), []
        for start in range(0, len(text), size):
            lines.add(text[start : start + size])
            while (line := lines.pop()) is not None:
                found.append(bytes(line))
        assert found == [b"one", b"two", b"", b"three"]


def test_a_line_without_end_is_refused() -> None:
    lines = LineBuffer(limit=10)
    lines.add(b"x" * 11)
    with pytest.raises(RecordError, match="more than 10 bytes"):
        lines.pop()
