"""The image as bytes: a safetensors file, stable from step to step, and refused when a field is wrong."""

from __future__ import annotations

import json
import random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from torch import nn

from lmres.adapters.capture.collect import Collector, collect
from lmres.adapters.capture.image import META, parse, plan_layout
from lmres.adapters.capture.restore import read
from lmres.adapters.capture.state import State
from lmres.adapters.capture.tensors import DTYPES, bits, core
from lmres.errors import CaptureError
from tests.unit.adapters import capture_kit as kit


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits of a type, NaN and odd zeros too."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (raw % 2).view(dtype).view(shape) if dtype is torch.bool else raw.view(dtype).view(shape)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    tensor = filled(shape, draw(st.sampled_from(list(DTYPES.values()))), draw(st.integers(0, 999)))
    for _ in range(draw(st.integers(0, 2))):
        kind = draw(st.sampled_from(["transpose", "step", "expand", "narrow"]))
        if kind == "expand":
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
        elif tensor.dim() and kind == "transpose":
            tensor = tensor.transpose(0, -1)
        elif tensor.dim() and kind == "step":
            tensor = tensor[::2]
        elif tensor.dim() and tensor.shape[0] and kind == "narrow":
            tensor = tensor[1:]
    return tensor


@settings(deadline=None, max_examples=120)
@given(st.lists(tensors(), max_size=6))
def test_any_tensors_come_back_bit_for_bit(found: list[torch.Tensor]) -> None:
    named = {str(index): tensor for index, tensor in enumerate(found)}
    image = kit.to_bytes(State(extra_tensors=named))
    here = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for name, t in named.items()}
    for tensor in here.values():
        core(tensor).zero_()
    kit.from_bytes(State(extra_tensors=here), image)
    for name, tensor in named.items():
        assert torch.equal(bits(here[name]), bits(tensor)), (tensor.dtype, tensor.shape, tensor.stride())


def test_both_parts_are_one_safetensors_file(tmp_path: Any) -> None:
    program = kit.build("adamw-bf16", 1)
    program.run(2)
    own, shared = kit.to_bytes(program.state())
    path = tmp_path / "whole.safetensors"
    path.write_bytes(own + shared)
    snapshot = collect(program.state())
    with safe_open(path, "pt") as file:
        assert set(file.metadata()) == {META}
        assert json.loads(file.metadata()[META])["format"] == 1
        for item in (*snapshot.shared, *snapshot.own):
            assert torch.equal(bits(file.get_tensor(item.name)), bits(item.tensor)), item.name
    assert len(own) % 64 == 0


def test_types_the_format_does_not_know_are_bytes() -> None:
    state = State(extra_tensors={"c": torch.ones(2, 3, dtype=torch.complex128)})
    own, shared = kit.to_bytes(state)
    loaded = read(memoryview(own), memoryview(shared))
    assert loaded.tensors["x.c"].dtype == torch.complex128
    assert loaded.tensors["x.c"].shape == (2, 3)


def test_an_empty_state_has_an_image() -> None:
    own, shared = kit.to_bytes(State())
    assert shared == b""
    assert kit.from_bytes(State(), (own, shared)) == ()


def test_a_layout_is_used_again_and_only_values_change() -> None:
    program, collector = kit.build("adamw-groups", 1), Collector()
    program.run(1)
    first = plan_layout(collector.collect(program.state()))
    program.run(3)
    second = plan_layout(collector.collect(program.state()), first)
    fresh = plan_layout(collect(program.state()))
    assert second.entries is first.entries
    assert (second.header, second.own_offsets, second.own_bytes) == (fresh.header, fresh.own_offsets, fresh.own_bytes)
    assert second.shared_offsets == first.shared_offsets


def test_a_header_that_grows_moves_the_own_tensors() -> None:
    state = State(extra_tensors={"x": torch.arange(3.0)})
    first = plan_layout(collect(state))
    long = State(extra_tensors=state.extra_tensors, extra="x" * 5000)
    second = plan_layout(collect(long), first)
    assert len(second.header) > len(first.header)
    assert second.own_bytes - first.own_bytes == len(second.header) - len(first.header)
    assert second.own_offsets == plan_layout(collect(long)).own_offsets


def test_names_with_any_characters() -> None:
    state = State(extra_tensors={'a"b\\c\n€😀': torch.ones(1)}, extra={"k😀": '\\"'})
    own, shared = kit.to_bytes(state)
    assert read(memoryview(own), memoryview(shared)).meta["extra"] == {"k😀": '\\"'}
    kit.from_bytes(state, (own, shared))


def image() -> tuple[bytes, bytes]:
    program = kit.build("adamw-groups", 1)
    program.run(1)
    return kit.to_bytes(program.state())


def changed(own: bytes, change: Any) -> bytes:
    """The own part with another header of the same length."""
    length = int.from_bytes(own[:8], "little")
    header = json.loads(own[8 : 8 + length])
    meta = json.loads(header["__metadata__"][META])
    change(header, meta)
    if META in header.get("__metadata__", {}):
        header["__metadata__"][META] = json.dumps(meta)
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = -(-(len(text) + 8) // 4096) * 4096 - 8
    return padded.to_bytes(8, "little") + text.ljust(padded) + own[8 + length :]


def spoil_entry(header: dict, **fields: Any) -> None:
    header["r0.p.first.weight"].update(fields)


SPOILT: dict[str, Any] = {
    "no metadata": lambda h, m: h.pop("__metadata__"),
    "other metadata": lambda h, m: h["__metadata__"].update(other="x"),
    "unknown dtype": lambda h, m: spoil_entry(h, dtype="X9"),
    "dtype is no text": lambda h, m: spoil_entry(h, dtype=["F32"]),
    "shape": lambda h, m: spoil_entry(h, shape=[8, 7]),
    "negative": lambda h, m: spoil_entry(h, shape=[-8, -6]),
    "boolean": lambda h, m: spoil_entry(h, shape=[True, 48]),
    "offsets": lambda h, m: spoil_entry(h, data_offsets=[0, 192]),
    "more fields": lambda h, m: spoil_entry(h, more=1),
    "a tensor less": lambda h, m: h.pop("r0.p.first.weight"),
    "format": lambda h, m: m.update(format=2),
    "meta field less": lambda h, m: m.pop("grads"),
    "meta field more": lambda h, m: m.update(more=1),
    "types": lambda h, m: m.update(types={"r0.p.first.weight": {"dtype": "float64", "shape": [8, 6]}}),
    "types unknown": lambda h, m: m.update(types={"r0.p.first.weight": {"dtype": "Tensor", "shape": [8, 6]}}),
    "parameter unknown": lambda h, m: m["roots"][0]["parameters"].append(["x", "nobody"]),
    "parameter twice": lambda h, m: m["roots"][0]["parameters"].append(m["roots"][0]["parameters"][0]),
    "group": lambda h, m: m["optimizers"][0]["groups"][0].append("nobody"),
    "settings": lambda h, m: m["settings"].pop(),
    "settings kind": lambda h, m: m["settings"][0].__setitem__(0, [1]),
    "state position": lambda h, m: m["optimizers"][0]["state"][0].__setitem__(1, 99),
    "state group": lambda h, m: m["optimizers"][0]["state"][0].__setitem__(0, -1),
    "state value": lambda h, m: m["optimizers"][0]["state"][0].__setitem__(2, {"pickle": "00"}),
    "grads": lambda h, m: m.update(grads={"r0.p.first.weight": "nobody"}),
    "generators": lambda h, m: m["generators"][0].__setitem__(0, "gpu"),
    "rng": lambda h, m: m["rng"].update(torch="nobody"),
    "rng python": lambda h, m: m["rng"]["python"].__setitem__(0, "rng.torch"),
    "rng numpy": lambda h, m: m["rng"]["numpy"].__setitem__(1, 9999),
    "note": lambda h, m: m["items"].update({"r0.p.first.weight": {"stride": [1]}}),
    "note of nobody": lambda h, m: m["items"].update(nobody={}),
    "shard": lambda h, m: m["items"].update({"r0.p.first.weight": {"shard": {"shape": [1]}}}),
    "extra tensors": lambda h, m: m.update(extra_tensors=[["x"]]),
    "states": lambda h, m: m.update(states=[["x", {"tensor": "nobody"}]]),
}


@pytest.mark.parametrize("name", sorted(SPOILT))
def test_a_wrong_field_is_refused(name: str) -> None:
    own, shared = image()
    with pytest.raises(CaptureError):
        read(memoryview(changed(own, SPOILT[name])), memoryview(shared))


def test_the_unchanged_header_is_accepted() -> None:
    own, shared = image()
    read(memoryview(changed(own, lambda header, meta: None)), memoryview(shared))


@pytest.mark.parametrize("cut", [0, 4, 8, 100, 5000])
def test_a_part_that_is_cut_off_is_refused(cut: int) -> None:
    own, shared = image()
    with pytest.raises(CaptureError):
        parse(memoryview(own[:cut]), len(shared))
    with pytest.raises(CaptureError):
        parse(memoryview(own), len(shared) - 8)


def test_random_damage_to_the_header_never_raises_anything_else() -> None:
    own, shared = image()
    length = int.from_bytes(own[:8], "little")
    chance = random.Random(4)
    for _ in range(300):
        spoilt = bytearray(own)
        for _ in range(chance.randint(1, 3)):
            spoilt[chance.randrange(8 + length)] = chance.choice(b'0129",:{}[]ax\x00\xff')
        try:
            read(memoryview(spoilt), memoryview(shared))
        except CaptureError:
            continue


def test_reading_warns_about_nothing(recwarn: pytest.WarningsRecorder) -> None:
    own, shared = image()
    loaded = read(memoryview(own), memoryview(shared))
    assert not recwarn.list
    module = nn.Linear(6, 8)
    module.weight.data.copy_(loaded.tensors["r0.p.first.weight"])
