"""Any record survives the text; any other text is a RecordError and nothing else."""

import contextlib
import json
import string
import typing
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lmres.errors import RecordError
from lmres.rendezvous import state
from lmres.rendezvous.codec import TYPE_KEY, decode, encode
from lmres.rendezvous.plan import Cause, ExceptionInfo, Plan, Streak
from tests.unit.rendezvous.test_codec import RECORDS

KINDS: tuple[type, ...] = tuple(type(r) for r in RECORDS)
SIMPLE: tuple[type, ...] = (
    state.RunConfig,
    state.Member,
    state.Door,
    state.Lease,
    state.Gone,
    state.Hold,
    state.StopRequest,
    state.Ready,
    state.Formed,
    state.Done,
    state.Recovered,
    state.Finished,
    state.Banned,
    state.Parted,
    state.Health,
    state.Paused,
    Cause,
    ExceptionInfo,
    Streak,
)
TEXT = st.text(max_size=30)
NUMBER = st.integers(-(2**70), 2**70)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, from its annotation."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(TEXT, values(args[1]), max_size=3)
    if args:
        return st.one_of(*(values(a) for a in args))
    plain = {
        str: TEXT,
        int: NUMBER,
        bool: st.booleans(),
        float: st.floats(allow_nan=False, allow_infinity=False),
        type(None): st.none(),
    }
    return plain[hint] if hint in plain else records(hint)


def records(kind: type) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{name: values(hint) for name, hint in typing.get_type_hints(kind).items()})


@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(SIMPLE))
    record = data.draw(records(kind))
    text = encode(record)
    assert decode(kind, text) == record
    assert text.isascii()


JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def refused_or_read(kind: type, text: str) -> None:
    with contextlib.suppress(RecordError):
        assert isinstance(decode(kind, text), kind)


@given(st.sampled_from(KINDS), st.text() | st.text(alphabet=string.printable) | JSON.map(json.dumps))
def test_junk(kind: type, text: str) -> None:
    refused_or_read(kind, text)


@settings(max_examples=300)
@given(st.data())
def test_one_field_is_junk(data: st.DataObject) -> None:
    record = data.draw(st.sampled_from(RECORDS))
    body = json.loads(encode(record))
    name = data.draw(st.sampled_from(sorted(body.keys() - {TYPE_KEY})))
    refused_or_read(type(record), json.dumps({**body, name: data.draw(JSON)}))


@given(st.data())
def test_a_torn_or_dented_text(data: st.DataObject) -> None:
    record = data.draw(st.sampled_from(RECORDS))
    text = encode(record)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    refused_or_read(type(record), text[:start] + data.draw(TEXT) + text[end:])


def test_every_kind_of_record_is_covered() -> None:
    assert set(KINDS) >= set(vars(state)["_SECTIONS"].values()) | {Plan, state.Lease}
