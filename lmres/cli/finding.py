"""What one check of ``lmres doctor`` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "warn", "fail", "skip"]

BACKEND = "lm_resiliency"
"""The name of the rendezvous backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of what was found and, unless all is well, one of what to do."""

    check: str
    status: Status
    found: str
    advice: str = ""
