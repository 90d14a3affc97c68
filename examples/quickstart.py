"""The demonstration behind quickstart.sh: a run that loses a worker, then a whole node, and finishes all the same.

Two active agents and one standby of torchrun run on this host, each as if it were a host of its own: with its own
node id and state folder. The program they train is examples/char_lm.py, which knows nothing of lmres. Everything
started here is ended here, also after a failure or Ctrl-C; only the folder with the logs stays. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

EXAMPLES = Path(__file__).resolve().parent
PROGRAM = EXAMPLES / "char_lm.py"
POLICY = EXAMPLES / "policy.yaml"
LMRES = [sys.executable, "-m", "lmres.cli.main"]
POLL_S = 0.05
LOSS = re.compile(r"^step +(\d+) +loss ([\d.]+)$", re.MULTILINE)

Found = TypeVar("Found")
Event = Mapping[str, Any]


class DemoError(Exception):
    """The demonstration did not go as it should."""


# Processes, as Linux shows them in /proc.


def environment(pid: int) -> bytes:
    """What the process was started with; empty for one that is gone, is a zombie or belongs to someone else."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def all_pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def with_descendants(root: int) -> list[int]:
    """The process and all that it started, directly or not."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        with contextlib.suppress(OSError):
            # "PID (NAME) STATE PPID ...", and the name may hold spaces and brackets.
            parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(pid)
    family = [root]
    for pid in family:
        family += children.get(pid, [])
    return family


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass
class Node:
    """One agent, and what it tells: its events and its log, which the output of its workers goes to."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def state_dir(self) -> Path:
        return self.folder / self.name

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def event(self, name: str, generation: int | None = None) -> Event | None:
        """The first event of this name, and of this generation where one is given."""
        try:
            lines = (self.state_dir / "events.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return None
        events: list[Event] = [json.loads(line) for line in lines if line.endswith("\n")]
        matching = (e for e in events if e["event"] == name and generation in {None, e["generation"]})
        return next(matching, None)


class Demo:
    """The run. ``folder`` takes logs and states."""

    def __init__(self, folder: Path, *, steps: int, timeout_s: float) -> None:
        self.folder = folder
        self.steps = steps
        self.timeout_s = timeout_s
        self.nodes: dict[str, Node] = {}
        self.started_s = time.monotonic()
        self.run_id = f"quickstart-{os.getpid()}"
        self.endpoint = f"127.0.0.1:{free_port()}"
        # torchrun leaves its temporary files behind, so they get a folder that is removed here. All processes of the
        # demonstration inherit the variable, which is how they are found again.
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)

    # What it prints.

    def say(self, text: str, style: str = "") -> None:
        print(f"{time.monotonic() - self.started_s:6.1f} s  {styled(text, style)}", flush=True)

    # The agents.

    def arguments(self, name: str) -> list[str]:
        """What torchrun is given. Hosts of their own need neither node_id nor state_dir: all commands are the same."""
        options = {
            "store_type": "tcp",
            "lm_resiliency_worker_config": short(POLICY),
            "node_id": name,
            "state_dir": str(self.folder / name),
        }
        return [
            "--nnodes=2:3",
            "--nproc-per-node=1",
            "--max-restarts=3",
            "--rdzv-backend=lm_resiliency",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={self.run_id}",
            f"--rdzv-conf={','.join(f'{key}={value}' for key, value in options.items())}",
            short(PROGRAM),
            f"--steps={self.steps}",
            f"--log-every={max(1, self.steps // 20)}",
        ]

    def start(self, name: str) -> Node:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *self.arguments(name)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**inherited, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)},
                start_new_session=True,
            )
        self.nodes[name] = Node(name, self.folder, process)
        return self.nodes[name]

    # Waiting.

    def wait(self, what: str, found: Callable[[], Found | None], *, nodes: tuple[Node, ...]) -> Found:
        """The first value that is not None. Fails after a while, or as soon as one of these agents has ended."""
        end_s = time.monotonic() + self.timeout_s
        while True:
            ended = [node for node in nodes if node.process.poll() is not None]
            value = found()
            if value is not None:
                return value
            if ended:
                raise DemoError(f"{ended[0].name} ended with {ended[0].process.returncode} before: {what}")
            if time.monotonic() > end_s:
                raise DemoError(f"waited {self.timeout_s:.0f} s for: {what}")
            time.sleep(POLL_S)

    def wait_event(self, node: Node, name: str, generation: int) -> Event:
        what = f"{name} of generation {generation} on {node.name}"
        return self.wait(what, lambda: node.event(name, generation), nodes=(node,))

    def wait_step(self, node: Node, step: int, *, after: int) -> str:
        """Waits until the workers of this node have printed that step, behind this place of the log."""

        def reached() -> str | None:
            lines = list(LOSS.finditer(node.log[after:]))
            return lines[-1][0] if lines and int(lines[-1][1]) >= step else None

        line = self.wait(f"step {step} in the log of {node.name}", reached, nodes=(node,))
        return " ".join(line.split()).replace(" loss", ", loss")

    # Ending.

    def remaining(self) -> list[int]:
        """Processes of this run that still live."""
        mark = f"TMPDIR={self.temporary}".encode()
        return sorted(pid for pid in all_pids() if pid != os.getpid() and mark in environment(pid).split(b"\0"))

    def wait_nothing_left(self, seconds: float) -> list[int]:
        end_s = time.monotonic() + seconds
        while (left := self.remaining()) and time.monotonic() < end_s:
            time.sleep(POLL_S)
        return left

    def close(self) -> None:
        for node in self.nodes.values():
            if node.process.poll() is None:
                kill(node.process.pid)
        for _ in range(100):  # a process may start another one between the look and the kill
            left = self.remaining()
            if not left:
                break
            for pid in left:
                kill(pid)
            time.sleep(POLL_S)
        for node in self.nodes.values():
            node.process.wait(10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def short(path: Path) -> str:
    """The path from the current folder where it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def styled(text: str, style: str) -> str:
    code = {"bold": "1", "red": "31", "green": "32", "dim": "2"}.get(style)
    return f"\033[{code}m{text}\033[0m" if code and sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


def show_command(demo: Demo, name: str) -> None:
    """The command as it can be typed, a few options a line."""
    options = [shlex.quote(option) for option in demo.arguments(name)]
    torchrun = short(Path(sys.executable).with_name("torchrun"))
    lines = [" ".join([torchrun, *options[:3]]), " ".join(options[3:6]), options[6], " ".join(options[7:])]
    print("  " + " \\\n      ".join(lines))


def demonstrate(demo: Demo) -> None:
    """The acts, in order. Raises DemoError where one does not happen."""
    checked = subprocess.run([*LMRES, "policy", "check", str(POLICY)], capture_output=True, text=True, check=False)
    if checked.returncode:
        raise DemoError(f"the policy is refused: {checked.stderr or checked.stdout}")

    first, second, standby = "alpha", "bravo", "charlie"
    print(f"Agent {first}; {second} and {standby} differ only in node_id and state_dir, as all are on this host:\n")
    show_command(demo, first)
    print()

    alpha = demo.start(first)
    demo.wait("the store of alpha", lambda: "hosts the store" in alpha.log or None, nodes=(alpha,))
    bravo = demo.start(second)
    plan = demo.wait_event(alpha, "plan_committed", 1)
    charlie = demo.start(standby)
    demo.wait("agent_parked on charlie", lambda: charlie.event("agent_parked"), nodes=(alpha, bravo, charlie))
    demo.say(f"{first} and {second} train, {standby} waits as standby")

    # Rank 0, which prints, is in slot 0. It loses its worker, and the other node is lost later.
    leader, other = (demo.nodes[plan["active"][slot]] for slot in ("0", "1"))
    started = demo.wait_event(leader, "generation_started", 1)
    after = lose_worker(demo, leader, started)
    survivors = (leader, charlie)
    lose_node(demo, leader, other, charlie, after)
    finish(demo, survivors)


def lose_worker(demo: Demo, leader: Node, started: Event) -> int:
    """SIGKILL to one worker: the same nodes start new workers. Returns where the log of the new ones begins."""
    line = demo.wait_step(leader, demo.steps // 5, after=0)
    pid = started["pids"][0]
    demo.say(f"{line}: SIGKILL to the worker of {leader.name} (pid {pid})", "bold")
    killed_s = time.time()
    kill(pid)
    return recovered(demo, leader, 2, killed_s, "the same nodes, new workers")


def lose_node(demo: Demo, leader: Node, lost: Node, standby: Node, after: int) -> None:
    """SIGKILL to an agent and all it started, as if the host lost power: the standby takes its place.

    Should it have started the store's process, that one is spared: it stands for a host of its own.
    """
    resumed = demo.wait_event(leader, "generation_started", 2)["resume_step"]
    line = demo.wait_step(leader, resumed + demo.steps // 5, after=after)
    victims = [pid for pid in with_descendants(lost.process.pid) if "tcp_server" not in command_line(pid)]
    demo.say(f"{line}: SIGKILL to the node {lost.name} (its agent and {len(victims) - 1} processes under it)", "bold")
    killed_s = time.time()
    for pid in victims:
        kill(pid)
    slot = demo.wait_event(standby, "generation_started", 3)["slot"]
    recovered(demo, leader, 3, killed_s, f"{standby.name} is in slot {slot} in place of {lost.name}")


def recovered(demo: Demo, leader: Node, generation: int, killed_s: float, what: str) -> int:
    """Waits for the recovery and tells of it. Returns where the log of the new workers begins."""
    started = demo.wait_event(leader, "generation_started", generation)
    after = len(leader.log)
    done = demo.wait_event(leader, "recovery_completed", generation)
    where = f"on from step {started['resume_step']}" if started["resume_step"] else "the program starts again at step 0"
    demo.say(f"training again {done['time'] - killed_s:.1f} s after the kill: {what}; {where}", "green")
    return after


def finish(demo: Demo, survivors: tuple[Node, ...]) -> None:
    line = demo.wait_step(survivors[0], demo.steps, after=0)
    for node in survivors:
        code = demo.wait(f"the end of {node.name}", node.process.poll, nodes=())
        if code != 0:
            raise DemoError(f"{node.name} ended with {code}, not with 0")
    left = demo.wait_nothing_left(10)
    if left:
        raise DemoError("left behind: " + "; ".join(f"{pid} {command_line(pid)[:100]}" for pid in left))
    names = " and ".join(node.name for node in survivors)
    demo.say(f"{line}: training is finished, {names} ended with 0, no process is left", "green")


def show_timeline(demo: Demo) -> None:
    """What the agents wrote down, by ``lmres incidents``: each recovery and its phases on the slowest node."""
    command = ["incidents", "--events", *(str(node.state_dir) for node in demo.nodes.values())]
    told = subprocess.run([*LMRES, "--json", *command], capture_output=True, text=True, check=False)
    if told.returncode:
        raise DemoError(f"lmres incidents ended with {told.returncode}: {told.stderr}")
    incidents = json.loads(told.stdout)["incidents"]
    if [incident["failure_class"] for incident in incidents] != ["process_crash", "node_lost"]:
        raise DemoError(f"lmres incidents does not tell of one process_crash and one node_lost: {told.stdout}")

    slowest = [max((n["phases"] for n in i["phases"]), key=lambda phases: phases["total_s"] or 0) for i in incidents]
    shown = [name for name in slowest[0] if any(phases[name] is not None for phases in slowest)]
    print("\nWhat the agents recorded, in seconds:\n")
    print(f"  {'':14}", *(f"{name.removesuffix('_s'):>10}" for name in shown))
    for incident, phases in zip(incidents, slowest, strict=True):
        cells = ("-" if phases[name] is None else f"{phases[name]:.2f}" for name in shown)
        print(f"  {incident['failure_class']:14}", *(f"{cell:>10}" for cell in cells))
    print()
    for incident in incidents:
        print(f"  {incident['failure_class']:14} {incident['action']}: {incident['reason']}")
    program = Path(sys.executable).with_name("lmres")
    print(f"\nEvidence, plans and phases of all nodes:\n  {shlex.join([short(program), *command])}", flush=True)


def show_failure(demo: Demo, error: DemoError) -> None:
    print(styled(f"\nquickstart failed: {error}", "red"), file=sys.stderr)
    named = [node for node in demo.nodes.values() if node.name in str(error)]
    for node in named or demo.nodes.values():
        print(f"\n--- the end of {node.log_path}:", *node.log.splitlines()[-25:], sep="\n", file=sys.stderr)


def stop(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of the training (default 200)")
    parser.add_argument("--timeout-s", type=float, default=120, help="longest wait for anything (default 120)")
    parser.add_argument("--folder", type=Path, help="a new folder for the logs (default: a temporary one)")
    arguments = parser.parse_args()
    if arguments.steps < 20:
        parser.error("--steps: 20 at least, so that there is time for two failures")

    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="lmres-quickstart-"))
    demo = Demo(folder.resolve(), steps=arguments.steps, timeout_s=arguments.timeout_s)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        demonstrate(demo)
        show_timeline(demo)
    except DemoError as error:
        show_failure(demo, error)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        demo.close()
        shutil.rmtree(demo.temporary, ignore_errors=True)
        print(f"\nLogs and events: {demo.folder}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
