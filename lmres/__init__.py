"""lmres: closed-loop recovery under plain torchrun. Importing this package imports neither torch nor threads."""

from __future__ import annotations

TYPE_CHECKING = False  # of ours: every worker imports this, and typing costs more than all the rest
if TYPE_CHECKING:
    from lmres.adapters.session import Session

__version__ = "0.1.0"
__all__ = ["__version__", "session"]


def session() -> Session | None:
    """The running session of this worker, or None where there is none (see ``lmres.adapters.session``)."""
    from lmres.adapters.session import session as running

    return running()
