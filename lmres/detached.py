"""Processes of an agent that outlive it: its store and its vault. One way to start them.

Such a process leads a session of its own and has nothing of this one open but a listening socket, which the parent has
bound (so that whoever comes early waits in the listen queue), and its log. Without site (``-S``) the start takes a
third less, and nothing of the training environment runs in it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def start_detached(
    code: str, arguments: Sequence[str], *, listener: socket.socket, log_path: Path
) -> subprocess.Popen[bytes]:
    """``code``: what the interpreter runs; ``arguments``: its ``sys.argv[1:]``. The socket, whose number is to be among
    them, is closed here in any case. Raises OSError."""
    try:
        log_fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            return subprocess.Popen(
                [sys.executable, "-S", "-c", code, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                cwd="/",
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )
        finally:
            os.close(log_fd)
    finally:
        listener.close()


def package_root(file: str) -> str:
    """The folder that has the package of this ``__init__`` file, for ``sys.path``."""
    return str(Path(file).resolve().parent.parent)
