"""What is compared: each product with its own launcher, on one host, one worker an agent, the same tiny DDP program.

A product is started with its defaults but for two things: where it needs it to see a hang at all, the hang timeout is
``HANG_S`` for each; and where it can have a spare, it has one. torchft has an API of its own, so its program is an
adapted one; NVIDIA's launcher sees hangs only in programs that send heartbeats, so a hook sends one after each step.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmres.cli.trial import (
    PROGRAM,
    TORCHRUN,
    Resumed,
    Trial,
    TrialAgent,
    TrialFailed,
    free_port,
    lmres_command,
    store_pid,
    wait_for,
)

FAULTS = ("crash", "hang", "node")
HANG_S = 5
QUIET_S = 5.0
"""Training time before the fault."""
START_S = 90.0
HERE = Path(__file__).parent / "programs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """``start`` launches the agents until all train; the second one is the victim. ``module``: what must be there.

    ``survives``: processes are not restarted, those that are left go on by themselves.
    """

    name: str
    python: str
    module: str
    start: Callable[[Product, Trial, str, Mapping[str, str]], None]
    note: str = ""
    survives: bool = False
    env: dict[str, str] = field(default_factory=dict)

    def missing(self) -> str:
        """Why it can not be run here; empty if it can."""
        look = f"import {self.module}, torch; print(getattr({self.module}, '__version__', ''))"
        try:
            done = subprocess.run([self.python, "-c", look], capture_output=True, text=True, timeout=120, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        lines = done.stderr.strip().splitlines()
        return "" if done.returncode == 0 else f"not installed ({lines[-1] if lines else done.returncode})"


def hurt(product: Product, trial: Trial, fault: str) -> float:
    """Plants the fault in the second agent. Returns its time."""
    victim = trial.agents[1]
    if fault == "crash":
        return victim.kill_worker()
    if fault == "hang":
        return victim.stop_worker()
    if product.survives:  # what launches a replica group is its node
        return victim.kill_node()
    store = store_pid(victim)
    return victim.kill_node(but=() if store is None else (store,))


def resumed(product: Product, trial: Trial, fault_s: float, bound_s: float) -> Resumed | None:
    """The next step, or None if there is none in time."""
    if not product.survives:
        return trial.resumed(fault_s, bound_s)
    old = trial.agents[1].told("life")[-1].pid

    def next_step() -> float | None:
        """A committed step without the victim, or with its successor."""
        steps = [t for t in trial.told("step") if t.at_s > fault_s and t.pid != old]
        return min((t.at_s for t in steps if t.more == ("1",) or t.pid not in before), default=None)

    before = {t.pid for t in trial.told("life") if t.at_s <= fault_s}
    try:
        return Resumed(step_s=wait_for("the next committed step", next_step, bound_s) - fault_s)
    except TrialFailed:
        return None


def _in_turn(
    trial: Trial,
    port: int,
    commands: Mapping[str, list[str]],
    env: Mapping[str, str],
    env_of: Callable[[str], Mapping[str, str]] = lambda _name: {},
) -> None:
    """The first agent hosts the store, so the others follow when it listens."""
    for name, command in commands.items():
        agent = trial.start(name, command, {**env, **env_of(name)})
        if len(trial.agents) == 1:
            wait_for("the first agent to listen", lambda agent=agent: _listens(agent, port), START_S)  # type: ignore[misc]
            time.sleep(0.5)
        elif len(trial.agents) == 2:
            trial.wait_training(2, START_S)


def start_agents(
    trial: Trial,
    names: str,
    nnodes: str,
    python: str,
    program: Sequence[str],
    policy: Path | None,
    *,
    env: Mapping[str, str] | None = None,
    endpoint_of: Callable[[str, int], tuple[int, str]] = lambda _name, port: (port, "true"),
) -> None:
    """Agents of this backend, until so many workers live as are active. The first hosts the store, and the standbys
    come last."""
    port = free_port()
    active = int(nnodes.partition(":")[0])

    def all_live() -> bool:
        return len({t.pid for t in trial.told("life")}) >= active

    for number, name in enumerate(names):
        at, host = endpoint_of(name, port)
        command = lmres_command(
            name,
            folder=trial.folder,
            endpoint=f"127.0.0.1:{at}",
            run_id=trial.token[:8],
            nnodes=nnodes,
            policy=policy,
            python=python,
            program=program,
            conf={"is_host": host if number == 0 else "false"},
        )
        agent = trial.start(name, command, env)
        if number == 0:
            wait_for("the store", lambda agent=agent: store_pid(agent), START_S)  # type: ignore[misc]
        if number == active - 1:
            wait_for("all workers", all_live, START_S)


def wait_warm(trial: Trial) -> None:
    """Until each agent has a warm worker that stays; their log level is debug."""
    wait_for("warm workers everywhere", lambda: all(map(_is_warm, trial.agents)), START_S)


def _is_warm(agent: TrialAgent) -> bool:
    named = {what: set(re.findall(rf"warm worker (\d+) is {what}", agent.log)) for what in ("ready", "replaced")}
    return bool(named["ready"] - named["replaced"])


def _listens(agent: TrialAgent, port: int) -> bool:
    if agent.process.poll() is not None:
        raise TrialFailed(f"{agent.name} has ended; the end of its log:\n{agent.log[-2000:]}")
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


# -- the products -----------------------------------------------------------------------------------------------------


def _start_lmres(product: Product, trial: Trial, fault: str, env: Mapping[str, str]) -> None:
    text = "schema_version: 1\nobserve: {log_level: debug}\n"
    policy = trial.folder / "policy.yaml"
    policy.write_text(text + (f"detection: {{hang_timeout_s: {HANG_S}.0}}\n" if fault == "hang" else ""))
    port = free_port()
    commands = {
        name: lmres_command(
            name,
            folder=trial.folder,
            endpoint=f"127.0.0.1:{port}",
            run_id=trial.token[:8],
            nnodes="2:3",
            policy=policy,
            python=product.python,
        )
        for name in "abc"
    }
    _in_turn(trial, port, commands, env)
    wait_warm(trial)


def torchrun(product: Product, nnodes: str, backend: str, port: int, run_id: str, *more: str) -> list[str]:
    return [
        product.python,
        *TORCHRUN,
        f"--nnodes={nnodes}",
        "--nproc-per-node=1",
        "--max-restarts=10",
        f"--rdzv-backend={backend}",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-id={run_id}",
        *more,
        str(PROGRAM),
    ]


def _start_c10d(product: Product, trial: Trial, fault: str, env: Mapping[str, str]) -> None:
    """It has no spares: after the loss of a node it can only go on with fewer, if that is allowed."""
    port = free_port()
    command = torchrun(product, "1:2" if fault == "node" else "2:2", "c10d", port, trial.token[:8])
    _in_turn(trial, port, {"a": command, "b": command}, env)


def _start_ft_launcher(product: Product, trial: Trial, fault: str, env: Mapping[str, str]) -> None:
    port = free_port()
    program = [str(PROGRAM)]
    more = ["--ft-initial-rank-heartbeat-timeout=60", f"--ft-rank-heartbeat-timeout={HANG_S}"]
    if fault == "hang":
        program = [str(HERE / "heartbeats.py"), *program]
    env = {**env, "NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "1"}
    command = [
        product.python,
        *("-m", product.module),
        "--nnodes=2:3",
        "--nproc-per-node=1",
        "--max-restarts=10",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-id={trial.token[:8]}",
        *(more if fault == "hang" else []),
        *program,
    ]
    _in_turn(trial, port, dict.fromkeys("abc", command), env)


def _start_lm_resiliency(product: Product, trial: Trial, fault: str, env: Mapping[str, str]) -> None:
    """Without a worker config: what that attaches inside the workers needs NCCL."""
    port = free_port()
    commands, identity = {}, {}
    for number, name in enumerate("abc", 1):
        private = trial.folder / name
        private.mkdir(mode=0o700)
        conf = f"store_type=tcp,lm_resiliency_restart_context_path={private / 'context.json'}"
        command = torchrun(product, "2:3", "lm_resiliency", port, trial.token[:8], f"--rdzv-conf={conf}")
        commands[name] = [product.python, str(HERE / "lm_resiliency_torchrun.py"), *command[3:]]
        path = trial.folder / f"{name}.machine-id"
        path.write_text(f"{number:032x}\n")
        identity[name] = {"LM_RESILIENCY_MACHINE_ID_PATH": str(path)}
    _in_turn(trial, port, commands, env, identity.__getitem__)


def _start_torchft(product: Product, trial: Trial, fault: str, env: Mapping[str, str]) -> None:
    """Two replica groups, each with a torchrun of its own that restarts its worker."""
    port = free_port()
    more = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "GROUP_TIMEOUT_S": str(HANG_S if fault == "hang" else 60)}
    for name in "01":
        command = [
            product.python,
            *TORCHRUN,
            "--nnodes=1",
            "--nproc-per-node=1",
            "--max-restarts=10",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
            str(HERE / "torchft_ddp.py"),
        ]
        trial.start(name, command, {**env, **more, "REPLICA": name})
    lighthouse = [
        str(Path(product.python).with_name("torchft_lighthouse")),
        *("--min_replicas", "1", "--bind", f"127.0.0.1:{port}", "--join_timeout_ms", "3000"),
    ]
    trial.start("lighthouse", lighthouse)
    trial.wait_training(2, START_S)
    both = lambda: any(t.more == ("2",) for t in trial.told("step"))  # noqa: E731
    wait_for("a step of both replicas", both, START_S)


def products(pythons: Mapping[str, str]) -> list[Product]:
    """``pythons``: the interpreter of each rival's own environment, by name; this one for the others."""

    def python(name: str) -> str:
        return pythons.get(name, sys.executable)

    return [
        Product(name="lmres", python=python("lmres"), module="lmres", start=_start_lmres, note="a standby"),
        Product(name="c10d", python=python("c10d"), module="torch.distributed.run", start=_start_c10d),
        Product(
            name="ft_launcher",
            python=python("ft_launcher"),
            module="nvidia_resiliency_ext.fault_tolerance.launcher",
            start=_start_ft_launcher,
            note="a spare; sends heartbeats for the hang",
        ),
        Product(
            name="lm-resiliency",
            python=python("lm-resiliency"),
            module="lm_resiliency",
            start=_start_lm_resiliency,
            note="a standby; no manager program, which its user has to write; no worker config: it needs NCCL",
        ),
        Product(
            name="torchft",
            python=python("torchft"),
            module="torchft",
            start=_start_torchft,
            note="adapted program; survivors go on with fewer replicas",
            survives=True,
        ),
    ]
