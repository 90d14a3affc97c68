"""``lmres bench``: what it refuses, how it shows what it found, and what it reads from a program's lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmres.cli import bench
from lmres.cli.main import build_parser, main
from lmres.cli.trial import Told, Trial, TrialAgent, TrialFailed, lmres_command, wait_for

Captured = pytest.CaptureFixture[str]


def plan(*argv: str) -> bench.Plan:
    return bench.plan_of(build_parser().parse_args(["bench", *argv]))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--timeout", "0"), "--timeout: found '0'"),
        (("--timeout", "nan"), "more than 0"),
        (("--timeout", "soon"), "seconds"),
        (("--faults", "disk"), "allowed: worker, node"),
        (("--nnodes", "2:3"), "give --rdzv-endpoint too"),
        (("--rdzv-endpoint", "h:1", "--nnodes", "3:3"), "less than MAX"),
        (("--rdzv-endpoint", "h:1", "--nnodes", "1:2"), "at least 2"),
        (("--rdzv-endpoint", "h:port"), "port"),
        (("--policy", "/no/such/file"), "can not be read"),
        (("--keep", "/proc/no"), "can not be made"),
        (("--frobnicate",), "unrecognized arguments"),
    ],
)
def test_what_can_not_be_meant_is_refused(argv: tuple[str, ...], words: str, capsys: Captured) -> None:
    try:
        code: Any = main(["bench", *argv, "--json"])
    except SystemExit as ended:
        code = ended.code
    error = json.loads(capsys.readouterr().out)
    assert code == error["exit_code"] == 64
    assert words in error["error"]


def test_a_bad_policy_is_refused_before_anything_starts(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("schema_version: 1\nworkers: {warn: true}\n")
    assert main(["bench", "--policy", str(path), "--json"]) == 64
    assert "warm" in capsys.readouterr().out


def test_defaults() -> None:
    found = plan()
    assert (found.join, found.nnodes, found.faults, found.timeout_s) == (None, "2:3", ("worker", "node"), 180.0)
    assert plan("--faults", "node", "worker", "node").faults == ("worker", "node")
    assert plan("--rdzv-endpoint", "h:1", "--nnodes", "4:6").nnodes == "4:6"


def test_rendering() -> None:
    phases: dict[str, Any] = dict.fromkeys(bench.PHASES, 0.25)
    phases["restore_s"] = None
    agents = [{"slot": slot, "node_id": "a", "cause": "", **phases} for slot in (0, 1)]
    text = bench.render(
        {
            "worker": {"planted_here": True, "step_s": 0.4, "agents": agents},
            "node": {"planted_here": True, "step_s": None, "agents": []},
        },
        width=100,
    )
    lines = text.splitlines()
    assert lines[0].split() == [
        "fault",
        "slot",
        *["detect", "decide", "stop", "rendezvous", "start", "restore", "first", "step", "total"],
    ]
    assert [line.split()[:3] for line in lines[1:3]] == [["worker", "killed", "0"], ["worker", "killed", "1"]]
    assert " - " in lines[1]
    assert lines[3:] == [
        "worker killed: 0.40 s to the next step",
        "node killed here: the other hosts tell what came of it",
    ]
    assert bench.render({}, width=100) == "no fault was recovered from on this host"


def test_the_programs_lines(tmp_path: Path) -> None:
    """Also when a line comes in two pieces, with a prefix, or is another's."""
    path = tmp_path / "a.log"
    path.write_bytes(b"some words\nlife 0 17 1.5\n[default0]:step 3 17 2.25 2\nstep three\nlife 1")
    agent = TrialAgent(name="a", log_path=path, process=None)  # type: ignore[arg-type]
    assert agent.told("life") == [Told(kind="life", number=0, pid=17, at_s=1.5)]
    with path.open("ab") as file:
        file.write(b" 18 3.5\n")
    assert [t.pid for t in agent.told("life")] == [17, 18]
    assert agent.told("life")[1].at_s == 3.5


def test_what_a_run_started_is_ended(tmp_path: Path) -> None:
    """A child in a session of its own too."""
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], start_new_session=True).wait()"
    with pytest.raises(TrialFailed, match="in vain"), Trial(tmp_path) as trial:
        trial.start("a", [sys.executable, "-c", code])
        wait_for("both", lambda: len(trial.alive()) == 2, 30)
        wait_for("nothing", lambda: False, 0.05)
    assert trial.alive() == []


def test_the_command_has_no_policy_unless_one_is_given(tmp_path: Path) -> None:
    def words(policy: Path | None) -> str:
        command = lmres_command(
            "a", folder=tmp_path, endpoint="h:1", run_id="r", nnodes="2:3", policy=policy, program=["train.py"]
        )
        return subprocess.list2cmdline(command)

    assert "worker_config" not in words(None)
    assert "lm_resiliency_worker_config=p.yaml" in words(Path("p.yaml"))
