"""The safetensors layout: what the library reads and writes, and nothing that lies."""

from __future__ import annotations

import json
import random
import struct

import pytest

from lmres.errors import RecordError
from lmres.gemini.layout import DTYPE_BITS, Entry, decode_header, encode_header, header_length


def entry(name: str, begin: int, count: int, dtype: str = "U8") -> Entry:
    return Entry(name=name, dtype=dtype, shape=(count,), begin=begin, end=begin + count * DTYPE_BITS[dtype] // 8)


def raw(said: object, data: int = 0) -> bytes:
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def tensor(begin: int, end: int, dtype: object = "U8", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_there_and_back() -> None:
    entries = (
        entry("b", 0, 3),
        entry("nothing", 3, 0),
        entry('"ü\n', 3, 4, "F32"),
        Entry(name="scalar", dtype="F64", shape=(), begin=19, end=27),
        Entry(name="matrix", dtype="BF16", shape=(2, 3), begin=27, end=39),
    )
    header = encode_header(reversed(entries), {"step": "7"})
    found = decode_header(header, total_length=len(header) + 39)
    assert found.entries == entries
    assert found.metadata == {"step": "7"}
    assert (found.header_length, found.data_length, found.length) == (len(header), 39, len(header) + 39)
    assert len(header) % 8 == 0 and header_length(header[:8]) == len(header)
    assert decode_header(memoryview(header + bytes(39)), total_length=len(header) + 39) == found


def test_no_tensors() -> None:
    header = encode_header(())
    assert decode_header(header, total_length=len(header)).entries == ()


def test_what_the_library_writes_is_read_and_the_other_way_round() -> None:
    numpy = pytest.importorskip("numpy")
    safetensors = pytest.importorskip("safetensors.numpy")
    dtypes = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "bool")
    tensors = {f"t.{n}": numpy.arange(6).reshape(2, 3).astype(dtype) for n, dtype in enumerate(dtypes)}
    tensors["empty"] = numpy.zeros((0, 5), "float32")
    tensors["scalar"] = numpy.array(2.5)
    data = safetensors.save(tensors, {"a": "b"})
    found = decode_header(data, total_length=len(data))
    assert found.metadata == {"a": "b"}
    for each in found.entries:
        place = data[found.header_length + each.begin : found.header_length + each.end]
        assert place == tensors[each.name].tobytes() and each.shape == tensors[each.name].shape
    ours = encode_header(found.entries, found.metadata) + data[found.header_length :]
    again = safetensors.load(ours)
    assert set(again) == set(tensors)
    for name, value in tensors.items():
        assert again[name].dtype == value.dtype and (again[name] == value).all()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "too few"),
        (b"\0" * 7, "too few"),
        (b"\0" * 8, "0 bytes"),
        (b"\xff" * 8, "are allowed"),
        (struct.pack("<Q", 100) + b"{}", "ends at byte 108, only 10"),
        (raw(b"[]"), "does not begin"),
        (raw(b" {}"), "does not begin"),
        (raw(b"{} x"), "no JSON"),
        (raw(b'{"a": \xff}'), "no JSON"),
        (raw(b'{"a":' * 50_000), "nested|no JSON"),
        (raw(b'{"a": NaN}'), "described by"),
        (raw({"__metadata__": []}), "table of texts"),
        (raw({"__metadata__": {"a": 1}}), "table of texts"),
        (raw({"a": 1}), "described by"),
        (raw({"a": {}}), "has the type None"),
        (raw({"a": tensor(0, 1, "X9")}, 1), "unknown type"),
        (raw({"a": tensor(0, 1, ["U8"])}, 1), "has the type"),
        (raw({"a": tensor(0, 1, shape="1")}, 1), "has the shape"),
        (raw({"a": tensor(0, 1, shape=[-1])}, 1), "has the shape"),
        (raw({"a": tensor(0, 1, shape=[1.0])}, 1), "has the shape"),
        (raw({"a": tensor(0, 1, shape=[True])}, 1), "has the shape"),
        (raw({"a": tensor(0, 1, shape=[1] * 65)}, 1), "has the shape"),
        (raw({"a": tensor(0, 1, shape=[2**62, 2**62])}, 1), "needs"),
        (raw({"a": tensor(0, 1, shape=[2])}, 1), "needs 2 bytes and has 1"),
        (raw({"a": tensor(0, 1, "F4", [1])}, 1), "needs 0.5 bytes"),
        (raw({"a": {**tensor(0, 1), "data_offsets": [0]}}, 1), "has the place"),
        (raw({"a": {**tensor(0, 1), "data_offsets": [-1, 0]}}, 1), "has the place"),
        (raw({"a": tensor(1, 0, shape=[0])}, 1), "lies at bytes 1 to 0"),
        (raw({"a": tensor(1, 2)}, 2), "expected to begin at 0"),
        (raw({"a": tensor(0, 2), "b": tensor(1, 3)}, 3), "expected to begin at 2"),
        (raw({"a": tensor(0, 2), "b": tensor(3, 4)}, 4), "expected to begin at 2"),
        (raw({"a": tensor(0, 2)}, 1), "2 bytes|end at byte"),
        (raw({"a": tensor(0, 2)}, 3), "end at byte"),
        (raw(b'{"a": 1, "a": 2}'), "stands twice"),
    ],
)
def test_headers_that_lie(data: bytes, why: str) -> None:
    with pytest.raises(RecordError, match=why):
        decode_header(data, total_length=len(data))


@pytest.mark.parametrize(
    "entries",
    [
        (entry("a", 0, 2), entry("a", 2, 2)),
        (entry("__metadata__", 0, 2),),
        (entry("a", 0, 2), entry("b", 1, 2)),
        (entry("a", 1, 2),),
        (Entry(name="a", dtype="Q8", shape=(1,), begin=0, end=1),),
        (Entry(name="a", dtype="U8", shape=(2,), begin=0, end=1),),
    ],
)
def test_tables_that_do_not_fit_are_not_written(entries: tuple[Entry, ...]) -> None:
    with pytest.raises(RecordError):
        encode_header(entries)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_headers_are_refused_or_read_never_worse(seed: int) -> None:
    chance = random.Random(seed)
    header = encode_header((entry("a", 0, 8, "F32"), entry("b", 32, 5)), {"k": "v"})
    for _ in range(200):
        damaged = bytearray(header)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            found = decode_header(bytes(damaged), total_length=len(header) + 37)
        except RecordError:
            continue
        assert found.length == len(header) + 37
        assert sum(each.length for each in found.entries) == found.data_length
