from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmres.cli import checks_host, checks_launch
from lmres.cli.doctor import render, run_checks
from lmres.cli.finding import Finding
from lmres.cli.main import main
from lmres.policy import Policy, parse_policy, policy_schema, policy_to_dict

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "good.yaml"
    path.write_text("\ufeffschema_version: 1\nmode: quorum\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def bad(tmp_path: Path) -> str:
    path = tmp_path / "bad.yaml"
    path.write_text("schema_version: 1\nmoed: quorum\n")
    return str(path)


def test_show_prints_the_effective_policy(good: str, capsys: Captured) -> None:
    assert main(["policy", "show", good]) == 0
    assert parse_policy(capsys.readouterr().out, source="out") == Policy(mode="quorum")
    assert main(["policy", "show"]) == 0
    assert parse_policy(capsys.readouterr().out, source="out") == Policy()


@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_json_is_valid_at_every_level(where: int, good: str, capsys: Captured) -> None:
    argv = ["policy", "show", good]
    argv.insert(where, "--json")
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out) == policy_to_dict(Policy(mode="quorum"))


def test_check_gives_the_verdict(good: str, bad: str, capsys: Captured) -> None:
    assert main(["policy", "check", good]) == 0
    assert "valid" in capsys.readouterr().out
    assert main(["policy", "check", bad]) == 64
    captured = capsys.readouterr()
    assert captured.out == "" and "line 2: moed: unknown field" in captured.err
    assert main(["policy", "check", bad, "--json"]) == 64
    captured = capsys.readouterr()
    assert json.loads(captured.out)["valid"] is False and captured.err == ""


def test_other_errors_are_one_json_value_too(bad: str, capsys: Captured) -> None:
    assert main(["--json", "policy", "show", bad]) == 64
    captured = capsys.readouterr()
    assert json.loads(captured.out)["exit_code"] == 64 and captured.err == ""


def test_schema(capsys: Captured) -> None:
    assert main(["policy", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == policy_schema()


def test_files_that_can_not_be_read(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "latin").write_bytes(b"schema_version: 1\n# \xe9\n")
    (tmp_path / "big").write_bytes(b"#" * (2 << 20))
    for name, part in (
        ("latin", "line 2 is not UTF-8"),
        ("big", "bytes"),
        ("none", "can not be read"),
        ("", "can not"),
    ):
        assert main(["policy", "check", str(tmp_path / name)]) == 64
        assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [[], ["nothing"], ["policy"], ["policy", "check"], ["policy", "show", "--jso"], ["doctor", "--max-restarts=x"]],
)
def test_usage_errors_exit_with_64(argv: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 64
    assert "usage: lmres" in capsys.readouterr().err


def test_version(capsys: Captured) -> None:
    assert main(["version", "--json"]) == 0
    assert {"lmres", "torch", "python"} <= json.loads(capsys.readouterr().out).keys()
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("lmres ")


def test_a_check_that_breaks_does_not_end_the_others() -> None:
    def broken() -> Finding:
        raise RuntimeError("boom")

    fine = Finding(check="fine", status="ok", found="all well")
    findings = run_checks([("broken", broken), ("fine", lambda: fine)])
    assert [finding.status for finding in findings] == ["fail", "ok"]
    assert "boom" in findings[0].found
    assert render(findings).endswith("2 checks, 1 failed, 0 with a warning")


@pytest.mark.parametrize(("value", "status"), [(None, "skip"), (0, "warn"), (3, "ok")])
def test_advice_on_restarts(value: int | None, status: str) -> None:
    assert checks_launch.check_max_restarts(value).status == status


@pytest.mark.parametrize(
    ("head", "want"),
    [
        ("#!/opt/env/bin/python3.11\nimport sys\n", "/opt/env/bin/python3.11"),
        ("#! /opt/env/bin/python -s\n", "/opt/env/bin/python"),
        ("#!/bin/sh\n'''exec' \"/a b/bin/python\" \"$0\" \"$@\"\n' '''\n", "/a b/bin/python"),
        ("#!/bin/sh\n'''exec' /a/bin/python \"$0\" \"$@\"\n' '''\n", "/a/bin/python"),
        ("#!/usr/bin/env no-such-python\n", None),
        ("#!/bin/bash\n", None),
        ("\x7fELF", None),
        ("", None),
    ],
)
def test_the_interpreter_of_a_script(head: str, want: str | None, tmp_path: Path) -> None:
    script = tmp_path / "torchrun"
    script.write_text(head)
    assert checks_launch.script_interpreter(script) == (None if want is None else Path(want))


@pytest.mark.parametrize(
    ("addresses", "canonical", "status"),
    [
        (["10.0.0.5"], "host.example.org", "ok"),
        (["127.0.1.1"], "host", "warn"),
        ([], "host", "warn"),
        (["fd00::5"], f"5.{'0.' * 31}ip6.arpa", "warn"),
    ],
)
def test_the_host_name_as_peers_see_it(addresses: list[str], canonical: str, status: str) -> None:
    finding = checks_host.check_host_name(hostname="host", canonical=canonical, lookup=lambda name: addresses)
    assert finding.status == status
    assert (finding.status == "ok") or "--local-addr" in finding.advice


def test_the_checks_of_this_host_find_something() -> None:
    for check in (checks_host.check_memory, checks_host.check_open_files, checks_host.check_process_control):
        assert check().status in {"ok", "warn"}
    assert checks_host.check_endpoint(None).status == "skip"
    assert checks_host.check_endpoint("127.0.0.1:0").status == "fail"
