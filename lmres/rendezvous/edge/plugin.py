"""The entry point of group ``torchrun.handlers``.

torch loads it whenever its elastic package is imported, also for runs with another backend, and swallows what it
raises; so it imports nothing until a handler is really asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

BACKEND = "lm_resiliency"


def get_handler() -> Callable[[Any], Any]:
    """Called by torch without arguments; returns what creates the handler."""
    return create_handler


def create_handler(parameters: Any) -> Any:
    """A rendezvous handler from torch's ``RendezvousParameters``. Ends the process with 64 on bad configuration."""
    from lmres.errors import ConfigError
    from lmres.rendezvous.edge.handler import LmresHandler

    try:
        return LmresHandler.from_parameters(parameters)
    except ConfigError as error:
        print(f"lmres: {error}", file=sys.stderr, flush=True)
        raise SystemExit(int(error.exit_code)) from error
