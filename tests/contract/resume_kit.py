"""Lives of small programs under the engine of the way back, without agents and without a vault process.

A nursery is one process that has imported torch; each rank of each life is a fork of it, with the variables that
torchrun sets. A life is clean (nothing of lmres), recorded (every step is captured; chosen steps are kept in files,
with what the program had written by then), or resumed from such a step. The vault is a double in the same process.

``python -m tests.contract.resume_kit`` is the nursery: one JSON job a line, one JSON answer a line.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import itertools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

PROGRAMS = Path(__file__).parent / "programs"
COMMON = Path(__file__).parent.parent / "e2e" / "programs" / "state"
LIFE_S = 60
REPLAY_EVERY = 2
LOG_BYTES = 1 << 24

Mode = Literal["clean", "record", "resume"]


@dataclass(frozen=True, kw_only=True)
class Life:
    """How it ended. ``files``: what the program has written, by rank and name. Streams and last words by rank."""

    codes: list[int]
    files: list[dict[str, bytes]]
    out: list[str]
    err: list[str]
    last_words: list[str]
    notes: list[list[list[Any]]]

    def noted(self, kind: str) -> list[list[Any]]:
        return [note for rank in self.notes for note in rank if note[0] == kind]


class Nursery:
    """The parent's end. Not for several threads."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.resume_kit"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )

    def life(
        self,
        mode: Mode,
        program: Path,
        arguments: Sequence[str],
        folder: Path,
        *,
        ranks: int = 1,
        keep: Sequence[int] = (),
        step: int = 0,
        images: Path | None = None,
        resume: str = "auto",
        env: Mapping[str, str] | None = None,
    ) -> Life:
        """Runs in ``folder``. ``keep``: the steps whose images go to ``images``; ``step``: the one to come back to."""
        for rank in range(ranks):
            (folder / f"r{rank}").mkdir(parents=True, exist_ok=True)
        job = {
            "mode": mode,
            "program": str(program),
            "arguments": list(arguments),
            "folder": str(folder),
            "ranks": ranks,
            "keep": list(keep),
            "step": step,
            "images": str(images),
            "resume": resume,
            "env": dict(env or {}),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the nursery has died"
        return _life(json.loads(line)["codes"], folder, ranks)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def _life(codes: list[int], folder: Path, ranks: int) -> Life:
    out = [(folder / f"out{rank}").read_text() for rank in range(ranks)]
    words = [[line for line in text.splitlines() if line.startswith("FINAL")] for text in out]
    notes = [folder / f"notes{rank}" for rank in range(ranks)]
    return Life(
        codes=codes,
        files=[_files(folder / f"r{rank}") for rank in range(ranks)],
        out=out,
        err=[(folder / f"err{rank}").read_text() for rank in range(ranks)],
        last_words=[found[-1] if found else "" for found in words],
        notes=[[json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in notes],
    )


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes() if file.is_file() else b"(folder)"
        for file in sorted(folder.rglob("*"))
    }


class Trial:
    """A program in all its lives."""

    def __init__(self, nursery: Nursery, folder: Path, name: str, *arguments: str, ranks: int = 1) -> None:
        self._nursery = nursery
        self._folder = folder
        self._program = next(p for p in (PROGRAMS / name, COMMON / name) if p.exists())
        self._arguments = arguments
        self.ranks = ranks

    def live(self, mode: Mode, where: str, **given: Any) -> Life:
        given["env"] = {"LMRES_GENERATION": "2" if mode == "resume" else "1", **given.get("env", {})}
        return self._nursery.life(mode, self._program, self._arguments, self._folder / where, ranks=self.ranks, **given)

    def clean(self) -> Life:
        life = self.live("clean", "clean")
        assert life.codes == [0] * self.ranks, life.err
        assert all(life.last_words), life.out
        return life

    def recorded(self, *steps: int, **given: Any) -> Life:
        life = self.live("record", "record", keep=steps, images=self._folder / "images", **given)
        assert life.codes == [0] * self.ranks, life.err
        assert not life.noted("off"), life.noted("off")
        return life

    def resumed(self, step: int, **given: Any) -> Life:
        """In the folder as it was at that step."""
        images = self._folder / "images"
        for rank in range(self.ranks):
            shutil.copytree(images / f"{step}-r{rank}", self._folder / f"resume{step}" / f"r{rank}")
        return self.live("resume", f"resume{step}", step=step, images=images, **given)

    def is_exact(self, *steps: int, again: Sequence[str] = (), **given: Any) -> list[Life]:
        """The clean, the recorded and the resumed lives end alike. ``again``: files that may differ."""
        clean, recorded = self.clean(), self.recorded(*steps, **given)
        _compare(clean, recorded, again)
        lives = [clean, recorded]
        for step in steps:
            resumed = self.resumed(step, **given)
            assert resumed.codes == [0] * self.ranks, (resumed.noted("failure"), resumed.err)
            assert len(resumed.noted("restored")) == self.ranks, resumed.err
            _compare(clean, resumed, again)
            for rank in range(self.ranks):
                at = next(note[2] for note in recorded.notes[rank] if note[:2] == ["at", step])
                rest = recorded.out[rank].encode()[at:].decode()
                assert resumed.out[rank].endswith(rest), (resumed.out[rank], rest)
                begun = resumed.out[rank].removesuffix(rest)
                assert clean.out[rank].startswith(begun), begun
            lives.append(resumed)
        return lives

    def is_stopped(self, step: int, *says: str, **given: Any) -> Life:
        """The resumed life ends by itself, and the message names what differs."""
        self.recorded(step)
        resumed = self.resumed(step, **given)
        assert resumed.codes == [1] * self.ranks, (resumed.codes, resumed.out, resumed.err)
        message = resumed.noted("failure")[0][1]
        for text in says:
            assert text in message, message
        return resumed


def _compare(clean: Life, other: Life, again: Sequence[str]) -> None:
    assert other.last_words == clean.last_words, (other.out, clean.out)
    for mine, theirs in zip(clean.files, other.files, strict=True):
        assert {n: b for n, b in theirs.items() if n not in again} == {n: b for n, b in mine.items() if n not in again}


# -- the nursery's own process ----------------------------------------------------------------------------------------


def serve() -> None:
    _import_all()
    for line in sys.stdin:
        job = json.loads(line)
        codes = _run(job)
        sys.stdout.write(json.dumps({"codes": codes}) + "\n")
        sys.stdout.flush()


def _import_all() -> None:
    """What a life would import by itself: most of its time, otherwise."""
    import numpy  # noqa: F401
    import torch._dynamo
    import torch.distributed.algorithms.join
    import torch.distributed.tensor
    import torch.nn.parallel
    import torch.optim.swa_utils
    import torch.utils.data  # noqa: F401

    import lmres.adapters.capture.restore
    import lmres.adapters.resume.attach  # noqa: F401


def _run(job: dict[str, Any]) -> list[int]:
    host, port = _store()
    children = []
    for rank in range(job["ranks"]):
        child = os.fork()
        if child == 0:
            os._exit(_life_of_rank(job, rank, port))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    os.kill(host, signal.SIGKILL)
    os.waitpid(host, 0)
    return codes


def _store() -> tuple[int, int]:
    """A process that hosts the store of one life, as an agent does, and its port: nobody else can take it."""
    ours, theirs = os.pipe()
    host = os.fork()
    if host == 0:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(theirs, str(store.port).encode())
        while os.getppid() != 1:
            time.sleep(1)
        os._exit(0)
    os.close(theirs)
    port = int(os.read(ours, 16))
    os.close(ours)
    return host, port


def _life_of_rank(job: dict[str, Any], rank: int, port: int) -> int:
    signal.alarm(LIFE_S)
    folder = Path(job["folder"])
    faulthandler.dump_traceback_later(LIFE_S - 10)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job["ranks"]),
        LOCAL_WORLD_SIZE=str(job["ranks"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        GLOO_SOCKET_IFNAME="lo",
        LMRES_RESUME_STEP=str(job["step"]),
        **job["env"],
    )
    os.chdir(folder / f"r{rank}")
    sys.argv = [job["program"], *job["arguments"]]
    sys.path[:1] = [str(Path(job["program"]).parent), str(COMMON)]
    code, attachment = 0, None
    _keep_groups(job)
    try:
        if job["mode"] != "clean":
            attachment = _attach(job, rank)
        job["globals"] = runpy.run_path(job["program"], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        if attachment is not None:
            attachment.settle()
        traceback.print_exc()
        code = 3
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _keep_groups(job: dict[str, Any]) -> None:
    """Until the process ends: torch may block for ever when the last user of a gloo group is taken down."""
    import torch.distributed as dist

    begin = dist.init_process_group

    @functools.wraps(begin)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        begin(*args, **kwargs)
        job.setdefault("groups", []).append(dist.group.WORLD)

    dist.init_process_group = init_process_group


def _attach(job: dict[str, Any], rank: int) -> Any:
    import torch

    from lmres.adapters.resume import frames
    from lmres.adapters.resume.attach import build
    from lmres.adapters.resume.settings import Settings

    frames._users[__file__] = False
    notes = (Path(job["folder"]) / f"notes{rank}").open("a", buffering=1)

    def note(kind: str) -> Callable[..., None]:
        return lambda *values: print(json.dumps([kind, *values], default=str), file=notes)

    vault = FileVault(rank, job["keep"], Path(job["images"]), note("at"))
    resumes = job["mode"] == "resume"
    restored = vault.restored(job["step"]) if resumes else None
    report = SimpleNamespace(
        captured=note("captured"),
        restored=note("restored"),
        elsewhere=note("elsewhere"),
        nonfinite=note("nonfinite"),
        off=note("off"),
        armed=note("armed"),
        replays=note("replays"),
    )
    settings = Settings(
        vault="",
        run_id="",
        generation=2 if resumes else 1,
        resume=job["resume"],
        resume_step=job["step"] if resumes else 0,
        interval_steps=1,
        overhead_budget=0.01,
        topology="",
        replay_every=REPLAY_EVERY,
    )
    watched = os.environ.pop("KIT_WATCHED", "")
    if watched == "first":
        _watch(torch, note("watch"))
    attachment = build(torch, settings, vault, restored, report, lambda step: None)
    if watched == "second":
        _watch(torch, note("watch"))

    def fail(error: Exception) -> None:
        note("failure")(str(error))
        os._exit(1)

    attachment.engine.on_failure = fail
    return attachment


def _watch(torch: Any, note: Callable[..., None]) -> None:
    """As a worker is watched, under or over what ``_attach`` puts in place."""
    from lmres.adapters.bootstrap.page import PAGE_BYTES
    from lmres.adapters.watch import variable_text
    from lmres.adapters.watch.install import build

    session = SimpleNamespace(
        page=bytearray(PAGE_BYTES), events=itertools.count(1), send=lambda line: note(json.loads(line)), watch=None
    )
    build(torch, variable_text(stacks_signal=0), session)  # type: ignore[arg-type]
    atexit.register(lambda: note({"marks": next(session.events), "left": session.watch.codes}))


class FileVault:
    """A worker's vault in its own process. It keeps the chosen steps in files, and the program's folder beside them."""

    def __init__(self, rank: int, keep: Sequence[int], images: Path, note: Callable[..., None]) -> None:
        self.log = memoryview(bytearray(LOG_BYTES))
        self._rank = rank
        self._keep = keep
        self._images = images
        self._note = note
        self._sizes: tuple[int, int] | None = None
        self._grants: list[Any] = []
        self._turn = 0

    def reserve(self, *, shared_bytes: int, own_bytes: int) -> None:
        self._sizes = (shared_bytes, own_bytes)
        self._grants = [
            SimpleNamespace(shared=memoryview(bytearray(shared_bytes)), own=memoryview(bytearray(own_bytes)))
            for _ in range(2)
        ]

    def poll_grant(self, step: int | None = None) -> Any:
        if step in self._keep:
            sys.stdout.flush()
            self._note(step, os.fstat(1).st_size)
            shutil.copytree(".", self._images / f"{step}-r{self._rank}", dirs_exist_ok=True)
        if not self._grants:
            return None
        self._turn += 1
        return self._grants[self._turn % 2]

    def discard(self, grant: Any) -> None:
        pass

    def seal(self, grant: Any, *, step: int, shared_length: int, own_length: int, log_length: int, **_: Any) -> None:
        if step not in self._keep:
            return
        self._images.mkdir(exist_ok=True)
        for name, data in (
            ("shared", grant.shared[:shared_length]),
            ("own", grant.own[:own_length]),
            ("log", self.log[:log_length]),
        ):
            (self._images / f"{step}-{name}{self._rank}").write_bytes(data)

    def spoilt(self, step: int, *, layout: str) -> None:
        pass

    def replayed(self, **_: Any) -> None:
        """Nobody compares here, but the programs must come out the same."""

    def restored(self, step: int) -> Any:
        shared, own, log = (
            (self._images / f"{step}-{name}{self._rank}").read_bytes() for name in ("shared", "own", "log")
        )
        self.log[: len(log)] = log
        return SimpleNamespace(
            step=step,
            source="local",
            shared=memoryview(shared),
            own=memoryview(own),
            log_length=len(log),
            bytes=len(shared) + len(own),
        )


if __name__ == "__main__":
    serve()
