import pytest

from lmres.errors import RecordError
from lmres.gemini.inventory import MAX_COPIES, PART_NAMES, Copy, Holdings, Key, Part, topology_text
from lmres.ports import MAX_VALUE_BYTES
from lmres.rendezvous.codec import decode, encode

PART = Part(digest="0123456789abcdef" * 2, length=10**12)


def copy(**changes) -> Copy:
    values = {
        "rank": 3,
        "step": 10**9,
        "origin": 10**5,
        "shared": PART,
        "own": PART,
        "log": PART,
        "has": PART_NAMES,
        "place": "durable",
        "finite": True,
        "trust": "unverified",
        "topology": topology_text(nodes=10**4, local_world_size=16),
    }
    return Copy(**{**values, **changes})


def holdings(*copies: Copy, **changes) -> Holdings:
    values = {"node_id": "a", "incarnation": "a.1", "generation": 2, "address": "10.0.0.1", "port": 4000}
    return Holdings(**{**values, "copies": copies, **changes})


def test_goes_through_the_codec():
    record = holdings(copy(), copy(rank=4, has=("own",), place="memory"), ever=True, problem="too little memory")
    assert decode(Holdings, encode(record)) == record


def test_the_text_is_small():
    assert len(encode(holdings(*[copy()] * 32))) < MAX_VALUE_BYTES // 50
    assert len(encode(holdings(*[copy()] * MAX_COPIES))) < MAX_VALUE_BYTES


@pytest.mark.parametrize(
    "make",
    [
        lambda: Part(digest="0123", length=1),
        lambda: Part(digest="G" * 32, length=1),
        lambda: Part(digest="0" * 32, length=-1),
        lambda: copy(rank=-1),
        lambda: copy(step=-1),
        lambda: copy(origin=-1),
        lambda: copy(has=("own", "own")),
        lambda: copy(has=("weights",)),
        lambda: holdings(node_id=""),
        lambda: holdings(incarnation=""),
        lambda: holdings(generation=-1),
        lambda: holdings(port=70000),
        lambda: holdings(copy(), port=0),
        lambda: holdings(*[copy()] * (MAX_COPIES + 1)),
    ],
)
def test_records_check_themselves(make):
    with pytest.raises(ValueError):
        make()


def test_a_wrong_record_is_a_record_error():
    text = encode(holdings(copy())).replace('"memory"', '"tape"').replace('"durable"', '"tape"')
    with pytest.raises(RecordError):
        decode(Holdings, text)


def test_keys_are_ordered_by_step_and_equal_to_tuples():
    assert Key(3, 1) < Key(3, 2) < Key(4, 1)
    assert copy(step=3, origin=2).key == (3, 2)
    assert str(Key(3, 2)) == "step 3 of generation 2"


def test_topology_is_told_in_words():
    assert topology_text(nodes=2, local_world_size=4) == "8 ranks as 2 nodes of 4"
