"""How this package gets into an unchanged worker: a ``sitecustomize`` in front of PYTHONPATH.

The agent calls ``bootstrap_env``; the worker's interpreter then imports ``onpath/sitecustomize.py``, which takes its
folder off the path again, lets the user's own ``sitecustomize`` run, and attaches (``session``) if this process is the
worker itself. An interpreter that ignores PYTHONPATH (``python -I``, ``-E``, ``-S``) and a program that is not Python
run as if nothing were there.

Imported in the worker before anything of the user's: this file must stay without imports that cost.
"""

from __future__ import annotations

import os

ONPATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "onpath")  # noqa: PTH100, PTH118, PTH120
"""The folder that the worker's interpreter finds first. (No pathlib: this runs at every worker's start.)"""


def bootstrap_env(env: dict[str, str]) -> dict[str, str]:
    """A copy of ``env`` in which a Python worker attaches. The user's PYTHONPATH is kept behind ours; the worker
    restores it, so that its children see what the user had."""
    users = env.get("PYTHONPATH", "")
    return {**env, "PYTHONPATH": ONPATH + os.pathsep + users if users else ONPATH}
