"""``lmres bench``: how fast this host, or these hosts, recover: a throw-away run, a worker killed, then a node.

On one host it starts three agents (two active, one standby) with a tiny program. With ``--rdzv-endpoint`` it starts one
agent, and the same command on the other hosts starts the others: the last slot is the victim, wherever it runs, and
the host of slot 0 ends the run. Each host prints what its own agents told; the phases are those of
``recovery_completed``. Everything it started is ended when it ends, however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmres.cli.command import Command, Output
from lmres.cli.observer import Observer
from lmres.cli.run_selection import RunSelection
from lmres.cli.stop import stop_run
from lmres.cli.text import columns, seconds, table, wrap
from lmres.cli.trial import Trial, TrialAgent, TrialFailed, free_port, lmres_command, store_pid, wait_for
from lmres.errors import ConfigError, LmresError
from lmres.fields import shown
from lmres.ids import Keys
from lmres.rendezvous.edge.policy_file import load_policy
from lmres.rendezvous.options import encode_run_id, parse_endpoint

FAULTS = ("worker", "node")
PHASES = ("detect_s", "decide_s", "stop_s", "rendezvous_s", "start_s", "restore_s", "first_step_s", "total_s")
AGENTS = 3
MAX_TIMEOUT_S = 3600.0
QUIET_S = 3.0
WARM_S = 20.0
"""How long the workers that wait may take to be ready; a fault that comes earlier is recovered from cold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was asked for. ``join``: the endpoint of a run on several hosts; None: this host alone."""

    policy: Path | None
    timeout_s: float
    join: str | None
    run_id: str
    nnodes: str
    faults: tuple[str, ...]
    node_id: str | None = None


@dataclass(slots=True)
class Bench:
    """The run on this host. Results by fault: when it was planted here, and what each agent told."""

    plan: Plan
    trial: Trial
    endpoint: str
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    _end_s: float = 0.0

    def run(self) -> None:
        """Raises TrialFailed."""
        self._end_s = time.monotonic() + self.plan.timeout_s
        names = "abc" if self.plan.join is None else "a"
        for name in names:
            agent = self._start(name)
            if self.plan.join is None and name == "a":
                self._wait("the store", lambda agent=agent: store_pid(agent))
            if self.plan.join is None and name == "b":
                self._wait("the first plan", self._placed)
        generation = 1
        for fault in self.plan.faults:
            self._settle(generation)
            if not self._plant(fault, generation):
                return
            generation += 1
        self._stop(generation)

    def _start(self, name: str) -> TrialAgent:
        command = lmres_command(
            name,
            folder=self.trial.folder,
            endpoint=self.endpoint,
            run_id=self.plan.run_id,
            nnodes=self.plan.nnodes,
            policy=self.plan.policy,
            conf=None if self.plan.node_id is None else {"node_id": self.plan.node_id},
        )
        if self.plan.join is not None and self.plan.node_id is None:  # the default name tells hosts apart
            command = [word.replace(f"node_id={name},", "") for word in command]
        return self.trial.start(name, command)

    # -- what the agents here have told --------------------------------------------------------------------------------

    def events(self, agent: TrialAgent, name: str, generation: int | None = None) -> list[dict[str, Any]]:
        path = self.trial.folder / agent.name / "events.jsonl"
        found = []
        for line in path.read_text().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [e for e in found if e["event"] == name and generation in (None, e["generation"])]

    def _placed(self) -> bool:
        """Whether the first group runs, as far as it is seen from here."""
        return any(self.events(a, "generation_started", 1) for a in self.trial.agents)

    def _active(self, generation: int) -> dict[int, TrialAgent]:
        """The agents here by their slot."""
        return {e["slot"]: a for a in self._living() for e in self.events(a, "generation_started", generation)}

    def _living(self) -> list[TrialAgent]:
        return [a for a in self.trial.agents if a.process.poll() is None]

    def _wait(self, what: str, condition: Any, *, timeout_s: float | None = None) -> Any:
        left_s = max(0.1, min(self._end_s - time.monotonic(), timeout_s or math.inf))

        def checked() -> Any:
            if not self._living():
                agent = self.trial.agents[0]
                raise TrialFailed(f"the agents have ended; the end of the first one's log:\n{agent.log[-2000:]}")
            return condition()

        return wait_for(what, checked, left_s)

    # -- the faults ----------------------------------------------------------------------------------------------------

    def _settle(self, generation: int) -> None:
        """Until the group trains, and the workers that wait are ready; for the latter not for ever."""
        self._wait("the group to train, or this node to be parked", lambda: self._in_place(generation))
        with contextlib.suppress(TrialFailed):
            self._wait("warm workers", self._warm, timeout_s=WARM_S)
        time.sleep(QUIET_S)

    def _in_place(self, generation: int) -> bool:
        active = self._active(generation).values()
        trains = all(self.events(a, "training_resumed", generation) for a in active)
        parked = [a for a in self._living() if a not in active and self.events(a, "agent_parked")]
        return trains and len(parked) + len(active) == len(self._living())

    def _warm(self) -> bool:
        """One is ready for each start so far but the first, which is cold, and one more (said at log level debug)."""
        return all(
            a.log.count("is ready, ") >= max(1, len(self.events(a, "generation_started"))) for a in self._living()
        )

    def _plant(self, fault: str, generation: int) -> bool:
        """False: this host has nothing left to look at."""
        active = self._active(generation)
        last = self._last_slot()
        fault_s = None
        if last in active:
            victim = active[last]
            if fault == "worker":
                fault_s = victim.kill_worker()
            else:
                store = store_pid(victim)
                fault_s = victim.kill_node(but=() if store is None else (store,))
                victim.process.wait(10)
        self.results[fault] = {"planted_here": fault_s is not None, "step_s": None, "agents": []}
        if not self._living():
            return False
        self._wait(f"the recovery from the {fault}'s loss", lambda: self._recovered(generation + 1))
        steps = [e["time"] for a in self._living() for e in self.events(a, "training_resumed", generation + 1)]
        if fault_s is not None and steps:
            self.results[fault]["step_s"] = round(min(steps) - fault_s, 3)
        for slot, agent in sorted(self._active(generation + 1).items()):
            for event in self.events(agent, "recovery_completed", generation + 1):
                row = {"slot": slot, "node_id": event["node_id"], "cause": event["cause"]}
                self.results[fault]["agents"].append({**row, **{p: event.get(p) for p in PHASES}})
        return True

    def _last_slot(self) -> int:
        return int(self.plan.nnodes.split(":", maxsplit=1)[0]) - 1

    def _recovered(self, generation: int) -> bool:
        """All agents here have seen the plan, and those that it makes active have told of their recovery."""
        for agent in self._living():
            plans = [e for e in self.events(agent, "plan_committed") if e["to_generation"] == generation]
            if not plans:
                return False
            if plans[0]["action"] == "stop":
                raise TrialFailed(f"the run was ended instead: {plans[0]['reason']}")
            active = plans[0]["node_id"] in plans[0]["active"].values()
            if active and not self.events(agent, "recovery_completed", generation):
                return False
        return True

    def _stop(self, generation: int) -> None:
        """The host of slot 0 ends the run for all, when they have told too; the others wait for that."""
        if self.plan.join is not None:
            time.sleep(QUIET_S)
        if 0 in self._active(generation):
            host, port = parse_endpoint(self.endpoint, max_nodes=AGENTS)
            selection = RunSelection(
                endpoint=self.endpoint,
                store_type="tcp",
                run_id=self.plan.run_id,
                keys=Keys(run=encode_run_id(self.plan.run_id)),
                host=host,
                port=port,
            )
            with contextlib.suppress(LmresError), Observer(selection) as observer:
                stop_run(observer, "the measurement is done")
        with contextlib.suppress(TrialFailed):
            wait_for("the agents to end", lambda: not self._living(), min(20.0, self.plan.timeout_s))


# -- the command ------------------------------------------------------------------------------------------------------


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", metavar="FILE", help="the run's policy; else the defaults")
    parser.add_argument(
        "--faults", nargs="+", metavar="FAULT", default=list(FAULTS), help="worker, node; in this order"
    )
    parser.add_argument("--timeout", metavar="SECONDS", default="180", help="for everything together")
    parser.add_argument("--keep", metavar="FOLDER", help="keep logs and events here; a new folder")
    group = parser.add_argument_group("on several hosts, the same on each")
    group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="starts one agent here, for a run that meets there")
    group.add_argument("--rdzv-id", metavar="RUN", default="lmres-bench", help="the throw-away run's id")
    group.add_argument("--node-id", metavar="NODE", help="this agent's name; else by host")
    group.add_argument("--nnodes", metavar="MIN:MAX", help="how many hosts there are; else 2:3")


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Raises ConfigError for what can not be meant."""
    try:
        timeout_s = float(arguments.timeout)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        allowed = f"seconds, more than 0, at most {MAX_TIMEOUT_S:.0f}"
        raise ConfigError(f"--timeout: found {shown(arguments.timeout)}; allowed: {allowed}")
    for fault in arguments.faults:
        if fault not in FAULTS:
            raise ConfigError(f"--faults: found {shown(fault)}; allowed: {', '.join(FAULTS)}")
    policy = None if arguments.policy is None else Path(arguments.policy).absolute()
    if policy is not None:
        load_policy(policy)
    join, nnodes = arguments.rdzv_endpoint, arguments.nnodes
    for option, value in (("--nnodes", nnodes), ("--node-id", arguments.node_id)):
        if join is None and value is not None:
            raise ConfigError(f"{option}: is for several hosts; give --rdzv-endpoint too, the same on each")
    if join is not None:
        parse_endpoint(join, max_nodes=AGENTS)
    least, _, most = (nnodes or f"2:{AGENTS}").partition(":")
    if not (least.isdecimal() and most.isdecimal() and 2 <= int(least) < int(most)):
        raise ConfigError(f"--nnodes: found {shown(nnodes)}; allowed: MIN:MAX with MIN at least 2 and less than MAX")
    return Plan(
        policy=policy,
        timeout_s=timeout_s,
        join=join,
        run_id=arguments.rdzv_id,
        nnodes=f"{least}:{most}",
        faults=tuple(f for f in FAULTS if f in arguments.faults),
        node_id=arguments.node_id,
    )


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="lmres-bench-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    path = Path(keep).absolute()
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--keep: {shown(keep)} can not be made: {error.strerror}; give a new folder") from error
    yield path


def render(results: dict[str, dict[str, Any]], *, width: int) -> str:
    """A row for each agent and fault."""
    rows = [["fault", "slot", *(p.removesuffix("_s").replace("_", " ") for p in PHASES)]]
    for fault, result in results.items():
        rows += [[f"{fault} killed", str(a["slot"]), *(seconds(a[p]) for p in PHASES)] for a in result["agents"]]
    lines = table(rows, width=width) if len(rows) > 1 else []
    for fault, result in results.items():
        if result["step_s"] is not None:
            lines.append(f"{fault} killed: {result['step_s']:.2f} s to the next step")
        elif result["planted_here"]:
            lines.append(f"{fault} killed here: the other hosts tell what came of it")
    return "\n".join(lines or ["no fault was recovered from on this host"])


def _run(arguments: argparse.Namespace, output: Output) -> int:
    plan = plan_of(arguments)
    if not output.json:
        words = "a throw-away run is started, a worker and then a node of it are killed; this takes about a minute"
        print("\n".join(wrap(words, width=columns())), flush=True)
    with _folder(arguments.keep) as folder, Trial(folder) as trial:
        policy = plan.policy
        if policy is None:
            policy = folder / "policy.yaml"
            policy.write_text("schema_version: 1\nobserve: {log_level: debug}\n")
        run_id = plan.run_id if plan.join is not None else f"{plan.run_id}-{trial.token[:8]}"
        plan = replace(plan, policy=policy, run_id=run_id)
        bench = Bench(plan=plan, trial=trial, endpoint=plan.join or f"127.0.0.1:{free_port()}")
        bench.run()
    output.emit({"nnodes": plan.nnodes, "faults": bench.results}, render(bench.results, width=columns()))
    return 0


COMMAND = Command(
    name="bench", help="kill a worker and a node of a throw-away run, and time it", configure=_configure, run=_run
)
