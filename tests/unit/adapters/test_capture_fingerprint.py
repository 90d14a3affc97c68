"""The quick number for a program's parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lmres.adapters.capture.fingerprint import fingerprint
from tests.unit.adapters import capture_kit as kit


def test_it_is_another_after_each_step_and_the_same_for_equal_parameters() -> None:
    program, twin = kit.build("adamw-groups", 1), kit.build("adamw-groups", 2)
    found = []
    for _ in range(6):
        found.append(fingerprint((program.model,)))
        for mine, other in zip(twin.model.parameters(), program.model.parameters(), strict=True):
            mine.data.copy_(other)
        assert fingerprint((twin.model,)) == found[-1]
        program.step()
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (1000,), (3, 300)])
def test_any_parameter(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.ones(shape).to(dtype), requires_grad=False)
    first = fingerprint((model,))
    assert first == fingerprint((model,))
    assert 0 <= first < 1 << 64
    if model.a.numel():
        model.a.data.zero_()
        assert fingerprint((model,)) != first


def test_strides_and_repetitions() -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.arange(6000.0).view(2, 3000).t())
    model.b = nn.Parameter(torch.ones(1).expand(4))
    first = fingerprint((model,))
    model.b.data = torch.full((1,), 2.0).expand(4)
    assert fingerprint((model,)) != first


def test_it_changes_nothing() -> None:
    model = kit.Net()
    versions = [parameter._version for parameter in model.parameters()]
    state = torch.get_rng_state()
    fingerprint((model,))
    assert versions == [parameter._version for parameter in model.parameters()]
    assert torch.equal(state, torch.get_rng_state())
