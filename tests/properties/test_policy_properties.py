"""Whatever is in the file: a policy or a ConfigError that names the file, nothing else, and never slowly."""

from __future__ import annotations

import contextlib
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from lmres.errors import ConfigError
from lmres.fields import Choice, Choices, Constant, FieldError, Flag, Number, Section, Text, specs
from lmres.policy import (
    Policy,
    diff_policies,
    parse_policy,
    policy_digest,
    policy_to_dict,
    policy_to_yaml,
)
from lmres.rendezvous.options import KEYS, encode_run_id, parse_endpoint, parse_options

NAMES = [*specs(Policy), "interval_s", "timeout_s", "durable", "<<", "=", "~"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates()
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8) | st.integers(), inner, max_size=5)
    ),
    max_leaves=20,
)
MARKS = [
    ": ",
    "\n",
    "  ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    "&a ",
    "*a",
    "!!",
    "!x ",
    "'",
    '"',
    ">",
    "---",
    "...",
    "?",
    "#",
    "\t",
    ",",
    "%YAML 9.9\n",
    "\\UFFFFFFFF",
    "1e999",
    "0o7",
]
ODD = ["|", "\x00", "\ufeff", "\u2028", "\ud800"]
YAML_BITS = st.sampled_from([*NAMES, "schema_version: 1", *MARKS, *ODD])


def only_a_config_error(text: str) -> Policy | None:
    try:
        return parse_policy(text, source="file")
    except ConfigError as error:
        assert str(error).startswith("policy file: ")
        assert "  line " in str(error)
        return None


@given(TREES)
def test_any_tree_is_a_policy_or_a_config_error(tree: object) -> None:
    only_a_config_error(yaml.safe_dump(tree))


@given(st.dictionaries(st.sampled_from(list(specs(Policy))), TREES))
def test_any_content_of_the_known_fields(tree: dict[str, object]) -> None:
    only_a_config_error(yaml.safe_dump({**tree, "schema_version": 1}))


@given(st.text() | st.lists(YAML_BITS, max_size=30).map("".join))
def test_any_text(text: str) -> None:
    only_a_config_error(text)
    only_a_config_error(f"schema_version: 1\n{text}")


def values(kind: object) -> st.SearchStrategy[Any]:
    match kind:
        case Constant():
            return st.just(kind.value)
        case Flag():
            return st.booleans()
        case Choice():
            return st.sampled_from(kind.words)
        case Choices():
            return st.lists(st.sampled_from(kind.words), unique=True).map(tuple)
        case Text():
            printable = st.text(min_size=1, max_size=30).filter(str.isprintable)
            return st.none() | printable
        case Number():
            words = st.sampled_from(kind.words) if kind.words else st.nothing()
            if kind.whole:
                return words | st.integers(int(kind.minimum), int(kind.maximum))
            low, high = float(kind.minimum), float(kind.maximum)
            return words | st.floats(low, high, exclude_min=kind.above, exclude_max=kind.below)
        case _:
            raise AssertionError(kind)


def sections(section: type[Section]) -> st.SearchStrategy[Section | None]:
    """Sections built by the declarations; None where a rule between fields does not hold."""
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for name, spec in specs(section).items():
        if isinstance(spec.holds, type):
            fields[name] = sections(spec.holds).filter(lambda built: built is not None)
        else:
            fields[name] = values(spec.holds)

    def build(arguments: dict[str, Any]) -> Section | None:
        with contextlib.suppress(FieldError):
            return section(**arguments)
        return None

    return st.fixed_dictionaries({}, optional=fields).map(build)


POLICIES = sections(Policy).filter(lambda built: built is not None)


@given(POLICIES)
def test_the_effective_policy_reads_back_as_itself(policy: Policy) -> None:
    text = policy_to_yaml(policy)
    again = parse_policy(text, source="again")
    assert again == policy
    assert policy_digest(again) == policy_digest(policy)
    assert policy_to_yaml(again) == text
    assert yaml.safe_load(text) == policy_to_dict(policy)


@given(POLICIES, POLICIES)
def test_policies_differ_exactly_when_their_digests_do(one: Policy, two: Policy) -> None:
    differences = diff_policies(policy_to_dict(one), policy_to_dict(two))
    assert (policy_digest(one) == policy_digest(two)) == (not differences) == (one == two)


@given(
    endpoint=st.text() | st.from_regex(r"\A\[?[a-z0-9:.]{0,12}\]?:?[0-9]{0,6}\Z"),
    run_id=st.text(max_size=300),
    nodes=st.tuples(st.integers(-2, 5), st.integers(-2, 5)),
    local_addr=st.none() | st.text(),
    config=st.dictionaries(st.sampled_from(sorted(KEYS)) | st.text(), SCALARS | st.sampled_from(["tcp", "file", "3"])),
)
def test_any_launch_options(
    endpoint: str, run_id: str, nodes: tuple[int, int], local_addr: str | None, config: dict[str, object]
) -> None:
    with contextlib.suppress(ConfigError):
        options = parse_options(
            endpoint=endpoint,
            run_id=run_id,
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            local_addr=local_addr,
            config=config,
        )
        assert options.run_key
        assert (options.store_type == "tcp") == (options.host is not None) == (options.path is None)


@given(st.text())
def test_any_endpoint(text: str) -> None:
    with contextlib.suppress(ConfigError):
        host, port = parse_endpoint(text)
        assert host and 0 < port < 1 << 16


@given(st.text(min_size=1, max_size=256), st.text(min_size=1, max_size=256))
def test_different_runs_never_share_a_key(one: str, two: str) -> None:
    with contextlib.suppress(ConfigError):
        assert (encode_run_id(one) == encode_run_id(two)) == (one == two)
