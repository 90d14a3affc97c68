"""What this backend costs when nothing fails, and single times that are not a recovery.

Each part is a function of the products, the number of runs and a folder; it returns its result for the JSON file and
the rows of its table. Its docstring is the table's heading.
"""

from __future__ import annotations

import itertools
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import cell, events_of, one, summary
from benchmarks.products import HERE, START_S, Product, start_agents, torchrun, wait_warm
from lmres.cli.trial import PROGRAM, Trial, free_port, lmres_command, store_pid, wait_for

SLEEPS = str(HERE / "sleeps.py")
LIBRARY = "transformers.models.llama.modeling_llama"
WINDOW_S = 20.0
REST_S = 30.0
AGENTS = 8

Products = Mapping[str, Product]
Part = Callable[[Products, int, Path], tuple[dict[str, Any], list[list[str]]]]


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.3f}" if value is not None and base else "-"


def imports(by_name: Products, runs: int, top: Path) -> tuple[dict[str, Any], list[list[str]]]:
    """A worker is killed, the program imports torch and transformers: seconds to the next step."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in ("lmres", "c10d"):
        look = [by_name[name].python, "-c", f"import {LIBRARY}"]
        if subprocess.run(look, capture_output=True, timeout=300, check=False).returncode != 0:
            return {}, [["not run: transformers is not installed"]]
    for number in range(runs):
        for name in ("lmres", "c10d"):
            env = {"TRIAL_IMPORTS": LIBRARY}
            run = one(by_name[name], "crash", top / f"{name}-{number}", 120.0, env)
            found.setdefault(name, []).append(run)
    table = {name: summary(all_runs) for name, all_runs in found.items()}
    rows = [["product", "step s", "min to max", "runs", "to c10d"]]
    for name, row in table.items():
        span = "-" if row["median"] is None else f"{row['min']:.2f} to {row['max']:.2f}"
        share = f"{row['recovered']}/{row['runs']}"
        rows.append([name, cell(row["median"]), span, share, _ratio(row["median"], table["c10d"]["median"])])
    return {"runs": found, "summary": table}, rows


def _policy(folder: Path, text: str = "") -> Path:
    path = folder / "policy.yaml"
    path.write_text(f"schema_version: 1\nobserve: {{log_level: debug}}\n{text}")
    return path


def launch(by_name: Products, runs: int, top: Path) -> tuple[dict[str, Any], list[list[str]]]:
    """Two agents started at once: seconds until both workers have made a step."""
    found: dict[str, list[float]] = {"lmres": [], "c10d": []}
    for number in range(runs):
        for name, values in found.items():
            with Trial(top / f"{name}-{number}") as trial:
                port = free_port()
                began = time.time()
                for agent in "ab":
                    trial.start(agent, _launch_command(by_name[name], agent, trial, port))
                trial.wait_training(2, START_S)
                first: dict[int, float] = {}
                for told in trial.told("step"):
                    first.setdefault(told.pid, told.at_s)
                values.append(max(first.values()) - began)
    medians = {name: statistics.median(values) for name, values in found.items()}
    rows = [["product", "s", "min to max", "to c10d"]]
    for name, values in found.items():
        span = f"{min(values):.2f} to {max(values):.2f}"
        rows.append([name, cell(medians[name]), span, _ratio(medians[name], medians["c10d"])])
    return {"runs_s": found, "ratio": medians["lmres"] / medians["c10d"]}, rows


def _launch_command(product: Product, name: str, trial: Trial, port: int) -> list[str]:
    if product.name == "c10d":
        return torchrun(product, "2:2", "c10d", port, trial.token[:8])
    return lmres_command(
        name,
        folder=trial.folder,
        endpoint=f"127.0.0.1:{port}",
        run_id=trial.token[:8],
        nnodes="2:2",
        policy=_policy(trial.folder),
        python=product.python,
    )


def decision(by_name: Products, runs: int, top: Path) -> tuple[dict[str, Any], list[list[str]]]:
    """8 agents on this host, sleeping programs, a worker is killed: from the first fault_detected to plan_committed."""
    found: list[dict[str, float]] = []
    with Trial(top) as trial:
        start_agents(trial, "abcdefgh"[:AGENTS], f"{AGENTS}:{AGENTS}", by_name["lmres"].python, [SLEEPS], _policy(top))
        time.sleep(10)
        for number in range(max(runs, 3)):
            generation = number + 1
            victim = trial.agents[1 + number % (AGENTS - 1)]
            killed = victim.kill_worker()

            def planned(generation: int = generation) -> dict[str, Any] | None:
                plans = [e for e in events_of(trial, "plan_committed") if e["to_generation"] == generation + 1]
                return plans[0] if plans else None

            plan = wait_for("a plan", planned, START_S)
            fault = next(e for e in events_of(trial, "fault_detected") if e["generation"] == generation)
            found.append({"notice_s": fault["time"] - killed, "decide_s": plan["time"] - fault["time"]})
            alive = (generation + 1) * AGENTS
            wait_for("all workers again", lambda alive=alive: len(trial.told("life")) >= alive, START_S)  # type: ignore[misc]
            time.sleep(5)
    rows = [["", "ms", "min to max"]]
    for key, name in (("notice_s", "fault to notice"), ("decide_s", "notice to commit")):
        values = [run[key] * 1000 for run in found]
        rows.append([name, f"{statistics.median(values):.0f}", f"{min(values):.0f} to {max(values):.0f}"])
    return {"runs": found}, rows


def overhead(by_name: Products, runs: int, top: Path) -> tuple[dict[str, Any], list[list[str]]]:
    """Steps of 100 ms in a healthy run: the default policy against no policy, interleaved; medians of the runs."""
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for number in range(runs):
        for name, measured in found.items():
            with Trial(top / f"{name}-{number}") as trial:
                policy = _policy(trial.folder) if name == "with" else None
                start_agents(trial, "ab", "2:2", by_name["lmres"].python, [str(PROGRAM)], policy)
                trial.wait_training(2, START_S)
                if name == "with":
                    wait_warm(trial)
                else:
                    time.sleep(10)
                time.sleep(WINDOW_S)
                times = [t.at_s for t in trial.agents[0].told("step")]
            last = [t for t in times if t >= times[-1] - WINDOW_S + 1]
            gaps = [after - before for before, after in itertools.pairwise(last)]
            measured.append({"mean_s": statistics.mean(gaps), "median_s": statistics.median(gaps)})
    rows = [["policy", "median step ms", "mean step ms", "to without (median)", "to without (mean)"]]
    middle = {
        name: {key: statistics.median(run[key] for run in all_runs) for key in ("median_s", "mean_s")}
        for name, all_runs in found.items()
    }
    for name, row in middle.items():
        ratios = [f"{row[key] / middle['without'][key] - 1:+.2%}" for key in ("median_s", "mean_s")]
        rows.append([name, f"{row['median_s'] * 1000:.2f}", f"{row['mean_s'] * 1000:.2f}", *ratios])
    return {"runs": found}, rows


# -- at rest ----------------------------------------------------------------------------------------------------------


class CountingDoor:
    """A way to a port of this host that counts the messages from those who come through it."""

    def __init__(self, port: int) -> None:
        self.messages = 0
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                return
            for source, sink, counts in ((near, far, True), (far, near, False)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._carry, args=(source, sink, counts), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        try:
            while data := source.recv(1 << 20):
                self.messages += counts  # a request is written at once, so it is read at once
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                end.close()

    def close(self) -> None:
        self._listener.close()


_PARTS = {"vault_main": "vault", "guardian": "guardian", "store": "store", "warm": "warm"}


def _processes(trial: Trial) -> dict[tuple[str, str], psutil.Process]:
    """The control plane's processes by agent and part. The training workers are left out."""
    workers = {t.pid for t in trial.told("life")}
    stores = {store_pid(agent) for agent in trial.agents}
    found: dict[tuple[str, str], psutil.Process] = {}
    for agent in trial.agents:
        process = psutil.Process(agent.process.pid)
        found[agent.name, "agent"] = process
        for child in process.children(recursive=True):
            if child.pid in workers:
                continue
            words = " ".join(child.cmdline())
            part = "store" if child.pid in stores else _part(words)
            found[agent.name, f"{part} {child.pid}"] = child
    return found


def _part(words: str) -> str:
    return next((part for mark, part in _PARTS.items() if mark in words), "warm")


def rest(by_name: Products, runs: int, top: Path) -> tuple[dict[str, Any], list[list[str]]]:
    """Agents at rest (two active, one standby, default policy, sleeping programs): % of a core, requests a second."""
    doors: dict[str, CountingDoor] = {}

    def endpoint_of(name: str, port: int) -> tuple[int, str]:
        if name == "a":
            return port, "true"
        doors[name] = CountingDoor(port)
        return doors[name].port, "false"

    with Trial(top) as trial:
        start_agents(trial, "abc", "2:3", by_name["lmres"].python, [SLEEPS], _policy(top), endpoint_of=endpoint_of)
        time.sleep(20)
        processes = _processes(trial)
        before = {key: sum(p.cpu_times()[:2]) for key, p in processes.items()}
        sent = {name: door.messages for name, door in doors.items()}
        began = time.monotonic()
        time.sleep(REST_S)
        lasted_s = time.monotonic() - began
        used: dict[str, dict[str, float]] = {}
        for (name, part), process in processes.items():
            share = 100 * (sum(process.cpu_times()[:2]) - before[name, part]) / lasted_s
            kind = part.split()[0]
            row = used.setdefault("store" if kind == "store" else name, {})
            row[kind] = row.get(kind, 0.0) + share
        rates = {name: (door.messages - sent[name]) / lasted_s for name, door in doors.items()}
    for door in doors.values():
        door.close()
    parts = sorted({part for row in used.values() for part in row})
    rows = [["", *(f"{part} %" for part in parts), "together %", "requests/s"]]
    for name, row in used.items():
        cells = [f"{row[part]:.2f}" if part in row else "-" for part in parts]
        rows.append([name, *cells, f"{sum(row.values()):.2f}", f"{rates[name]:.1f}" if name in rates else "-"])
    return {"cpu_percent": used, "requests_per_s": rates}, rows


PARTS: dict[str, Part] = {
    "imports": imports,
    "launch": launch,
    "decision": decision,
    "overhead": overhead,
    "rest": rest,
}
