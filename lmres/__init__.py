"""lmres: closed-loop recovery under plain torchrun. Importing this package imports neither torch nor threads."""

from __future__ import annotations

__version__ = "0.1.0"
