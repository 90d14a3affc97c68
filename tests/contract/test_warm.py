"""Warm workers: the same as cold ones in all that a program or torch can see, only earlier; never in doubt."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmres.adapters.bootstrap import bootstrap_env
from lmres.adapters.watch import VARIABLE as WATCH
from lmres.adapters.watch import variable_text
from lmres.rendezvous.edge.workers.process import WorkerProcess
from lmres.rendezvous.edge.workers.stop import stop_workers
from lmres.rendezvous.edge.workers.warm import _MAX_EXCLUDED, FIRST_GUESS, WarmPool, names_of_report
from lmres.rendezvous.edge.workers.warm_fit import FILE, Launch
from tests.contract.workers_kit import BOUND_S, Watched, gone, read_when_there, until, wait_gone

SOME = ("json", "decimal", "multiprocessing", "logging", "concurrent.futures")


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str
    reports: list[str]


class Pair:
    """Workers started with a pool, and what the pool says."""

    def __init__(self, folder: Path, modules: tuple[str, ...] = SOME, **options: Any) -> None:
        self.folder = folder
        self.token = os.urandom(8).hex()
        self.spawned: list[int] = []
        self.gone: list[int] = []
        self.pool = WarmPool(
            token_length=len(self.token), on_spawn=self.spawned.append, on_gone=self.gone.append,
            **{"min_available_bytes": 0, **options},
        )  # fmt: skip
        self.pool.learn(modules)
        self.pool.start()
        self.watched = Watched(token=self.token, prepare_env=bootstrap_env, warm=self.pool)
        self.program = folder / "program"
        self.program.mkdir()

    def write(self, name: str, text: str) -> str:
        file = self.program / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return str(file)

    def launch(self, *args: str, env: dict[str, str] | None = None) -> WorkerProcess:
        full = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "RANK": "0", "PYTHONHASHSEED": "7", **(env or {})}
        with (self.folder / "out").open("w") as out, (self.folder / "err").open("w") as err:
            return self.watched.launch(sys.executable, "-u", *args, env=full, stdout=out, stderr=err)

    def finish(self, worker: WorkerProcess) -> Ran:
        if "exception" in self.reports(worker):
            worker.release()
        status = worker.wait(BOUND_S)
        until(lambda: "exit" in self.watched.order, "the exit is seen")
        order, self.watched.order[:] = self.watched.order[:-1], []
        return Ran(status, (self.folder / "out").read_text(), (self.folder / "err").read_text(), order)

    def reports(self, worker: WorkerProcess) -> list[str]:
        until(lambda: "holding" in self.watched.order or worker.exit_status() is not None, "the worker's end")
        return self.watched.order

    def warm_up(self, count: int = 1) -> None:
        self.pool.refill(paced=False)
        try:
            until(lambda: self.pool.ready >= count, f"{count} processes are ready")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.pool._said} {(self.folder / 'err').read_text()}") from None

    def both(self, *args: str, env: dict[str, str] | None = None) -> tuple[Ran, Ran]:
        """The same launch cold and warm."""
        cold = self.finish(self.launch(*args, env=env))
        self.warm_up()
        pids = self.pool.pids
        worker = self.launch(*args, env=env)
        assert worker.pid in pids, "it started cold"
        return cold, self.finish(worker)

    def is_warm(self, *args: str, env: dict[str, str] | None = None) -> bool:
        """Start once more, and say whether it was warm."""
        pids = self.pool.pids
        worker = self.launch(*args, env=env)
        self.finish(worker)
        return worker.pid in pids

    def close(self) -> None:
        self.watched.close()
        self.pool.close()
        assert self.pool.pids == ()
        assert all(gone(pid) for pid in self.spawned)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


ALL_THERE_IS = """
    import gc, os, resource, signal, site, subprocess, sys, threading, warnings
    import re
    show = lambda *words: print(re.sub("0x[0-9a-f]+", "ADDRESS", " | ".join(map(str, words))))
    show(sys.argv, sys.orig_argv, sys.path, sys.executable, sys.prefix, sys.flags, sys._xoptions, sys.warnoptions)
    show(__name__, globals().get("__file__"), __package__, __spec__ and __spec__.name, type(__loader__), __doc__)
    show(sorted(globals()), __builtins__, sys.modules["__main__"].__dict__ is globals(), "sitecustomize" in sys.modules)
    show(list(os.environ.items()), os.getenv("RANK"))
    show(subprocess.run(["/usr/bin/env"], capture_output=True, text=True).stdout)
    show(os.getcwd(), os.getpid() == os.getsid(0) == os.getpgrp(), os.umask(0o22), os.nice(0), os.sched_getscheduler(0))
    show([resource.getrlimit(n) for n in range(16)], sorted(os.sched_getaffinity(0)))
    show([signal.getsignal(n) for n in range(1, 65)], signal.pthread_sigmask(signal.SIG_BLOCK, []))
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        show(name, stream is getattr(sys, "__%s__" % name), type(stream), stream.name, stream.mode, stream.encoding,
             stream.errors, stream.line_buffering, stream.write_through, stream.isatty(), stream.seekable(),
             type(stream.buffer), stream.fileno(), stream.newlines)
    show(sys.stdout.tell() > 0, warnings.filters, gc.isenabled(), gc.get_threshold(), threading.active_count())
    show(sys.getrecursionlimit(), hash("a"), site.ENABLE_USER_SITE, sys.dont_write_bytecode)
    show([type(f) for f in sys.meta_path])
    show([name for name in sorted(sys.modules) if name.startswith("lmres")], sys.path_hooks, sys.getswitchinterval())
    show(len(os.listdir("/proc/self/fd")), open("/proc/self/cmdline", "rb").read(), open("/proc/self/comm").read())
    show(open("/proc/self/environ").read().split("\\0").count("LMRES_WORKER_TOKEN=" + os.environ["LMRES_WORKER_TOKEN"]))
    show(sys.gettrace(), sys.getprofile(), sys.exc_info(), sys.stdin.buffer.raw.closefd)
    type("Environ", (), {})
    try:
        os.environ["NOT THERE"]
    except KeyError as error:
        show(error.args, len(os.environ), os.environ.copy() == dict(os.environ))
"""


@pytest.mark.parametrize(
    "how",
    ["script", "link", "module", "package", "submodule", "folder", "-X dev", "-W error", "-O -B", "path", "safe path"],
)
def test_a_program_sees_what_it_would_see_cold(pair: Pair, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = pair.write("main.py", ALL_THERE_IS)
    env: dict[str, str] = {}
    args = [script]
    monkeypatch.chdir(pair.folder)
    if how == "link":
        (pair.folder / "link.py").symlink_to(script)
        args = ["link.py"]
    elif how in ("module", "package", "submodule"):
        monkeypatch.chdir(pair.program)
        pair.write("pack/__init__.py", "")
        pair.write("pack/__main__.py", ALL_THERE_IS)
        pair.write("pack/sub.py", ALL_THERE_IS)
        args = ["-m", {"module": "main", "package": "pack", "submodule": "pack.sub"}[how]]
    elif how == "folder":
        pair.write("__main__.py", ALL_THERE_IS)
        args = [str(pair.program)]
    elif how.startswith("-"):
        args = [*how.split(), script]
    elif how == "path":
        env = {"PYTHONPATH": f"{pair.folder}:/nowhere"}
    elif how == "safe path":
        env = {"PYTHONSAFEPATH": "1"}
    cold, warm = pair.both(*args, "--flag", "a b", "é\udcff", env=env)
    assert cold.status == 0, cold.err
    assert warm.out == cold.out
    assert warm == cold


ENDS = {
    "exit 3": "import sys; print('x'); sys.exit(3)",
    "exit text": "import sys; sys.exit('a message')",
    "exit none": "raise SystemExit",
    "_exit": "import os; os._exit(9)",
    "exception": "class Broken(Exception): pass\ndef f():\n    raise Broken('é')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
    "interrupt": "raise KeyboardInterrupt",
    "syntax": "print('never'\n",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)",
    "aborted": "import os; os.abort()",
    "hook": "import sys\nsys.excepthook = lambda *a: print('mine', a[1])\nraise ValueError(1)",
    "atexit": "import atexit\natexit.register(lambda: print('bye'))\natexit.register(lambda: 1 / 0)",
    "thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\nprint('on')",
    "recursion": "def f(): f()\nf()",
    "exec": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(1); raise SystemExit(5)'])",
    "warning": "import warnings\nwarnings.warn('careful')\nimport logging\nlogging.warning('log')",
    "unraisable": "class A:\n    def __del__(self): 1 / 0\na = A()\ndel a\nprint('on')",
    "source": "import inspect\ndef f():\n    return 1  # here\nprint(inspect.getsource(f), inspect.getfile(f))",
}


@pytest.mark.parametrize("how", sorted(ENDS))
def test_it_ends_as_it_would_cold(pair: Pair, how: str) -> None:
    cold, warm = pair.both(pair.write("main.py", ENDS[how]))
    cold_err, warm_err = (re.sub("0x[0-9a-f]+", "ADDRESS", ran.err) for ran in (cold, warm))
    assert warm_err == cold_err
    assert (warm.status, warm.out, warm.reports) == (cold.status, cold.out, cold.reports)


@pytest.mark.parametrize("args", [("missing.py",), ("-m", "no_such_module_here"), ("-m", "json")])
def test_a_program_that_can_not_run(pair: Pair, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pair.folder)
    cold, warm = pair.both(*args)
    assert cold.status != 0
    assert warm == cold


def test_the_fault_handler_writes_to_the_workers_stream(pair: Pair) -> None:
    script = pair.write("main.py", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    cold, warm = pair.both("-X", "faulthandler", script)
    assert cold.status == warm.status == -signal.SIGSEGV
    assert "main.py" in cold.err
    assert warm.err.splitlines()[3:5] == cold.err.splitlines()[3:5]


def test_children_of_every_kind(pair: Pair) -> None:
    script = pair.write(
        "main.py",
        """
        import multiprocessing, os, pickle, subprocess, sys
        from concurrent.futures import ProcessPoolExecutor
        class Thing:
            def __init__(self, n): self.n = n
        def work(thing):
            return Thing(thing.n + 1)
        if __name__ == "__main__":
            print(pickle.loads(pickle.dumps(Thing(3))).n, Thing.__module__)
            for method in ("spawn", "fork", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.apply(work, (Thing(1),)).n)
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                print(pool.submit(work, Thing(5)).result().n)
            child = "import os, sys; print(sys.path, sorted(k for k in os.environ if 'LMRES' in k or 'PYTHON' in k))"
            print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
        """,
    )
    cold, warm = pair.both(script)
    assert cold.status == 0, cold.err
    assert warm == cold


def test_all_that_a_worker_started_is_stopped_with_it(pair: Pair, tmp_path: Path) -> None:
    """A forked child has the environment block that the warm process was started with: the token is put in there."""
    script = pair.write(
        "main.py",
        """
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open("pid.new", "w") as file: file.write(str(os.getpid()))
                os.rename("pid.new", sys.argv[1])
                time.sleep(600)
            os._exit(0)
        os.wait()
        time.sleep(600 if len(sys.argv) > 2 else 0)
        """.replace('"pid.new"', repr(str(tmp_path / "pid.new"))),
    )
    strays = []
    for warm in (False, True):
        stray = tmp_path / "stray"
        if warm:
            pair.warm_up()
        worker = pair.launch(script, str(stray))
        strays.append(int(read_when_there(stray)))
        stray.unlink()
        assert (worker.pid in pair.spawned) == warm
        worker.wait(BOUND_S)
        stop_workers([worker], 0.2)
        wait_gone(strays[-1])


def test_spares_survive_the_stop_of_workers(pair: Pair) -> None:
    script = pair.write("main.py", "import time; time.sleep(600)")
    worker = pair.launch(script)
    pair.warm_up()
    stop_workers([worker], 0.2)
    assert worker.exit_status() == -signal.SIGTERM
    assert pair.pool.ready == 1
    assert not gone(pair.pool.pids[0])


# -- when it must start cold -------------------------------------------------------------------------------------------


def test_nothing_is_warmed_before_it_is_asked_for_and_a_fresh_launch_never_waits(pair: Pair) -> None:
    script = pair.write("main.py", "print(1)")
    pair.finish(pair.launch(script))
    assert pair.pool.pids == ()
    pair.pool.refill()
    worker = pair.launch(script)  # in the middle of the imports, or before
    assert worker.pid not in pair.spawned
    until(lambda: pair.pool.pids == (), "what was importing is gone: it would compete with the start")
    pair.finish(worker)


@pytest.mark.parametrize(
    ("change", "warm"),
    [
        ({"RANK": "5", "MASTER_PORT": "1"}, True),
        ({"LMRES_GENERATION": "9"}, True),
        ({"OMP_NUM_THREADS": "2"}, False),
        ({"CUDA_VISIBLE_DEVICES": "1"}, False),
        ({"SOMETHING": "else"}, False),
        ({"PYTHONPATH": "/else"}, False),
    ],
)
def test_another_environment(pair: Pair, change: dict[str, str], warm: bool) -> None:
    script = pair.write("main.py", "import os; print(sorted(os.environ.items()))")
    pair.finish(pair.launch(script))
    pair.warm_up()
    assert pair.is_warm(script, env=change) == warm, pair.pool._said


def test_other_surroundings(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    script = pair.write("main.py", "print(1)")
    pair.finish(pair.launch(script))
    pair.warm_up()
    mask = os.umask(0o077)
    try:
        assert not pair.is_warm(script)
    finally:
        os.umask(mask)
    monkeypatch.chdir(pair.folder)
    assert not pair.is_warm(script)
    assert not pair.is_warm(script, "other arguments")
    assert pair.pool.ready == 1, pair.pool._said
    (stale,) = pair.pool.pids
    pair.pool.refill(paced=False)
    until(lambda: pair.pool.ready == 1 and pair.pool.pids != (stale,), "one for the new arguments and folder is ready")
    assert pair.is_warm(script, "other arguments")


def test_another_kind_of_stream(pair: Pair) -> None:
    script = pair.write("main.py", "pass")
    pair.finish(pair.launch(script))
    pair.warm_up()
    read, write = os.pipe()
    try:
        worker = pair.watched.launch(
            sys.executable, "-u", script,
            env={"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "RANK": "0", "PYTHONHASHSEED": "7"}, stdout=write,
        )  # fmt: skip
    finally:
        os.close(write)
        os.close(read)
    assert worker.pid not in pair.spawned
    worker.wait(BOUND_S)


def test_a_file_that_would_be_imported_instead(pair: Pair) -> None:
    script = pair.write("main.py", "import decimal; print(decimal.__file__)")
    (pair.program / "decimal").mkdir()  # a folder of data is no package
    pair.finish(pair.launch(script))
    pair.warm_up()
    pair.write("decimal.py", "")
    worker = pair.launch(script)
    assert worker.pid not in pair.spawned
    assert str(pair.program) in pair.finish(worker).out


def test_a_package_that_has_changed(tmp_path: Path) -> None:
    """An installed package is one in a site folder; the interpreter's stamp stands for all."""
    pair = Pair(tmp_path)
    try:
        script = pair.write("main.py", "print(1)")
        pair.finish(pair.launch(script))
        pair.warm_up()
        spare = pair.pool._spares[0]
        assert spare.imports is not None
        path, stamp = spare.imports.files[0]
        older = (path, [stamp[0] - 1, *stamp[1:]])
        spare.imports = dataclasses.replace(spare.imports, files=(older, *spare.imports.files[1:]))
        assert not pair.is_warm(script)
        until(lambda: pair.pool.ready == 1, "it stays")
        pair.warm_up()
        until(lambda: len(pair.spawned) == 2 and pair.pool.ready == 1, "a fresh one has taken its place")
        assert pair.is_warm(script)
    finally:
        pair.close()


def test_the_programs_own_modules_are_never_imported_early(pair: Pair) -> None:
    pair.write("own.py", f"open({str(pair.folder / 'ran')!r}, 'a').write('x')")
    script = pair.write("main.py", "import own")
    env = {"PYTHONPATH": str(pair.program)}
    pair.pool.learn(("own", "decimal"))
    pair.finish(pair.launch(script, env=env))
    pair.warm_up()
    assert (pair.folder / "ran").read_text() == "x"
    assert len(pair.spawned) == 2  # the first one said what is to be left out
    assert pair.is_warm(script, env=env)
    assert (pair.folder / "ran").read_text() == "xx"


def _installed(pair: Pair, monkeypatch: pytest.MonkeyPatch, text: str) -> dict[str, str]:
    """A package in a site folder: the user's, put into the test's folder."""
    if sys.prefix != sys.base_prefix:
        monkeypatch.setattr(sys, "executable", os.path.realpath(sys.executable))  # a venv has no user's site folder
        monkeypatch.setattr("lmres.rendezvous.edge.workers.warm.sys.executable", sys.executable)
    base = pair.folder / "base"
    folder = base / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "installed_here.py").write_text(textwrap.dedent(text))
    return {"PYTHONUSERBASE": str(base)}


@pytest.mark.parametrize(
    ("text", "changed", "left_out", "warm"),
    [
        ("import os; os.environ.get('RANK')", {"RANK": "1"}, False, False),
        ("import os; os.environ.get('RANK')", {"MASTER_PORT": "7"}, False, True),
        ("import os; os.environ.get('MASTER_PORT')", {"MASTER_PORT": "7"}, True, True),
        ("import os; dict(os.environ)", {"MASTER_PORT": "7"}, True, True),
        ("import random; random.random()", {}, True, True),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            {},
            True,
            True,
        ),
        ("import subprocess; subprocess.Popen(['/bin/sleep', '2'])", {}, True, True),
        ("1 / 0", {}, True, True),
        ("import os; os.environ['SET_BY_IMPORT'] = 'x'", {"MASTER_PORT": "7"}, False, True),
        ("print('printed at import')", {"MASTER_PORT": "7"}, False, True),
    ],
)
def test_what_an_import_does(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, text: str, changed: dict[str, str], left_out: bool, warm: bool
) -> None:
    env = {**_installed(pair, monkeypatch, text), "PYTHONPATH": str(Path(__file__).parents[2]), "MASTER_PORT": "1"}
    known = ("json", "random", "threading", "subprocess", "installed_here", "decimal")
    pair.pool.learn(known)
    script = pair.write(
        "main.py",
        """
        import os, sys
        print("early" if "installed_here" in sys.modules else "late", "decimal" in sys.modules)
        try:
            import installed_here
        except ZeroDivisionError:
            pass
        print(os.environ.get("SET_BY_IMPORT"))
        os._exit(0)
        """,
    )
    cold = pair.finish(pair.launch(script, env=env))
    assert cold.status == 0, cold.err
    pair.warm_up()
    assert len(pair.spawned) == 1 + left_out, pair.pool._said
    worker = pair.launch(script, env={**env, **changed})
    assert (worker.pid in pair.spawned) == warm
    ran = pair.finish(worker)
    if warm:
        early = "late" if left_out else "early"
        assert ran.out.replace(f"{early} True\n", "") == cold.out.replace("late False\n", "")
    else:
        assert ran.out == cold.out


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
def test_code_of_the_users_that_runs_at_every_start(pair: Pair, name: str) -> None:
    pair.write(f"{name}.py", "")
    script = pair.write("main.py", "print(1)")
    env = {"PYTHONPATH": str(pair.program)}
    pair.finish(pair.launch(script, env=env))
    pair.pool.refill(paced=False)
    until(lambda: pair.gone, "the process has ended")
    assert name in pair.pool._said["stop"]
    assert not pair.is_warm(script, env=env)


def test_a_process_that_dies_is_replaced_and_one_that_is_stopped_is_not_used(pair: Pair) -> None:
    script = pair.write("main.py", "print(1)")
    pair.finish(pair.launch(script))
    pair.warm_up()
    first = pair.pool.pids[0]
    os.kill(first, signal.SIGKILL)
    until(lambda: pair.pool.ready == 1 and pair.pool.pids[0] != first, "another is ready")
    assert first in pair.gone
    second = pair.pool.pids[0]
    os.kill(second, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{second}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T", "it is stopped")
    assert not pair.is_warm(script)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_waiting_process_never_becomes_the_program_by_a_signal(pair: Pair, number: int) -> None:
    script = pair.write("main.py", f"open({str(pair.folder / 'ran')!r}, 'a').write('x')")
    pair.finish(pair.launch(script))
    pair.warm_up()
    first = pair.pool.pids[0]
    os.kill(first, number)
    until(lambda: first in pair.gone, "it has ended")
    assert (pair.folder / "ran").read_text() == "x"


def test_too_little_memory(tmp_path: Path) -> None:
    pair = Pair(tmp_path, min_available_bytes=1 << 60)
    try:
        script = pair.write("main.py", "print(1)")
        pair.finish(pair.launch(script))
        pair.pool.refill()
        until(lambda: "spawn" in pair.pool._said, "it says why")
        assert pair.spawned == []
    finally:
        pair.close()


def test_it_starts_cold_in_place_if_it_can_not_become_the_worker(pair: Pair) -> None:
    script = pair.write("main.py", "import os; print(os.environ['RANK'], os.getsid(0) == os.getpid())")
    pair.finish(pair.launch(script))
    pair.warm_up()
    pair.watched.monitor.token = pair.token + "too long for the room"
    worker = pair.launch(script)
    assert worker.pid in pair.spawned
    ran = pair.finish(worker)
    assert (ran.status, ran.out) == (0, "0 True\n")
    assert ran.reports == ["attached"]
    assert "a warm worker starts cold" in ran.err


def test_a_standby_that_has_not_run_the_program(pair: Pair) -> None:
    script = pair.write("main.py", "import os; print(os.environ['RANK'])")
    env = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    launch = Launch(args=(sys.executable, "-u", script), env=bootstrap_env(env), kinds=(FILE, FILE))
    pair.pool.expect({0: launch, 1: launch})
    pair.warm_up(2)
    worker = pair.launch(script, env={"RANK": "3", "MASTER_PORT": "5", "LMRES_SLOT": "3"})
    assert worker.pid in pair.spawned
    assert pair.finish(worker).out == "3\n"


def test_a_standby_that_can_not_import_what_others_have(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them looks at what this node does not know yet: the first guess is better than nothing."""
    own = _installed(pair, monkeypatch, "import os; os.environ.get('RANK')")
    (folder,) = (pair.folder / "base").glob("lib/*/site-packages")
    names = [f"installed_{number}" for number in range(_MAX_EXCLUDED + 1)]
    for name in names:
        shutil.copy(folder / "installed_here.py", folder / f"{name}.py")
    script = pair.write("main.py", "import sys; print('installed_0' in sys.modules)")
    own["PYTHONPATH"] = str(Path(__file__).parents[2])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7", **own}
    pair.pool.expect({0: Launch(args=(sys.executable, "-u", script), env=bootstrap_env(env), kinds=(FILE, FILE))})
    assert pair.pool.learn(names, from_elsewhere=True)
    pair.warm_up()
    assert pair.pool.modules == FIRST_GUESS and len(pair.spawned) == _MAX_EXCLUDED + 2, pair.pool._said
    assert not pair.pool.learn(names, from_elsewhere=True)
    worker = pair.launch(script, env={"RANK": "3", **own})
    assert worker.pid in pair.spawned
    assert pair.finish(worker).out == "False\n"


def test_spares_die_with_their_agent(tmp_path: Path) -> None:
    """The agent is killed; PDEATHSIG and the closed channel end them."""
    agent = tmp_path / "agent.py"
    agent.write_text(
        textwrap.dedent(f"""
        import pathlib, sys, time
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from tests.contract.test_warm import Pair
        folder = pathlib.Path({str(tmp_path)!r}) / "agent"
        folder.mkdir()
        pair = Pair(folder)
        pair.finish(pair.launch(pair.write("main.py", "print(1)")))
        pair.warm_up()
        (folder / "new").write_text(str(pair.pool.pids[0]))
        (folder / "new").rename(folder / "pid")
        time.sleep(600)
        """)
    )
    import subprocess

    process = subprocess.Popen([sys.executable, str(agent)])
    try:
        pid = int(read_when_there(tmp_path / "agent" / "pid"))
        assert not gone(pid)
    finally:
        process.kill()
        process.wait()
    wait_gone(pid)


def test_a_forged_report_teaches_nothing() -> None:
    for message in ({}, {"names": 3}, {"names": "!"}, {"names": "YWJj"}, {"names": None}):
        assert names_of_report(message) == ()


# -- with torch --------------------------------------------------------------------------------------------------------

TRAIN = """
    import hashlib, random, sys, time
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset
    from lmres.adapters.bootstrap import modules, session

    class Numbers(Dataset):
        def __len__(self): return 16
        def __getitem__(self, i): return torch.full((8,), float(i)) + torch.rand(8)

    if __name__ == "__main__":
        first = torch.get_rng_state()
        torch.manual_seed(torch.initial_seed())
        print("untouched", torch.equal(first, torch.get_rng_state()))
        print(torch.get_num_threads(), torch.get_num_interop_threads(), torch.distributed.is_initialized(),
              torch.get_default_dtype(), torch.is_grad_enabled(), torch.cuda.is_initialized(),
              torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled)
        torch.manual_seed(3); random.seed(3); np.random.seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        for workers in (0, 2):
            for batch in DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers):
                optimizer.zero_grad()
                model(batch + random.random() + np.random.rand()).square().mean().backward()
                optimizer.step()
        data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(hashlib.sha256(data).hexdigest(), hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest())
        print(torch.initial_seed(), session.current().step)
        if len(sys.argv) > 1:
            modules.report(session.current())
"""


@pytest.mark.parametrize("watched", [False, True])
def test_training_is_bitwise_the_same(tmp_path: Path, watched: bool) -> None:
    pair = Pair(tmp_path, modules=FIRST_GUESS)
    try:
        script = pair.write("main.py", TRAIN)
        cold, warm = pair.both(script, env={WATCH: variable_text()} if watched else None)
        assert cold.status == 0, cold.err
        assert warm.out == cold.out
        assert warm == cold
        assert "first_step" in warm.reports
        assert ("watch" in warm.reports) == watched
    finally:
        pair.close()


def test_the_modules_of_the_running_program_are_learned(tmp_path: Path) -> None:
    pair = Pair(tmp_path, modules=FIRST_GUESS)
    try:
        script = pair.write("main.py", TRAIN)
        cold = pair.finish(pair.launch(script, "report"))
        assert cold.status == 0, cold.err
        names = names_of_report(pair.watched.report("modules"))
        assert len(names) > 1500
        assert {"torch", "torch._dynamo", "numpy", "hashlib", "torch.utils.data"} <= set(names)
        assert "__main__" not in names
        assert pair.pool.learn(names)
        assert not pair.pool.learn(names)
        began = time.monotonic()
        pair.warm_up()
        took_s = time.monotonic() - began
        assert len(pair.spawned) == 1, pair.pool._said
        assert pair.pool.memory_bytes() > 50 * 1024**2, took_s
        pids = pair.pool.pids
        worker = pair.launch(script, "report")
        assert worker.pid in pids
        warm = pair.finish(worker)
        assert (warm.status, warm.out, warm.err) == (cold.status, cold.out, cold.err)
    finally:
        pair.close()
