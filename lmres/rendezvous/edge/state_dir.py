"""The private folder of one agent, and small private files in it.

The folder holds the agent's events, sockets, logs and the restart context that tells workers where to resume.
Whoever can write there can steer the run, and its default place may be the shared temporary folder. The
rules:

* It is created with mode 0700. One that exists is taken only if it is a real folder (no symbolic link, which
  another user could turn), and ours; it is then closed to others. A folder that the system shares (sticky, or
  a mount point, such as ``/`` and ``/tmp``) is refused: root owns those too, and closing one breaks the host.
* The checks look at the opened folder, not at its name, so that it can not be exchanged in between.
* Its default name is short: a Unix socket's path has room for about 100 characters.
* A file is replaced atomically: a reader sees the old one or the new one, never a part.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lmres.errors import ConfigError

_SHOWN_CHARS: Final = 16


def default_state_dir(*, run_id: str, node_id: str, environ: Mapping[str, str] | None = None) -> Path:
    """Where the state of this user's agent of that run and node lives when no ``state_dir`` is given."""
    env = os.environ if environ is None else environ
    uid = os.geteuid()
    digest = hashlib.sha256(f"{run_id}\0{node_id}".encode(errors="replace")).hexdigest()[:12]
    name = f"lmres-{uid}-{_short(run_id)}-{_short(node_id)}-{digest}"
    runtime = env.get("XDG_RUNTIME_DIR", "")
    if runtime and _is_own_folder(Path(runtime), uid):
        return Path(runtime) / name
    return Path(env.get("TMPDIR") or tempfile.gettempdir()) / name


def prepare_state_dir(path: Path) -> Path:
    """Creates the folder or takes an existing one, and returns its absolute path. Raises ConfigError."""
    path = path.expanduser().absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise _refused(path, "it is a symbolic link", "give the folder it points to") from error
        if path.exists() and not path.is_dir():
            raise _refused(path, "it is not a folder", "remove it or give another folder") from error
        if path.is_dir() and path.stat().st_uid != os.geteuid():
            raise _refused(path, _owner(path.stat().st_uid), "give a folder of your own") from error
        reason = error.strerror or str(error)
        raise _refused(path, f"it can not be made or opened ({reason})", "give a folder that can be") from error
    try:
        _take(path, folder)
    finally:
        os.close(folder)
    return path


def _take(path: Path, folder: int) -> None:
    found = os.fstat(folder)
    if found.st_uid != os.geteuid():
        raise _refused(path, _owner(found.st_uid), "give a folder of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        if found.st_mode & stat.S_ISVTX or path.is_mount():
            raise _refused(path, "it is a folder that the system shares", "give a folder inside it")
        # A folder that the user made before: ours from now on, and what we write in it is private anyway.
        os.fchmod(folder, 0o700)
    elif not os.access(path, os.W_OK | os.X_OK):
        raise _refused(path, "it can not be written", f"run: chmod 700 {path}")


def lock_state_dir(path: Path) -> int:
    """Takes the folder for this agent and returns the descriptor that holds it. Raises ConfigError if it is in use.

    The kernel lets go of it when the agent ends, however it ends.
    """
    fd = os.open(path / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace") or "unknown"
        os.close(fd)
        raise ConfigError(
            f"state_dir {path} is in use by a live agent on this host, pid {holder}: two agents with one node_id? "
            f"Give each agent its own, for example --rdzv-conf=node_id=NAME"
        ) from error
    except OSError:
        pass  # a file system without locks, or a full one: the store refuses a second agent too
    return fd


def write_private_json(path: Path, obj: Mapping[str, object]) -> None:
    """Replaces the file by one JSON object, mode 0600, atomically.

    Raises ConfigError when the place can not hold a file (no such folder, no permission), and OSError with the path
    in its message when writing fails, for example on a full disk; the old file is then untouched.
    """
    data = json.dumps(obj, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    temporary: str | None = None
    try:
        # mkstemp creates with mode 0600, in the same folder, so that the rename stays within one file system.
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:64]}.", suffix=".tmp", dir=path.parent)
        with open(descriptor, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        _discard(temporary)
        raise ConfigError(
            f"can not write {path}: {error.strerror}; give the path of a file in a folder that exists and is yours"
        ) from error
    except OSError as error:
        _discard(temporary)
        raise OSError(
            error.errno, f"can not write {path}: {error.strerror}; free space or give another folder"
        ) from error
    except BaseException:
        _discard(temporary)
        raise


def _discard(temporary: str | None) -> None:
    if temporary is not None:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()


def _short(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "_", text)[:_SHOWN_CHARS]


def _is_own_folder(path: Path, uid: int) -> bool:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return False
    return path.is_absolute() and stat.S_ISDIR(found.st_mode) and found.st_uid == uid and os.access(path, os.W_OK)


def _owner(uid: int) -> str:
    return f"user {uid} owns it and this process runs as user {os.geteuid()}"


def _refused(path: Path, found: str, remedy: str) -> ConfigError:
    return ConfigError(f"state_dir {path} is refused: {found}; {remedy}")
