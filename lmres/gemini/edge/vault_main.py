"""The vault process: memory of one host's ranks, and copies of others', for as long as the run needs them.

Rules:

1. It ends when its agent says so, or when there was no agent for ``linger_s`` (for a moment, if no other vault of the
   run with an agent is there: then the run is over); never because a worker or its parent dies. Signals that end a
   terminal's or a job's processes are ignored: the agent gets them too. SIGKILL always works.
2. It has a session and descriptors of its own, and no code of the training program in it.
3. Time is counted in what the loop really attended: a process that was stopped does not hold that against others.

    python -m lmres.gemini.edge.vault_main FD OPTIONS    (written by ``vault.Vault.start``)
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from lmres.gemini import session
from lmres.gemini.edge import control, host_memory, unix
from lmres.gemini.edge.channel import Channel
from lmres.gemini.edge.core import VaultCore
from lmres.gemini.edge.loop import Loop, Threads
from lmres.gemini.edge.memory import Contents, Memory
from lmres.gemini.edge.reception import Reception
from lmres.gemini.edge.services import Options, Services

_MAX_LOG_BYTES = 1 << 20
_MAX_LOG_LINE = 500
_LOOK_S = 0.5
_PART_S = 2.0
_ALONE_S = 4.0
_SWITCH_S = 0.0005
_WRITER_S = 1.0  # for what is half written to be removed
_WANTED_FILES = 16384


def log(line: str) -> None:
    """Appends one bounded line to the log (standard error). A full log starts anew: the newest lines matter."""
    with contextlib.suppress(OSError, ValueError):  # a full disk must not end the vault
        if os.fstat(2).st_size > _MAX_LOG_BYTES:
            os.ftruncate(2, 0)
        os.write(2, f"{line[:_MAX_LOG_LINE]}\n".encode(errors="replace"))


def serve(options: Options, private: socket.socket, path: Path) -> None:
    """Serves until nobody needs the vault any more. ``path``: the socket's file, removed at the end."""
    file = (path.stat().st_dev, path.stat().st_ino)
    loop = Loop(lambda error: log("".join(traceback.format_exception(error))[-_MAX_LOG_LINE:]))
    cores = len(os.sched_getaffinity(0))

    def tell(kind: str, fields: dict[str, Any]) -> None:
        reception.tell(kind, fields)

    services = Services(
        options=options,
        loop=loop,
        memory=Memory(lambda held: host_memory.room(held, services.options.memory_limit_fraction)),
        contents=Contents(),
        hashing=Threads(loop, "hash", max(1, min(4, cores // 2))),
        touching=Threads(loop, "touch", 1),
        pulling=Threads(loop, "pull", 4),
        restoring=Threads(loop, "restore", 8),
        scanning=Threads(loop, "scan", 2),
        writing=Threads(loop, "write", 1),
        tell=tell,
        log=log,
    )
    listener = control.listen(options.address)
    core = VaultCore(services, control_port=listener.getsockname()[1])
    reception = Reception(services, core)
    port = control.ControlPort(services, core, listener)
    private.setblocking(False)
    loop.watch(private, partial(_accept, private, reception, services))

    def look() -> None:
        away_s = reception.away_s
        if away_s > _PART_S:
            core.part()
        if away_s > services.options.linger_s or (away_s > _ALONE_S and not port.visited):
            log(f"no agent for {away_s:.1f} s: the vault ends")
            loop.stop()
        loop.after(_LOOK_S, look)

    look()
    log(f"vault of {options.node_id}, run {options.run_id}: process {os.getpid()}, port {core.control_port}")
    # Modules are there for good: no collection needs to look at them again.
    gc.collect()
    gc.freeze()
    loop.run()
    with contextlib.suppress(OSError):
        if (path.stat().st_dev, path.stat().st_ino) == file:  # not another vault's by now
            path.unlink()
    private.close()
    port.close()
    core.close()
    services.writing.join(_WRITER_S)
    log("the vault ends")


def _accept(private: socket.socket, reception: Reception, services: Services, _: int) -> None:
    try:
        sock, _address = private.accept()
    except OSError:
        return
    channel = Channel(
        services.loop, sock, session.FROM_HOST, on_message=lambda _, __: None, on_close=lambda _, __: None
    )
    reception.accept(channel, unix.peer(sock))


def main(argv: list[str]) -> None:
    # Threads that move bytes need the interpreter only between long calls; the loop must get it at once.
    sys.setswitchinterval(_SWITCH_S)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < _WANTED_FILES:
            most = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    private = socket.socket(fileno=int(argv[0]))
    private.set_inheritable(False)
    said = json.loads(argv[1])
    path = Path(said.pop("socket_path"))
    try:
        serve(Options(**said), private, path)
    except BaseException:
        log(traceback.format_exc())
        raise
    finally:
        # Threads that wait for a peer or a disk must not hold the process.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
