"""What all parts of the vault process share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lmres.gemini.edge.loop import Loop, Threads
from lmres.gemini.edge.memory import Contents, Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``durable_every``: steps between two durable keys, None for none. ``linger_s``: how long without an agent.

    ``compare``: whether images of equals are compared, and whether what differs is held back (``certify``).
    ``anchors``: whether keys that replay certifies are kept, for which each rank has two more slots.
    """

    run_id: str
    node_id: str
    address: str
    memory_limit_fraction: float
    linger_s: float
    durable_directory: str | None
    durable_every: int | None
    durable_keep: int
    compare: Literal["off", "report", "hold"] = "off"
    anchors: bool = False


@dataclass(slots=True, kw_only=True)
class Services:
    """``options`` may change when an agent comes back. ``tell``: an event for the agent. ``log``: a line of the log."""

    options: Options
    loop: Loop
    memory: Memory
    contents: Contents
    hashing: Threads
    touching: Threads
    pulling: Threads
    restoring: Threads
    scanning: Threads
    writing: Threads
    tell: Callable[[str, dict[str, Any]], None]
    log: Callable[[str], None]
