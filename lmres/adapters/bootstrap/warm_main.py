"""A process that has imported what a worker needs, waits, and becomes one.

It is the worker's own command (same interpreter, options, script and arguments), started beforehand and held while
``site`` is imported, that is before the interpreter looks at the program. Until then only modules of the standard
library and of installed packages are imported. To become the worker it takes over environment, streams and
descriptors, attaches as a cold worker does, and returns: ``__main__``, ``sys.path[0]``, ``-m``, tracebacks and exit
codes are made by the interpreter itself, and nothing has to be imitated.

What must hold, or the agent is told ``unfit`` and this process ends:

1. No code of the program's runs before its time (``Guard``), nor a ``sitecustomize`` of the user's.
2. Every variable that an import looked at is reported, and the agent compares (``EnvironWatch``).
3. An import leaves no accelerator open, no child, no Python thread, and the random generators where they were.
4. An import that fails is not kept: half of a package would stay behind.

What an import prints is kept and printed when the worker begins. If anything goes wrong on the way to becoming the
worker, this process executes the very same command anew: a cold start with the same pid, a moment late.

Talk with the agent, on one stream socket: a length (4 bytes), then JSON; ``go`` also carries four descriptors.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from importlib.machinery import PathFinder

from lmres.adapters.bootstrap.modules import Places

TYPE_CHECKING = False  # of ours: importing typing takes longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.machinery import ModuleSpec
    from typing import Any, NoReturn

FD_VARIABLE = "LMRES_WARM_FD"
MARK_VARIABLE = "LMRES_SPARES_TOKEN"
"""Holds the room for the worker's token in the block of memory that /proc/PID/environ shows."""

ALL_NAMES = "(all names)"
"""Stands for a look at which variables there are."""

BY_PREFIX = {"tqdm.utils": "TQDM_"}
"""Modules that go through all variables for those that begin so, and use no others. (tqdm comes in with torch wherever
it is installed.) The agent compares such variables in any case, looked at or not."""

OURS = (
    "xxhash",
    "lmres.gemini.edge.client",
    "lmres.adapters.capture.restore",
    "lmres.adapters.capture.copy",
    "lmres.adapters.capture.fingerprint",
    "lmres.adapters.resume.attach",
    "lmres.adapters.watch.install",
)
"""What the protection of the state and the watch will import. None of it changes torch before the worker attaches."""

TOKEN_VARIABLE = "LMRES_WORKER_TOKEN"
FDS_VARIABLE = "LMRES_WORKER_FDS"
LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_OUTPUT_BYTES = 64 * 1024
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/davinci", "/dev/infiniband", "/dev/hl")

_SLICE_S = 0.01
_LONGEST_PAUSE_S = 1.0


class Unfit(BaseException):
    """This process can not become a worker. ``name``: the module to leave out next time; None: there is no way."""

    def __init__(self, reason: str, name: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.name = name


def stand_by(here: str) -> str:
    """Warm up and wait; returns in the worker, and only there. The result names its report channel and page."""
    channel = socket.socket(fileno=int(os.environ.pop(FD_VARIABLE)))
    channel.set_inheritable(False)
    mark = os.environ.pop(MARK_VARIABLE)
    step_aside(here)
    order, _ = _receive(channel)
    output = Output()
    try:
        places = Places()
        _refuse_customization(places)
        block = _EnvironmentBlock(mark)
        warmed = Warmed(places)
        warmed.run(order["modules"], pace=float(order["pace"]))
        ready = {"kind": "ready", "pid": os.getpid(), **warmed.facts(), "printed": output.size()}
    except Unfit as unfit:
        _send(channel, {"kind": "unfit", "name": unfit.name, "reason": unfit.reason})
        os._exit(0)
    _send(channel, ready)
    go, descriptors = _receive(channel)
    channel.close()
    return _become(go, descriptors, warmed, output, block)


def step_aside(here: str) -> None:
    """As ``onpath/sitecustomize.py`` does."""
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)
    _restore_path(os.environ, here)
    sys.modules.pop("sitecustomize", None)


def _restore_path(env: Any, here: str) -> None:
    entries = env.get("PYTHONPATH", "").split(os.pathsep)
    if here in entries:
        entries.remove(here)
        if entries:
            env["PYTHONPATH"] = os.pathsep.join(entries)
        else:
            del env["PYTHONPATH"]


# -- warming up --------------------------------------------------------------------------------------------------------


def _refuse_customization(places: Places) -> None:
    """Code of the site's or the user's that runs at every start would come after the imports here."""
    for name in ("sitecustomize", "usercustomize"):
        spec = PathFinder.find_spec(name)
        if spec is not None and not (name == "sitecustomize" and (spec.origin or "").startswith(places.library)):
            raise Unfit(f"this interpreter has a {name} of its own ({spec.origin})")


def _with_ours(names: Iterable[str]) -> Iterable[str]:
    yield from names
    if "torch" in sys.modules:
        yield from OURS


class Warmed:
    """The imports, and what they left behind."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._before = dict(os.environ)
        self._folder = os.getcwd()  # noqa: PTH109
        self._environ = EnvironWatch()
        self.changed: dict[str, str | None] = {}

    def run(self, names: Iterable[str], pace: float) -> None:
        """Import ``names``. ``pace``: seconds of sleep for each second of work, so that training is not slowed."""
        guard = Guard(self._places, pace)
        sys.meta_path.insert(0, guard)
        self._environ.begin()
        state = _random_state()
        try:
            for name in _with_ours(names):
                if name in sys.modules:
                    continue
                guard.name = name
                _import(name)
                if guard.unfit is not None:  # a bare except has swallowed it
                    raise guard.unfit
                state = _check_random(name, state)
                _check_leftovers(name)
        finally:
            self._environ.end()
            sys.meta_path.remove(guard)
        self._compare()

    def facts(self) -> dict[str, Any]:
        """What the agent has to know to judge whether this process fits."""
        return {
            "read": sorted(self._environ.read),
            "listed": self._environ.listed,
            "by": self._environ.first,
            "files": self._files(),
            "tops": sorted({name.partition(".")[0] for name in list(sys.modules)} - {"lmres", "__main__"}),
            "modules": len(sys.modules),
        }

    def _compare(self) -> None:
        now = dict(os.environ)
        for name in sorted(self._before.keys() | now.keys()):
            if self._before.get(name) != now.get(name):
                self.changed[name] = now.get(name)
        if os.getcwd() != self._folder:  # noqa: PTH109
            raise Unfit("an import changed the working directory")

    def _files(self) -> list[list[Any]]:
        """Path, mtime, size of each installed package's first file, of the site folders and of the interpreter."""
        paths = {sys.executable, *self._places.site}
        for name, module in list(sys.modules.items()):
            spec = getattr(module, "__dict__", {}).get("__spec__")
            if "." not in name and spec is not None and spec.has_location and spec.origin:
                paths.add(spec.origin)
                if spec.submodule_search_locations:
                    paths.add(os.path.dirname(spec.origin))  # noqa: PTH120
        return [[path, *stamp] for path in sorted(paths) if (stamp := file_stamp(path)) is not None]


def file_stamp(path: str) -> list[int] | None:
    """Modification time (ns), size and inode; None: it is not there."""
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size, found.st_ino]


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise Unfit(f"import {name}: {error!r}"[:500], name) from error
    except Unfit:
        raise
    except BaseException as error:
        raise Unfit(f"import {name}: {error!r}"[:500], name) from error


class Guard:
    """First in ``sys.meta_path`` while the imports run: nothing of the program's is imported, and work is paced."""

    def __init__(self, places: Places, pace: float) -> None:
        self.name: str | None = None
        self.unfit: Unfit | None = None
        self._places = places
        self._pace = pace
        self._worked_s = time.thread_time()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        self._pause()
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                if not self._places.has(spec):
                    found = f"import {self.name} leads to {fullname} in {spec.origin}, which is the program's"
                    self.unfit = Unfit(found, self.name)
                    raise self.unfit
                return spec
        return None

    def _pause(self) -> None:
        worked_s = time.thread_time() - self._worked_s
        if self._pace > 0 and worked_s >= _SLICE_S:
            time.sleep(min(_LONGEST_PAUSE_S, worked_s * self._pace))
            self._worked_s = time.thread_time()


class EnvironWatch:
    """Notes which variables are looked at through ``os.environ``."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.listed = False
        self.first: dict[str, str] = {}  # variable: the module that looked first
        self._class: Any = type(os.environ)
        self._plain = {name: self._class.__dict__[name] for name in ("__getitem__", "__iter__", "__len__")}

    def begin(self) -> None:
        plain = self._plain

        def getitem(env: Any, key: Any) -> Any:
            name = os.fsdecode(key) if isinstance(key, (str, bytes)) else repr(key)
            if name not in self.read and not _looks_by_prefix():
                self.read.add(name)
                self.first[name] = _importing()
            return plain["__getitem__"](env, key)

        def iterate(env: Any) -> Any:
            self._note_listing()
            return plain["__iter__"](env)

        def length(env: Any) -> Any:
            self._note_listing()
            return plain["__len__"](env)

        self._class.__getitem__, self._class.__iter__, self._class.__len__ = getitem, iterate, length

    def _note_listing(self) -> None:
        if not self.listed and not _looks_by_prefix():
            self.listed = True
            self.first[ALL_NAMES] = _importing()

    def end(self) -> None:
        for name, function in self._plain.items():
            setattr(self._class, name, function)


def _looks_by_prefix() -> bool:
    """Whether who looks at the environment is one of ``BY_PREFIX``."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "os", "collections.abc"):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_globals.get("__name__") in BY_PREFIX


def _importing() -> str:
    """What the list of imports is at, as the guard has it."""
    for finder in sys.meta_path:
        if isinstance(finder, Guard):
            return finder.name or ""
    return ""


def _random_state() -> list[Any]:
    """Of the generators that a program sees; None where the module is not there yet."""
    state: list[Any] = [None, None, None]
    if "random" in sys.modules:
        state[0] = sys.modules["random"].getstate()
    numpy = sys.modules.get("numpy.random.mtrand")
    if numpy is not None and hasattr(numpy, "_rand"):
        state[1] = repr(numpy._rand.get_state(legacy=False)["state"]["key"].tobytes())
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        state[2] = torch.get_rng_state().tolist()
    return state


def _check_random(name: str, before: list[Any]) -> list[Any]:
    now = _random_state()
    if any(then is not None and then != new for then, new in zip(before, now)):  # noqa: B905
        raise Unfit(f"import {name} draws random numbers", name)
    return now


def _check_leftovers(name: str) -> None:
    if threading.active_count() > 1:
        raise Unfit(f"import {name} starts a thread", name)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        raise Unfit(f"import {name} initializes CUDA", name)
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
        except OSError:
            continue
        if target.startswith(DEVICES):
            raise Unfit(f"import {name} opens {target}", name)
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        if file.read().strip():
            raise Unfit(f"import {name} starts a process", name)


# -- streams -----------------------------------------------------------------------------------------------------------


class Output:
    """Standard output and error while nobody should see them: kept in memory, and printed when the worker begins."""

    def __init__(self) -> None:
        self._kept = []
        for number in (1, 2):
            memory = os.memfd_create("lmres-warm", os.MFD_CLOEXEC)
            os.dup2(memory, number)
            self._kept.append(memory)

    def size(self) -> int:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        size = sum(os.fstat(memory).st_size for memory in self._kept)
        if size > MAX_OUTPUT_BYTES:
            raise Unfit(f"the imports print {size} bytes")
        return size

    def connect(self, descriptors: Iterable[int]) -> None:
        """From now on the streams are the worker's."""
        for number, real, memory in zip((1, 2), descriptors, self._kept):  # noqa: B905
            os.dup2(real, number)
            os.close(real)
            data = os.pread(memory, MAX_OUTPUT_BYTES, 0)
            while data:
                data = data[os.write(number, data) :]
            os.close(memory)
        self._kept = []


# -- becoming the worker -----------------------------------------------------------------------------------------------


class _EnvironmentBlock:
    """The environment as the process was started with it, which /proc/PID/environ shows.

    Whoever looks for a worker's children reads the token there, and a forked child has its parent's block. Only the
    room that was made for the token is written: what C code may have kept of the rest stays as it is.
    """

    def __init__(self, mark: str) -> None:
        self._room = f"{MARK_VARIABLE}={mark}".encode()
        try:
            with open("/proc/self/stat", "rb") as file:
                fields = file.read().rsplit(b")", 1)[1].split()
            begin, end = int(fields[47]), int(fields[48])
            with open("/proc/self/mem", "rb") as memory:
                memory.seek(begin)
                at = memory.read(end - begin).index(self._room + b"\0")
            self._at = begin + at
            self._write(self._room)
        except (OSError, ValueError, IndexError) as error:
            raise Unfit(f"a worker's token can not be put into its environment block: {error!r}") from error

    def mark(self, token: str) -> None:
        text = f"{TOKEN_VARIABLE}={token}".encode()
        if len(text) != len(self._room):
            raise ValueError(f"the token has {len(token)} characters, expected {len(self._room)} with its name")
        self._write(text)

    def _write(self, text: bytes) -> None:
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(self._at)
            memory.write(text)


def _become(
    go: dict[str, Any],
    descriptors: list[int],
    warmed: Warmed,
    output: Output,
    block: _EnvironmentBlock,
) -> str:
    env = dict(go["env"])
    channel, page, *streams = descriptors
    env[FDS_VARIABLE] = f"{channel},{page}"
    try:
        block.mark(env[TOKEN_VARIABLE])
        output.connect(streams)
        for name in ("lmres.adapters.bootstrap.warm_main", "lmres.adapters.bootstrap.modules"):
            sys.modules.pop(name, None)
        worker = dict(env)
        _restore_path(worker, go["onpath"])
        for name, value in warmed.changed.items():
            worker.pop(name, None)
            if value is not None:
                worker[name] = value
        del worker[FDS_VARIABLE]
        os.environ.clear()
        os.environ.update(worker)
    except BaseException as error:
        _start_cold(error, env, descriptors, go["executable"])
    return f"{channel},{page}"


def attach_worker(numbers: str) -> None:
    """As ``onpath/sitecustomize.py`` does."""
    try:
        from lmres.adapters.bootstrap.session import attach

        attach(numbers)
    except Exception as error:
        sys.stderr.write(f"lmres: not attached, the program runs unprotected: {error!r}\n")


def _start_cold(error: BaseException, env: dict[str, str], descriptors: list[int], executable: str) -> NoReturn:
    """The same command again, as if it were started now."""
    channel, page, *streams = descriptors
    for number, real in zip((1, 2), streams):  # noqa: B905
        try:  # noqa: SIM105
            os.dup2(real, number)
        except OSError:
            pass  # connected already
    os.write(2, f"lmres: a warm worker starts cold: {error!r}\n".encode())
    for number in (channel, page):
        os.set_inheritable(number, True)
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execve(executable, sys.orig_argv, env)


# -- messages ----------------------------------------------------------------------------------------------------------


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode("ascii")
    channel.sendall(LENGTH.pack(len(data)) + data)


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its descriptors. Without an agent there is nothing to wait for: the process ends."""
    descriptors: list[int] = []
    data = b""
    size = LENGTH.size
    while len(data) < size:
        part, ancillary, _flags, _address = channel.recvmsg(
            min(65536, size - len(data)), socket.CMSG_SPACE(4 * struct.calcsize("i"))
        )
        if not part:
            os._exit(0)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors += struct.unpack(f"{len(content) // 4}i", content[: len(content) // 4 * 4])
        data += part
        if size == LENGTH.size and len(data) == LENGTH.size:
            size += LENGTH.unpack(data)[0]
            if size > MAX_MESSAGE_BYTES:
                os._exit(1)
    for number in descriptors:
        os.set_inheritable(number, False)
    return json.loads(data[LENGTH.size :]), descriptors
