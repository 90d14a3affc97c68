"""Puts the watch into this process, before any code of the program's runs."""

from __future__ import annotations

import atexit
import json
import os
from typing import Any

from lmres.adapters.bootstrap import watching
from lmres.adapters.bootstrap.session import Session
from lmres.adapters.watch import phases, settings
from lmres.adapters.watch.collectives import Collectives
from lmres.adapters.watch.marks import Watch
from lmres.adapters.watch.stacks import Stacks


def build(torch: Any, text: str, session: Session) -> Watch:
    """Raises what fails; then nothing is noted, whatever is in place by then passes everything through."""
    number = settings.decode(text)
    folder = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")  # noqa: PTH100, PTH118, PTH120
    watch = Watch(session, folder, lambda reason: watching.off(session, reason))
    session.watch = watch
    phases.install(torch, watch)
    if torch.distributed.is_available():
        collectives = Collectives(torch, watch)
        collectives.install()
        watch.parts.append(collectives)
    stacks = Stacks(number)
    watch.on_let_go.append(stacks.let_go)
    watch.begin()
    atexit.register(watch.ending)  # early, so it runs late: what the program does at exit is still its own
    message = {"kind": "watch", "armed": True, "signal": stacks.signal, "stacks_fd": stacks.fd}
    session.send(json.dumps(message).encode())
    return watch
