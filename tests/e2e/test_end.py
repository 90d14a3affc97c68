"""How a run ends well."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.cluster import cluster, wait_until


def test_last_ranks_ten_seconds_apart(tmp_path: Path) -> None:
    with cluster(tmp_path, nnodes="3:4", env={"STEPS": "5", "LAST_S": "5"}) as c:
        nodes = c.form("a", "b", "c", "d")
        assert [n.wait_exit() for n in nodes] == [0, 0, 0, 0]
        assert len(nodes[0].events("plan_committed")) == 1
        for node in nodes:
            assert node.events("run_finished")[0]["outcome"] == "succeeded"
        wait_until("nothing left", lambda: not c.leftovers(), 10)


def test_functions_as_entry_points_end_too(tmp_path: Path) -> None:
    """``--run-path`` starts workers as functions, not through the command that is held."""
    with cluster(tmp_path, nnodes="2:2", env={"STEPS": "5"}) as c:
        c.program = ["--run-path", *c.program]
        a, b = (c.start(n) for n in ("a", "b"))
        assert [a.wait_exit(), b.wait_exit()] == [0, 0]


def test_what_a_worker_sees(tmp_path: Path) -> None:
    program = tmp_path / "look.py"
    program.write_text(
        "import json, os, stat, sys\n"
        "path = os.environ['LMRES_RESTART_CONTEXT']\n"
        "seen = {k: v for k, v in os.environ.items() if k.startswith(('LMRES_', 'LM_RES'))}\n"
        "seen['mode'] = stat.S_IMODE(os.stat(path).st_mode)\n"
        "seen['context'] = json.load(open(path))\n"
        "print('SEEN', json.dumps(seen), flush=True)\n"
        "os._exit(3 if os.environ['LMRES_GENERATION'] == '1' else 0)\n"
    )
    with cluster(tmp_path / "c", nnodes="1:1", program=[str(program)]) as c:
        node = c.start("a")
        assert node.wait_exit() == 0
        seen = [json.loads(line[5:]) for line in node.log.splitlines() if line.startswith("SEEN ")]
        assert [s["LMRES_GENERATION"] for s in seen] == ["1", "2"]
        for s in seen:
            assert s["LMRES_RUN_ID"] == c.run_id
            assert (s["LMRES_NODE_ID"], s["LMRES_SLOT"]) == ("a", "0")
            assert s["LMRES_RESUME_STEP"] == s["LM_RESILIENCY_TORCHRUN_CHECKPOINT_STEP"] == "0"
            assert s["LMRES_STATE_DIR"] == str(node.folder / "state")
            assert s["mode"] == 0o600
            assert s["context"]["generation"] == int(s["LMRES_GENERATION"])
        assert seen[1]["context"]["action"] == "restart"
        assert seen[1]["context"]["cause"]["exit_status"] == 3
