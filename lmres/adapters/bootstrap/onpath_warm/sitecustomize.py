"""In front of the path of a process that is warmed to become a worker later: see ``bootstrap.warm_main``.

``stand_by`` returns when this process is a worker, with everything done that ``onpath/sitecustomize.py`` does in one
that starts cold; the interpreter then goes on to the program as if nothing had been. Nothing else may come out of
here: an exception would let the interpreter go on to the user's program.
"""

import os

try:
    from lmres.adapters.bootstrap.warm_main import stand_by

    stand_by(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
except BaseException:  # also KeyboardInterrupt: whoever waits here is nobody yet
    import traceback

    traceback.print_exc()
    os._exit(1)
