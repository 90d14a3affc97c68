"""Text for a terminal: cleaned, cut, wrapped, in columns.

What comes from a store or a file was written by others and may hold anything: every such value goes through
``clean`` before it is printed. JSON needs none of this, since its text is escaped to ASCII.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

WIDTH = 100
MAX_CHARS = 400
_LEAST_CELL = 8
_GAP = "  "


def columns() -> int:
    """The width to print for: the terminal's within reason, 100 where there is none."""
    if not sys.stdout.isatty():
        return WIDTH
    return max(72, min(200, shutil.get_terminal_size((WIDTH, 24)).columns))


def clean(value: object, limit: int = MAX_CHARS) -> str:
    """One line of printable characters, at most ``limit`` of the value's; the others are shown as escapes."""
    text = str(value)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])
    return shown if len(text) <= limit else f"{shown}.."


def clean_lines(value: object, limit: int = 2000) -> str:
    """As ``clean``, for text whose line breaks are meant."""
    return "\n".join(clean(line, limit) for line in str(value).split("\n"))


def cut(text: str, width: int) -> str:
    """The text, or its beginning with a mark."""
    return text if len(text) <= width else f"{text[: max(0, width - 2)]}.."


def wrap(text: str, *, width: int, indent: str = "", hanging: str | None = None) -> list[str]:
    """Lines of at most ``width`` columns; a word that is longer is broken."""
    later = indent if hanging is None else hanging
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=later) or [indent.rstrip()]


def table(rows: Sequence[Sequence[str]], *, width: int, shrink: Sequence[int] = (), indent: str = "") -> list[str]:
    """Rows in aligned columns. Where the width does not do, the widest of the columns in ``shrink`` are cut."""
    count = len(rows[0])
    widths = [max(len(row[i]) for row in rows) for i in range(count)]
    room = width - len(indent) - len(_GAP) * (count - 1)
    while sum(widths) > room:
        widest = max(shrink, key=lambda i: widths[i], default=None)
        if widest is None or widths[widest] <= _LEAST_CELL:
            break
        widths[widest] -= 1
    return [
        (indent + _GAP.join(cut(cell, w).ljust(w) for cell, w in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def names(values: Sequence[str], most: int = 20) -> str:
    """Names in a sentence, cleaned and bounded; "none" for no names."""
    shown = ", ".join(clean(v, 128) for v in values[:most])
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return f"{shown}{more}" or "none"


def seconds(value: float | None) -> str:
    """Seconds to two places; "-" where not known."""
    return "-" if value is None else f"{value:.2f}"


def size_text(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
