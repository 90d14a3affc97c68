"""Who may come in, by which endpoint, with which configuration."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.cluster import PROGRAM, TORCHRUN, cluster, free_port, wait_until


def test_more_than_max_the_same_name_and_other_policies_are_refused(tmp_path: Path) -> None:
    with cluster(tmp_path, env={"STEPS": "200"}) as c:
        a, b, s = c.form("a", "b", "c")
        extra = c.start("d")
        twin = c.start("b", conf={"state_dir": str(tmp_path / "twin")})
        neighbour = c.start("b", conf={"state_dir": str(b.folder / "state")})
        other = c.start("e", policy="recovery: {node_strikes: 5}\n")
        assert [n.wait_exit(60) for n in (extra, twin, neighbour, other)] == [64, 64, 64, 64]
        assert str(b.process.pid) in neighbour.log and "node_id" in neighbour.log
        assert not b.events("agent_left")
        assert "takes 3 agents at most" in extra.log
        assert "in use by a live agent" in twin.log
        assert str(b.process.pid) in twin.log
        assert "recovery.node_strikes" in other.log and "5" in other.log and "2" in other.log
        # Nobody was disturbed.
        assert len(a.events("plan_committed")) == 1
        assert all(n.process.poll() is None for n in (a, b, s))


def test_two_runs_on_one_host_are_independent(tmp_path: Path) -> None:
    with (
        cluster(tmp_path / "one", nnodes="1:1", env={"STEPS": "30"}) as one,
        cluster(tmp_path / "two", nnodes="1:1", env={"STEPS": "30", "PLANT_EXIT": "0:5"}) as two,
    ):
        two.endpoint = one.endpoint  # even with one store
        x, y = one.start("n"), two.start("n")
        assert [x.wait_exit(), y.wait_exit()] == [0, 0]
        assert len(x.events("plan_committed")) == 1
        assert len(y.events("plan_committed")) == 2


@pytest.mark.parametrize("host", ["localhost", "own-address", "[::1]", "host-name"])
def test_every_form_of_endpoint_finds_exactly_one_host(tmp_path: Path, host: str) -> None:
    if host == "own-address":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect(("192.0.2.1", 9))
            host = s.getsockname()[0]
    elif host == "host-name":
        host = socket.gethostname()
    with cluster(tmp_path, endpoint=f"{host}:{free_port()}", nnodes="2:2", env={"STEPS": "3"}) as c:
        a, b = (c.start(n) for n in ("a", "b"))
        assert [a.wait_exit(), b.wait_exit()] == [0, 0]
        c.store_pid()


def test_a_name_that_resolves_later(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs to write /etc/hosts")
    name = f"late-{os.getpid()}.test"
    hosts = Path("/etc/hosts")
    before = hosts.read_text()
    try:
        with cluster(tmp_path, endpoint=f"{name}:{free_port()}", nnodes="2:2", env={"STEPS": "3"}) as c:
            a, b = (c.start(n) for n in ("a", "b"))
            time.sleep(5)  # both have found the name missing by now
            assert a.process.poll() is None and b.process.poll() is None
            hosts.write_text(f"{before}\n127.0.0.1 {name}\n")
            assert [a.wait_exit(), b.wait_exit()] == [0, 0]
            c.store_pid()
    finally:
        hosts.write_text(before)


@pytest.mark.parametrize(
    ("conf", "args", "policy", "words"),
    [
        ({"store_typ": "tcp"}, {}, None, ["store_typ", "store_type"]),
        ({"store_type": "redis"}, {}, None, ["store_type", "redis", "tcp"]),
        ({"join_timeout": "soon"}, {}, None, ["join_timeout", "soon"]),
        ({}, {}, "recovery: {node_strike: 3}\n", ["node_strike", "node_strikes", "line 2"]),
        ({}, {}, "mode: quorum\n", ["quorum", "not available"]),
        ({"lm_resiliency_worker_config": "/nowhere/policy.yaml"}, {}, None, ["/nowhere/policy.yaml"]),
        ({}, {"--rdzv-endpoint": "127.0.0.1:notaport"}, None, ["notaport"]),
    ],
)
def test_bad_configuration_ends_with_64_and_one_message(
    tmp_path: Path, conf: dict[str, str], args: dict[str, str], policy: str | None, words: list[str]
) -> None:
    with cluster(tmp_path) as c:
        node = c.start("a", conf=conf, args=args, policy=policy)
        assert node.wait_exit(60) == 64
        message = [line for line in node.log.splitlines() if "Warning" not in line]
        assert all(word in "\n".join(message) for word in words), node.log
        assert "Traceback" not in node.log


def test_environment_variables_work_as_the_flags_do(tmp_path: Path) -> None:
    with cluster(tmp_path, nnodes="1:1") as c:
        conf = f"node_id=x,state_dir={tmp_path}/x,nonsense=1"
        command = [
            *TORCHRUN, "--nnodes=1:1", "--rdzv-backend=lm_resiliency", f"--rdzv-endpoint={c.endpoint}", str(PROGRAM),
        ]  # fmt: skip
        done = subprocess.run(
            command, env={**os.environ, "PET_RDZV_CONF": conf}, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 64
        assert "nonsense" in done.stderr


def test_a_foreign_service_at_the_endpoint(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with cluster(tmp_path, endpoint=f"127.0.0.1:{port}") as c:
            node = c.start("a", conf={"timeout": "20"})
            listener.settimeout(40)
            conn, _ = listener.accept()
            with conn:
                conn.recv(100)
                conn.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                assert node.wait_exit(60) == 64
            assert str(port) in node.log


def test_the_file_store(tmp_path: Path) -> None:
    with cluster(tmp_path, store_type="file", env={"STEPS": "30", "PLANT_EXIT": "1:5"}) as c:
        a, b, s = c.form("a", "b", "c")
        assert [n.wait_exit() for n in (a, b, s)] == [0, 0, 0]
        assert len(a.events("plan_committed")) == 2
        wait_until("the store's files are gone", lambda: not list(c.folder.glob("store*")), 5)
