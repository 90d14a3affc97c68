"""Whether a program that was brought back stands where it stood: its Python values against those of its first life.

Values that no two lives share are left out: those under a name that may come from a clock (``clocks``), and those that
name the life itself (its process id, its master port; its generation where the source says that it is one). A program
that loaded a checkpoint of its own began later than the first life did. Then three more kinds may differ: what has not
changed since the loop began, then and now (the step it began at); what only this life's set-up made (the checkpoint
that it read); and variables that this life has not come to yet (what it will save).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"[^.]*\.[A-Za-z_0-9]*")
_MISSING = "(absent)"
WAYS_OUT = (
    "Ways out: let the program read LMRES_RESUME_STEP and start its loop there (workers.resume: env); save and load its"
    " own checkpoint; register what it keeps with lmres.session().add_state(name, object); or start anew with"
    " workers.resume: none"
)
MAX_SHOWN = 6
MIN_TELLING = 4
"""A shorter text, such as a generation, looks like any counter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    path: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{_readable(self.path)} was {_short(self.then)}, is {_short(self.now)}"


def differences(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    volatile: frozenset[str],
    life_then: Mapping[str, str],
    life_now: Mapping[str, str],
    named_after_life: frozenset[str] = frozenset(),
    own_start: OwnStart | None = None,
) -> list[Difference]:
    """All paths whose values differ. ``life_*``: what names a life, label to text. ``named_after_life``: variables that
    the program has assigned from such a name; without that only a long one is known by its look."""
    found = []
    lives = [(life_then[label], life_now[label]) for label in sorted(life_then.keys() & life_now.keys())]
    for path in sorted(then.keys() | now.keys()):
        a, b = then.get(path, _MISSING), now.get(path, _MISSING)
        if same(a, b) or not volatile.isdisjoint(_NAME.findall(path)):
            continue
        least = 1 if not named_after_life.isdisjoint(_NAME.findall(path)) else MIN_TELLING
        if _name_lives(a, b, [pair for pair in lives if len(pair[0]) >= least and len(pair[1]) >= least]):
            continue
        if own_start is not None and own_start.explains(path, a, b):
            continue
        found.append(Difference(path=path, then=a, now=b))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnStart:
    """What is known of a program that started from a checkpoint of its own.

    ``settled_then``: paths whose values had not changed since the first life's loop began. ``first_now``: the values
    when this life's loop began. ``variables_now``: those that this life has assigned.
    """

    settled_then: frozenset[str]
    first_now: Mapping[str, Any]
    variables_now: frozenset[str]

    def explains(self, path: str, then: Any, now: Any) -> bool:
        if now is _MISSING:
            return variable(path) not in self.variables_now
        settled_now = path in self.first_now and same(self.first_now[path], now)
        return settled_now and (then is _MISSING or path in self.settled_then)


def variable(path: str) -> str:
    """The variable that a path begins with, with its function."""
    found = _VARIABLE.match(path)
    return found.group() if found is not None else path


def same(a: Any, b: Any) -> bool:
    """Equal in type and value; not-a-number equals itself."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def summary(found: Sequence[Difference]) -> str:
    shown = "; ".join(str(d) for d in found[:MAX_SHOWN])
    more = len(found) - MAX_SHOWN
    return shown + (f"; and {more} more" if more > 0 else "")


def _name_lives(a: Any, b: Any, lives: Sequence[tuple[str, str]]) -> bool:
    """Whether two values are the same but for names of their lives."""
    if type(a) is not type(b) or not isinstance(a, (int, str)) or isinstance(a, bool):
        return False
    if (str(a), str(b)) in lives:
        return True
    if not isinstance(a, str) or a is _MISSING or b is _MISSING:
        return False
    pieces = re.compile("|".join(re.escape(text) for pair in lives for text in pair) or "(?!)")
    known = [set(pair) for pair in lives]
    there, here = pieces.findall(a), pieces.findall(b)
    return (
        len(there) == len(here)
        and pieces.split(a) == pieces.split(b)
        and all(any({x, y} <= pair for pair in known) for x, y in zip(there, here, strict=True))
    )


def _readable(path: str) -> str:
    return re.sub(r"^\d+:", "", path)


def _short(value: Any) -> str:
    text = repr(value) if value is not _MISSING else _MISSING
    return text if len(text) <= 80 else text[:77] + "..."
