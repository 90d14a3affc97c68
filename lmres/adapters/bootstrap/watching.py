"""Brings what watches the worker into it: when torch has been imported, before the program's code.

Nothing depends on it in the worker: if anything of it fails, the agent is told once and training goes on unwatched.
"""

from __future__ import annotations

import os
import sys

from lmres.adapters.bootstrap.session import Session
from lmres.adapters.bootstrap.steps import ImportWatch

TYPE_CHECKING = False  # of ours: importing typing takes longer than all the rest
if TYPE_CHECKING:
    from types import ModuleType

VARIABLE = "LMRES_WATCH"


def install(session: Session) -> None:
    text = os.environ.pop(VARIABLE, None)  # for this process alone
    if text is None:
        return

    def attach(torch: ModuleType) -> None:
        try:
            from lmres.adapters.watch.install import build

            build(torch, text, session)
        except Exception as error:
            off(session, str(error) or repr(error))

    if "torch" in sys.modules:
        attach(sys.modules["torch"])
    else:
        sys.meta_path.insert(0, ImportWatch("torch", attach, "the worker is not watched"))


def off(session: Session, reason: str) -> None:
    import json

    session.send(json.dumps({"kind": "watch", "armed": False, "reason": reason[:2000]}).encode())
