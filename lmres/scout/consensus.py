"""Who is wrong, when ranks that must be equal are not. Pure.

Equals watch each other: what a strict majority of three or more has is taken for right, and the others are wrong. Two
equals see that something is wrong, and not where; so do groups without a majority. Source: symmetric consensus among
equal peers (arXiv 2608.11034).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """``wrong``: empty where nobody can tell. ``right``: the others."""

    wrong: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def attributed(self) -> bool:
        return bool(self.wrong)


def judge(groups: Sequence[Sequence[int]]) -> Opinion:
    """``groups``: ranks by what they have, at least two groups."""
    ordered = sorted((tuple(sorted(group)) for group in groups if group), key=lambda g: (-len(g), g))
    total = sum(map(len, ordered))
    if total >= 3 and 2 * len(ordered[0]) > total:
        wrong = tuple(sorted(rank for group in ordered[1:] for rank in group))
        return Opinion(wrong=wrong, right=ordered[0])
    return Opinion(wrong=(), right=())


def ranks(numbers: Sequence[int]) -> str:
    """As words: rank 1; ranks 0 and 2."""
    named = [str(n) for n in numbers]
    if len(named) == 1:
        return f"rank {named[0]}"
    return f"ranks {', '.join(named[:-1])} and {named[-1]}"
