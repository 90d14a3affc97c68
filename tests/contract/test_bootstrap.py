"""The bootstrap in real worker processes: who attaches, what a crash looks like, what the user's program sees."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmres.adapters.bootstrap import ONPATH, bootstrap_env
from lmres.rendezvous.edge.workers.process import WorkerProcess
from tests.contract.workers_kit import BOUND_S, Watched, read_when_there, until

CRASH = "class Broken(Exception): pass\nraise Broken('the first cause')\n"


class Attached(Watched):
    """Workers as an agent with a policy starts them."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(prepare_env=bootstrap_env)
        self.path = tmp_path

    def write(self, name: str, text: str) -> str:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(file)

    def script(self, text: str, *args: str, env: dict[str, str] | None = None) -> WorkerProcess:
        """A worker that runs ``text``; its output goes to ``out`` and ``err``."""
        return self.command(sys.executable, self.write("script.py", text), *args, env=env)

    def command(self, *args: str, env: dict[str, str] | None = None) -> WorkerProcess:
        with (self.path / "out").open("w") as out, (self.path / "err").open("w") as err:
            return self.launch(*args, env={"PYTHONPATH": "", **(env or {})}, stdout=out, stderr=err)

    def output(self, worker: WorkerProcess, status: int = 0) -> tuple[str, str]:
        assert worker.wait(BOUND_S) == status, (self.path / "err").read_text()
        return (self.path / "out").read_text(), (self.path / "err").read_text()

    def kinds(self) -> list[str]:
        """Everything reported until the exit of the one worker."""
        self.exit()
        return self.order[:-1]


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Attached]:
    made = Attached(tmp_path)
    yield made
    made.close()


def test_the_users_path_is_kept() -> None:
    assert bootstrap_env({"A": "b"}) == {"A": "b", "PYTHONPATH": ONPATH}
    assert bootstrap_env({"PYTHONPATH": "/x:/y"}) == {"PYTHONPATH": f"{ONPATH}:/x:/y"}


# -- who attaches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["script", "module", "command", "exec"])
def test_a_worker_attaches(workers: Attached, how: str) -> None:
    script = workers.write("script.py", "print('ran')")
    args = {
        "script": ("-u", script),
        "module": ("-m", "script"),
        "command": ("-c", "print('ran')"),
        "exec": (),
    }[how]
    if how == "exec":  # as a NUMA wrapper does
        worker = workers.command("/bin/sh", "-c", f"exec {sys.executable} {script}")
    else:
        worker = workers.command(sys.executable, *args, env={"PYTHONPATH": str(workers.path)})
    said = workers.report("attached")
    assert said == {"kind": "attached", "python": ".".join(map(str, sys.version_info[:3])), "pid": worker.pid}
    assert workers.output(worker) == ("ran\n", "")


@pytest.mark.parametrize("how", ["isolated", "no site", "not python", "a child of a shell"])
def test_where_nothing_attaches_nothing_is_disturbed(workers: Attached, how: str) -> None:
    python = sys.executable
    args = {
        "isolated": (python, "-I", "-c", "print('ran')"),
        "no site": (python, "-S", "-c", "print('ran')"),
        "not python": ("/bin/echo", "ran"),
        "a child of a shell": ("/bin/sh", "-c", f"{python} -c 'print(\"ran\")'; true"),
    }[how]
    worker = workers.command(*args)
    assert workers.output(worker) == ("ran\n", "")
    assert workers.kinds() == []


CHILDREN = """
import multiprocessing, os, subprocess, sys
def child():
    raise RuntimeError('in a child')
if __name__ == '__main__':
    fork_status = 0
    pid = os.fork()
    if pid == 0:
        raise RuntimeError('in a fork')
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    for method in ('fork', 'spawn', 'forkserver'):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        print(process.exitcode)
    for options in ({}, {'start_new_session': True}, {'start_new_session': True, 'close_fds': False}):
        print(subprocess.run([sys.executable, '-c', 'raise RuntimeError(1)'], **options).returncode)
"""


def test_children_neither_attach_nor_hold(workers: Attached) -> None:
    worker = workers.script(CHILDREN, env={"LMRES_HOLD_S": "600"})
    out, err = workers.output(worker)
    assert out.split() == ["1"] * 7
    assert err.count("RuntimeError: in a child") == 3
    assert "lmres" not in err
    assert workers.kinds() == ["attached"]


@pytest.mark.parametrize("users", ["", "/users/one:/users/two"])
def test_children_see_the_users_environment(workers: Attached, users: str) -> None:
    names = ("PYTHONPATH", "LMRES_WORKER_FDS")
    report = f"import os, sys; print([(n, os.environ[n]) for n in {names} if n in os.environ], sys.path[1:])"
    worker = workers.script(
        f"import subprocess, sys\n{report}\nsys.stdout.flush()\nsubprocess.run([sys.executable, '-c', {report!r}])\n",
        env={"PYTHONPATH": users},
    )
    out, _ = workers.output(worker)
    plain = subprocess.run(
        [sys.executable, "-c", report],
        env={**os.environ, "PYTHONPATH": users},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=True,
    )
    expected = plain.stdout.replace("[('PYTHONPATH', '')]", "[]")
    assert out.splitlines() == [expected.strip()] * 2


def test_the_users_descriptors_are_not_needed(workers: Attached) -> None:
    worker = workers.script(f"import os\nos.closerange(3, 100)\nopen('/dev/null')\n{CRASH}")
    _, err = workers.output(worker, 1)
    assert err.endswith("Broken: the first cause\n")
    assert workers.kinds() == ["attached"]


def test_development_mode_finds_nothing_to_warn_of(workers: Attached) -> None:
    worker = workers.command(sys.executable, "-X", "dev", "-W", "error", "-c", "print('ran')")
    workers.report("attached")
    assert workers.output(worker) == ("ran\n", "")


# -- the user's own sitecustomize --------------------------------------------------------------------------------------


def test_the_users_sitecustomize_runs_once_and_is_the_one_that_is_seen(workers: Attached) -> None:
    site = workers.write("site/sitecustomize.py", "import os\nprint('customized', __file__)\nMINE = 1\n")
    worker = workers.script(
        "import sitecustomize, sys\nprint(sitecustomize.MINE, sitecustomize.__file__, 'lmres' in ''.join(sys.path))",
        env={"PYTHONPATH": str(workers.path / "site")},
    )
    assert workers.output(worker)[0] == f"customized {site}\n1 {site} False\n"
    workers.report("attached")


def test_without_one_of_the_users_there_is_what_python_has(workers: Attached) -> None:
    """Nothing, or what a distribution has put into the standard library."""
    text = (
        "import sys\ntry:\n    import sitecustomize\nexcept ImportError as error:\n    print(error.name)\n"
        "print(getattr(sys.modules.get('sitecustomize'), '__file__', None))"
    )
    plain = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert workers.output(workers.script(text)) == (plain.stdout, "")
    workers.report("attached")


@pytest.mark.parametrize("text", ["1 / 0", "import does_not_exist"])
def test_a_broken_one_is_reported_as_ever(workers: Attached, text: str) -> None:
    workers.write("site/sitecustomize.py", text)
    environment = {"PYTHONPATH": str(workers.path / "site")}
    worker = workers.script("print('ran')", env=environment)
    out, err = workers.output(worker)
    plain = subprocess.run(
        [sys.executable, "-c", "print('ran')"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=True,
    )
    assert (out, err) == (plain.stdout, plain.stderr)
    workers.report("attached")


# -- a crash -----------------------------------------------------------------------------------------------------------


def test_a_crash_is_reported_held_and_released(workers: Attached) -> None:
    worker = workers.script("print('buffered')\n" + CRASH, env={"LMRES_HOLD_S": "600"})
    said = workers.report("exception")
    assert said["type"] == "__main__.Broken"
    assert said["message"] == "the first cause"
    assert said["last_lines"][-1] in ("Broken: the first cause", "__main__.Broken: the first cause")
    assert said["step"] == 0
    assert 0 <= time.monotonic_ns() // 1_000_000 - said["monotonic_ms"] < BOUND_S * 1000
    workers.report("holding")
    # Everything a dying process would have shown is shown already.
    assert (workers.path / "out").read_text() == "buffered\n"
    assert (workers.path / "err").read_text().endswith("Broken: the first cause\n")
    assert worker.exit_status() is None
    worker.release()
    workers.output(worker, 1)
    assert workers.kinds() == ["attached", "exception", "holding"]


def test_a_hold_ends_by_itself(workers: Attached) -> None:
    worker = workers.script(CRASH, env={"LMRES_HOLD_S": "0.2"})
    workers.output(worker, 1)
    assert workers.kinds() == ["attached", "exception", "holding"]


def test_a_held_process_obeys_sigterm(workers: Attached) -> None:
    text = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
    worker = workers.script(text + CRASH, env={"LMRES_HOLD_S": "600"})
    workers.report("holding")
    os.kill(worker.pid, signal.SIGTERM)
    workers.output(worker, 9)


def test_the_agents_end_closing_ends_the_hold(workers: Attached) -> None:
    worker = workers.script(CRASH, env={"LMRES_HOLD_S": "600"})
    workers.report("holding")
    workers.monitor.close()
    assert worker.wait(BOUND_S) == 1


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("import sys; sys.exit('why')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("", 0),
    ],
)
def test_an_ordinary_end_is_not_held(workers: Attached, text: str, status: int) -> None:
    worker = workers.script(text, env={"LMRES_HOLD_S": "600"})
    workers.output(worker, status)
    assert workers.kinds() == ["attached"]


def plain_error_file(tmp_path: Path, text: str) -> dict[str, Any]:
    """What torch's own @record writes for the same exception."""
    script = tmp_path / "recorded.py"
    script.write_text(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        f"@record\ndef main():\n    exec({text!r})\nmain()\n"
    )
    file = tmp_path / "recorded.json"
    subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)},
        timeout=120,
        capture_output=True,
        check=False,
    )
    return dict(json.loads(file.read_text()))


def shape(value: Any) -> Any:
    """Keys and types."""
    return {key: shape(inner) for key, inner in value.items()} if isinstance(value, dict) else type(value)


def test_the_error_file_is_torchs(workers: Attached) -> None:
    file = workers.path / "error.json"
    text = "raise ValueError('naïve')"
    worker = workers.script(text, env={"LMRES_HOLD_S": "0", "TORCHELASTIC_ERROR_FILE": str(file)})
    workers.output(worker, 1)
    ours, torchs = json.loads(file.read_text()), plain_error_file(workers.path, text)
    assert shape(ours) == shape(torchs)
    assert ours["message"]["message"] == torchs["message"]["message"] == "ValueError: naïve"
    assert ours["message"]["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):\n")
    assert [path.name for path in workers.path.glob("error.json*")] == ["error.json"]


def test_an_error_file_that_is_there_stays(workers: Attached) -> None:
    file = workers.path / "error.json"
    file.write_text("recorded")
    worker = workers.script(CRASH, env={"LMRES_HOLD_S": "0", "TORCHELASTIC_ERROR_FILE": str(file)})
    workers.output(worker, 1)
    assert file.read_text() == "recorded"


HOOK = """
import sys
before = sys.excepthook
def mine(kind, value, trace):
    print('mine', value)
    before(kind, value, trace)
sys.excepthook = mine
"""


def test_the_hook_of_the_users_sitecustomize_runs(workers: Attached) -> None:
    workers.write("site/sitecustomize.py", HOOK)
    worker = workers.script(CRASH, env={"PYTHONPATH": str(workers.path / "site"), "LMRES_HOLD_S": "0"})
    out, err = workers.output(worker, 1)
    assert out == "mine the first cause\n"
    assert err.count("Traceback") == 1
    assert workers.kinds() == ["attached", "exception", "holding"]


def test_a_hook_that_chains_to_ours_is_still_reported(workers: Attached) -> None:
    worker = workers.script(HOOK + CRASH, env={"LMRES_HOLD_S": "0"})
    out, err = workers.output(worker, 1)
    assert out == "mine the first cause\n"
    assert err.count("Traceback") == 1
    assert workers.kinds() == ["attached", "exception", "holding"]


@pytest.mark.parametrize(
    ("body", "status", "shown"),
    [
        (
            "1 / 0",
            1,
            ["Error in sys.excepthook:", "ZeroDivisionError", "Original exception was:", "Broken: the first cause"],
        ),
        ("sys.exit(5)", 5, []),
    ],
)
def test_a_hook_that_fails_is_shown_and_held(workers: Attached, body: str, status: int, shown: list[str]) -> None:
    workers.write("site/sitecustomize.py", f"import sys\ndef mine(*_):\n    {body}\nsys.excepthook = mine\n")
    environment = {"PYTHONPATH": str(workers.path / "site"), "LMRES_HOLD_S": "600"}
    worker = workers.script(CRASH, env=environment)
    workers.report("holding")
    err = (workers.path / "err").read_text()
    at = [err.index(text) for text in shown]
    assert at == sorted(at)
    worker.release()
    workers.output(worker, status)


@pytest.mark.parametrize(
    "text",
    [
        "class Broken(Exception):\n    def __str__(self): raise ValueError\nraise Broken",
        "raise ValueError('\\ud800\\x00' * 100_000)",
        "def f(): f()\nf()",
        "raise BaseExceptionGroup('g', [KeyboardInterrupt()])"
        if sys.version_info >= (3, 11)
        else "raise BaseException",
        "def broken(:",
        "import sys\nsys.stderr = sys.stdout = None\nraise ValueError",
    ],
)
def test_any_exception_can_be_reported(workers: Attached, text: str) -> None:
    worker = workers.script(text, env={"LMRES_HOLD_S": "600"})
    said = workers.report("exception")
    assert len(said["message"]) <= 4096
    assert len(said["last_lines"]) <= 20
    workers.report("holding")
    worker.release()
    workers.output(worker, 1)


# -- steps -------------------------------------------------------------------------------------------------------------

TRAINING = """
import importlib, importlib.util, os, pickle, sys
spec = importlib.util.find_spec('torch.optim.optimizer')
again = pickle.loads(pickle.dumps(spec.loader))
assert type(again) is importlib.machinery.SourceFileLoader, type(again)
assert (again.name, again.path) == (spec.loader.name, spec.loader.path)
assert 'torch.optim.optimizer' not in sys.modules or 'torch' in sys.modules
import torch
module = sys.modules['torch.optim.optimizer']
assert type(module.__loader__) is type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
def optimizer():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)
def mine(*what): sys.__excepthook__(*what)
sys.excepthook = mine
one, two = optimizer(), optimizer()
for _ in range(5): one.step()
for _ in range(3): two.step()
pickle.loads(pickle.dumps(one)).step()
importlib.reload(module)
for _ in range(4): two.step()
if os.fork() == 0:
    for _ in range(50): one.step()
    os._exit(0)
os.wait()
raise ValueError('after 7 steps')
"""


def test_optimizer_steps_are_counted(workers: Attached) -> None:
    worker = workers.script(TRAINING, env={"LMRES_HOLD_S": "600"})
    begun_ns = time.monotonic_ns()
    first = workers.report("first_step")
    assert first["step"] == 1
    said = workers.report("exception")
    # Seven steps of the optimizer that has stepped most. The user's hook replaced ours, which came back with a step.
    assert said["step"] == 7, (workers.path / "err").read_text()
    step, last_ns = worker.progress.read()
    assert step == 7
    assert begun_ns < last_ns < time.monotonic_ns()
    workers.report("holding")
    worker.release()
    _, err = workers.output(worker, 1)
    assert err.endswith("ValueError: after 7 steps\n")
    assert worker.progress.read() == (7, last_ns)


def test_attaching_imports_nothing_heavy(workers: Attached) -> None:
    text = "import sys\nprint(sorted(sys.modules))"
    worker = workers.script(text)
    out, _ = workers.output(worker)
    plain = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=BOUND_S, check=True)
    more = set(ast.literal_eval(out)) - set(ast.literal_eval(plain.stdout))
    names = {name for name in more if not name.startswith("lmres")}
    assert names <= {"_socket", "mmap", "select", "struct", "_struct"}
    workers.report("attached")


def test_the_helper_waits(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("text")
    assert read_when_there(tmp_path / "there") == "text"
    assert until(lambda: 1, "at once") == 1
