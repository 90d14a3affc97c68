from __future__ import annotations

import dataclasses
import json

import pytest
import yaml

from lmres.errors import ConfigError, ExitCode
from lmres.fields import FieldError, Section, specs
from lmres.policy import (
    Checkpoint,
    Durable,
    Heartbeat,
    Policy,
    diff_policies,
    parse_policy,
    policy_digest,
    policy_schema,
    policy_to_dict,
    policy_to_yaml,
)

CONTRACT = """
schema_version: 1
mode: restart                 # restart | quorum
heartbeat: {interval_s: 0.5, timeout_s: 5.0}
workers:
  stop_grace_s: 5.0
  warm: true
  resume: auto
checkpoint:
  enabled: true
  interval_steps: 1
  overhead_budget: 0.01
  replicas: 2
  memory_limit_fraction: 0.5
  durable: {directory: null, interval_steps: 100, keep: 2}
detection:
  enabled: true
  hang_timeout_s: auto
  straggler: {slowdown: 1.5, windows: 3, action: report}
  corruption: {interval_steps: 10, replay: true, action: replace}
  health: {interval_s: 5.0, checks: [memory, disk, cpu, gpu, network], command: null}
recovery:
  evidence_window_s: 0.5
  node_strikes: 2
  no_progress_limit: 3
  on_no_standby: wait
  quarantined: park
quorum:
  min_replicas: 1
  replica_nodes: 1
  world: fixed
  algorithm: ddp
observe: {prometheus_port: 0, log_level: info}
"""


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_policy(text, source="p.yaml")
    assert caught.value.exit_code == ExitCode.BAD_CONFIGURATION
    return str(caught.value)


def body(text: str) -> str:
    """The message for a document whose fields start in line 2."""
    return refusal(f"schema_version: 1\n{text}")


def test_the_documented_file_is_the_default_policy() -> None:
    assert parse_policy(CONTRACT, source="c") == Policy() == parse_policy("schema_version: 1", source="c")
    assert Policy().recovery.strikes_window_s == 3600.0


def test_fields_are_read() -> None:
    policy = parse_policy(
        "schema_version: 1\n"
        "heartbeat: {interval_s: 1e-1, timeout_s: 1}\n"
        "checkpoint: {interval_steps: auto, durable: {directory: '/d'}}\n"
        "detection: {hang_timeout_s: 30, health: {checks: []}}\n",
        source="p",
    )
    assert policy.heartbeat == Heartbeat(interval_s=0.1, timeout_s=1.0)
    assert isinstance(policy.heartbeat.timeout_s, float)
    assert policy.checkpoint == Checkpoint(interval_steps="auto", durable=Durable(directory="/d"))
    assert policy.detection.hang_timeout_s == 30.0
    assert policy.detection.health.checks == ()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hartbeat: 1", ["line 2: hartbeat: unknown field", "did you mean 'heartbeat'?"]),
        ("recovery:\n  node_strike: 1", ["line 3: recovery.node_strike:", "did you mean 'node_strikes'?"]),
        ("zzz: 1", ["line 2: zzz: unknown field with value 1", "valid here: checkpoint, detection"]),
        ("mode: restrat", ["line 2: mode: found 'restrat'; allowed: restart, quorum"]),
        ("mode:", ["line 2: mode: found null"]),
        ("heartbeat: 1", ["line 2: heartbeat: found 1; allowed: a mapping of interval_s, timeout_s"]),
        ("heartbeat:", ["line 2: heartbeat: found ''", "remove the line for the defaults"]),
        ("heartbeat: [1]", ["line 2: heartbeat: found a list"]),
        ("mode: {a: b}", ["line 2: mode: found a mapping"]),
        ("recovery: {node_strikes: true}", ["recovery.node_strikes: found true", "a whole number from 1"]),
        ("recovery: {node_strikes: 1.0}", ["found 1.0"]),
        ("recovery: {node_strikes: '1'}", ["found '1'"]),
        ("recovery: {node_strikes: 0}", ["found 0"]),
        ("recovery: {node_strikes: 010}", ["found '010'"]),
        ("recovery: {node_strikes: 1:30}", ["found '1:30'"]),
        ("recovery: {node_strikes: 1_0}", ["found '1_0'"]),
        ("recovery: {evidence_window_s: -1}", ["found -1"]),
        ("recovery: {evidence_window_s: .nan}", ["found nan"]),
        ("recovery: {evidence_window_s: .inf}", ["found inf"]),
        ("recovery: {evidence_window_s: 1e999}", ["found inf"]),
        ("recovery: {evidence_window_s: auto}", ["found 'auto'"]),
        (f"recovery: {{node_strikes: {'9' * 6000}}}", ["a number of at most"]),
        (f"recovery: {{node_strikes: {'9' * 30}}}", ["found 9999"]),
        ("workers: {warm: yes}", ["workers.warm: found 'yes'; allowed: true or false"]),
        ("workers: {warm: 1}", ["workers.warm: found 1; allowed: true or false"]),
        ("checkpoint: {overhead_budget: 1}", ["number more than 0, less than 1"]),
        ("checkpoint: {durable: {directory: 5}}", ["checkpoint.durable.directory: found 5"]),
        ("checkpoint: {durable: {directory: ''}}", ["checkpoint.durable.directory: found ''"]),
        ('detection: {health: {command: "a\\0"}}', ["detection.health.command: found 'a\\x00'"]),
        ("detection: {health: {checks: [gpu, gup]}}", ["detection.health.checks: found 'gup'"]),
        ("detection: {health: {checks: [gpu, gpu]}}", ["each at most once"]),
        ("detection: {health: {checks: [[gpu]]}}", ["found a list"]),
        ("detection: {health: {checks: gpu}}", ["found 'gpu'"]),
        ("heartbeat: {timeout_s: 1}", ["line 2: heartbeat.timeout_s", "3 * interval_s = 1.5"]),
        ("heartbeat:\n  interval_s: 2", ["line 3: heartbeat.timeout_s", "at least 3 * interval_s = 6"]),
        (
            "checkpoint: {interval_steps: 200, durable: {directory: /d}}",
            ["checkpoint.durable.interval_steps: found 100; allowed: at least"],
        ),
        ("mode: restart\nmode: quorum", ["line 3: mode: given twice, first in line 2"]),
        ("a: &x 1", ["line 2: found the anchor &x"]),
        ("a: 1\nb: *x", ["line 3: found the alias *x"]),
        ("mode: !!str restart", ["line 2: found the tag"]),
        ("<<: {mode: quorum}", ["line 2: <<: found a merge key"]),
        ("? [a]\n: 1", ["line 2: the document: found a list as a field name"]),
        ("mode: [", ["not YAML"]),
        ("\tmode: restart", ["line 2: not YAML"]),
        ("mode: \x07", ["line 2: not YAML", "U+0007"]),
        ('mode: "\\UFFFFFFFF"', ["not YAML"]),
        ("---\nmode: restart", ["not YAML"]),
    ],
)
def test_a_mistake_is_named_with_line_field_value_and_remedy(text: str, parts: list[str]) -> None:
    message = body(text)
    assert message.startswith("policy p.yaml: ")
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "the document is empty"),
        ("# only a comment\n", "the document is empty"),
        ("---\n", "the document is empty"),
        ("[1]", "found a list; allowed: a mapping"),
        ("restart", "found restart; allowed: a mapping"),
        ("mode: restart", "schema_version: missing; add 'schema_version: 1'"),
        ("schema_version: '1'", "schema_version: found '1'"),
        ("schema_version: true", "schema_version: found true"),
        ("schema_version: 1.0", "schema_version: found 1.0"),
        ("[" * 100_000, "deeper than 16 levels"),
        ("a: " + "{b: " * 40, "deeper than 16 levels"),
        ("schema_version: 1\na: [" + "1," * 30_000 + "]", "more than 20000 items"),
        (" " * 300_000, "found 300000 characters"),
    ],
)
def test_a_document_that_is_no_policy(text: str, part: str) -> None:
    assert part in refusal(text)


def test_another_version_is_the_only_problem_reported() -> None:
    message = refusal("shiny: 1\nschema_version: 2\nmode: 5\n")
    assert message == "policy p.yaml: 1 problem\n  line 2: schema_version: found 2; allowed: 1"


def test_all_problems_are_in_one_message_in_line_order_and_bounded() -> None:
    message = body("mode: x\nheartbeat: {interval_s: -1}\nworkers: {warm: 3, cold: 1}\n")
    assert message.splitlines()[0] == "policy p.yaml: 4 problems"
    assert [line.split(":")[0] for line in message.splitlines()[1:]] == [
        "  line 2",
        "  line 3",
        "  line 4",
        "  line 4",
    ]
    many = body("\n".join(f"field_{n}: 1" for n in range(30)))
    assert many.endswith("and 10 more; correct these first")
    assert len(many.splitlines()) == 22


def test_long_values_and_names_are_cut() -> None:
    message = body(f"mode: {'m' * 5000}\n{'n' * 900}: {'v' * 5000}\n")
    assert all(len(line) < 500 for line in message.splitlines())


def test_the_order_of_fields_does_not_matter_to_the_digest() -> None:
    one = parse_policy("schema_version: 1\nmode: quorum\nobserve: {log_level: debug}", source="1")
    two = parse_policy("observe: {log_level: debug}\nmode: quorum\nschema_version: 1", source="2")
    assert policy_digest(one) == policy_digest(two) != policy_digest(Policy())
    assert policy_digest(Policy(heartbeat=Heartbeat(timeout_s=5))) == policy_digest(Policy())


def test_the_default_digest_is_stable_between_processes() -> None:
    canonical = json.dumps(policy_to_dict(Policy()), sort_keys=True)
    assert policy_digest(Policy()) == policy_digest(parse_policy(canonical, source="json"))


@pytest.mark.parametrize(
    "text", ["/d", "1e3", "010", "yes", "~", "a: b", "# x", "'", "<<", "é\U0001f600", "1:30", "null"]
)
def test_text_survives_the_round_trip(text: str) -> None:
    policy = Policy(checkpoint=Checkpoint(durable=Durable(directory=text)))
    assert parse_policy(policy_to_yaml(policy), source="y") == policy
    # Another program's YAML reader must not see another value either.
    assert yaml.safe_load(policy_to_yaml(policy))["checkpoint"]["durable"]["directory"] == text


def test_records_check_themselves() -> None:
    with pytest.raises(FieldError) as caught:
        Heartbeat(interval_s=0, timeout_s=float("nan"))
    assert [name for name, _ in caught.value.problems] == ["interval_s", "timeout_s"]
    with pytest.raises(FieldError, match="heartbeat: found"):
        Policy(heartbeat=Durable())  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().mode = "quorum"  # type: ignore[misc]


def test_three_tenths_is_three_times_a_tenth() -> None:
    assert Heartbeat(interval_s=0.1, timeout_s=0.3).timeout_s == 0.3


def test_differences_name_both_sides() -> None:
    mine = policy_to_dict(Policy(mode="quorum"))
    theirs = policy_to_dict(Policy(heartbeat=Heartbeat(timeout_s=9)))
    theirs["later"] = {"field": 1}
    assert diff_policies(mine, theirs) == [
        "heartbeat.timeout_s: mine 5.0, theirs 9.0",
        "later.field: mine absent, theirs 1",
        "mode: mine 'quorum', theirs 'restart'",
    ]
    assert diff_policies(mine, mine) == []
    assert diff_policies({"a": 1}, {"a": True}) == ["a: mine 1, theirs true"]


def test_the_schema_describes_every_field_with_its_default() -> None:
    schema = policy_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["schema_version"]

    def compare(section: type[Section], node: dict[str, object], defaults: dict[str, object]) -> None:
        assert node["additionalProperties"] is False
        properties = node["properties"]
        assert isinstance(properties, dict)
        assert list(properties) == list(specs(section)) == list(defaults)
        for name, spec in specs(section).items():
            assert properties[name]["description"]
            default = defaults[name]
            if isinstance(spec.holds, type):
                assert isinstance(default, dict)
                compare(spec.holds, properties[name], default)
            else:
                assert properties[name]["default"] == default

    compare(Policy, schema, policy_to_dict(Policy()))
    json.dumps(schema, allow_nan=False)
