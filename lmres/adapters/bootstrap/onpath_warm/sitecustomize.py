"""In front of the path of a process that is warmed to become a worker later: see ``bootstrap.warm_main``.

``stand_by`` returns when this process is a worker. From there on it is as in ``onpath/sitecustomize.py``: the standard
library's namesake runs if there is one, or the ImportError goes out which the interpreter expects, and the worker
attaches. Before that nothing may come out of here: the interpreter would go on to the user's program.
"""

import os

try:
    from lmres.adapters.bootstrap.warm_main import attach_worker, stand_by

    numbers = stand_by(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 (no pathlib in a worker)
except BaseException:  # also KeyboardInterrupt: who waits here is no worker yet
    import traceback

    traceback.print_exc()
    os._exit(1)
try:
    __import__("sitecustomize")
finally:
    attach_worker(numbers)
