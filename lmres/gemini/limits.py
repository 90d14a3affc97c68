"""How much memory a vault may hold. Pure.

The limit is a fraction of what the host (or the container) could give if this vault held nothing: what is available now
plus what is held already. So it does not shrink because the vault itself has taken memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """All in bytes. ``available``: what the tightest of host and container could still give."""

    available: int
    held: int
    fraction: float

    @property
    def limit(self) -> int:
        return int(self.fraction * (self.available + self.held))

    def fits(self, more: int) -> bool:
        return self.held + more <= self.limit

    def refusal(self, more: int, what: str) -> str:
        """Says in numbers why ``more`` does not fit, and what to do."""
        return (
            f"{what} needs {_size(more)} of host memory, the vault holds {_size(self.held)} and may hold "
            f"{_size(self.limit)} (checkpoint.memory_limit_fraction {self.fraction:g} of {_size(self.available)} "
            f"available and what it holds): raise the fraction, lower checkpoint.replicas, or free memory"
        )


def _size(count: int) -> str:
    if count < 1 << 20:
        return f"{count} bytes"
    return f"{count / (1 << 20):.1f} MiB" if count < 1 << 30 else f"{count / (1 << 30):.2f} GiB"


def container_room(*, limit: int | None, used: int, reclaimable: int) -> int | None:
    """What a container with this limit could still give; None where it has none."""
    return None if limit is None else max(0, limit - max(0, used - reclaimable))
