"""The random generators of a process: torch, each CUDA device in use, ``random``, and NumPy's global one.

Reading a state draws nothing. NumPy is looked at only when the program has imported it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lmres.errors import CaptureError

PYTHON_VERSION = 3
PYTHON_WORDS = 625
NUMPY_WORDS = 624


@dataclass(frozen=True, slots=True, kw_only=True)
class Generators:
    """``torch``, ``cuda``: bytes, as ``get_state`` gives them; ``python``, ``numpy``: the tuples of the modules."""

    torch: torch.Tensor
    cuda: tuple[tuple[int, torch.Tensor], ...]
    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None


def current(devices: Iterable[int]) -> Generators:
    """The states at this moment. ``devices``: CUDA devices known to be in use, besides the current one."""
    cuda = []
    if torch.cuda.is_initialized():
        in_use = sorted({*devices, torch.cuda.current_device()})
        cuda = [(index, torch.cuda.default_generators[index].get_state()) for index in in_use]
    numpy = sys.modules.get("numpy.random")
    legacy = None if numpy is None else numpy.get_state(legacy=True)
    if legacy is not None and (not isinstance(legacy, tuple) or legacy[0] != "MT19937"):
        raise CaptureError("the global generator of NumPy is not MT19937: it can not be captured")
    return Generators(
        torch=torch.default_generator.get_state(), cuda=tuple(cuda), python=random.getstate(), numpy=legacy
    )


def put_back(states: Generators) -> None:
    """Set every generator. The states must be valid: see ``problem``."""
    torch.default_generator.set_state(states.torch)
    for index, state in states.cuda:
        torch.cuda.default_generators[index].set_state(state)
    random.setstate(states.python)
    if states.numpy is not None:
        import numpy

        numpy.random.set_state(states.numpy)


def problem(states: Generators) -> str | None:
    """Why these states can not be set in this process; tried on generators of our own."""
    try:
        torch.Generator().set_state(states.torch)
        random.Random().setstate(states.python)
        if states.numpy is not None:
            import numpy

            numpy.random.RandomState().set_state(states.numpy)
    except (RuntimeError, TypeError, ValueError, OverflowError, ImportError) as error:
        return f"a random generator's state is not valid here: {error}"
    for index, _ in states.cuda:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            return f"the state has a generator of CUDA device {index}, which this process does not have"
    return None
