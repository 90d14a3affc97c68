"""First of its name on the worker's path: steps aside, lets the user's namesake run, then attaches.

To the user it must be as if this file did not exist: the folder leaves ``sys.path`` and PYTHONPATH (children inherit
neither), and ``sitecustomize`` in ``sys.modules`` is the user's or absent. If the user has none, the ImportError which
the interpreter expects in that case goes out of here; an error in the user's own goes out as it is.
"""

import os
import sys


def _step_aside() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib costs milliseconds here)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here in entries:
        entries.remove(here)
        if entries:
            os.environ["PYTHONPATH"] = os.pathsep.join(entries)
        else:
            del os.environ["PYTHONPATH"]
    del sys.modules["sitecustomize"]


def _attach() -> None:
    numbers = os.environ.pop("LMRES_WORKER_FDS", None)  # for this process alone, not for its children
    # DataLoader workers and helpers are in the worker's session but do not lead it.
    if numbers is None or os.getpid() != os.getsid(0):
        return
    try:
        from lmres.adapters.bootstrap.session import attach

        attach(numbers)
    except Exception as error:
        sys.stderr.write(f"lmres: not attached, the program runs unprotected: {error!r}\n")


_step_aside()
try:
    __import__("sitecustomize")  # the user's, now that our folder is off the path
finally:
    _attach()
