from __future__ import annotations

import pytest

from lmres.errors import ConfigError, ExitCode
from lmres.rendezvous.options import Options, encode_run_id, is_node_id, parse_endpoint, parse_options


def options(config: dict[str, object] | None = None, **changes: object) -> Options:
    arguments: dict[str, object] = {
        "endpoint": "host-a:29500",
        "run_id": "run",
        "min_nodes": 2,
        "max_nodes": 3,
        "local_addr": None,
        "config": config or {},
    }
    return parse_options(**{**arguments, **changes})  # type: ignore[arg-type]


def refusal(config: dict[str, object] | None = None, **changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        options(config, **changes)
    assert caught.value.exit_code == ExitCode.BAD_CONFIGURATION
    return str(caught.value)


def test_defaults() -> None:
    found = options({"timeout": 900})
    assert (found.store_type, found.host, found.port, found.path) == ("tcp", "host-a", 29500, None)
    assert (found.timeout_s, found.read_timeout_s, found.join_timeout_s) == (900.0, 60.0, 600.0)
    assert options().timeout_s == 600.0
    assert found.node_id is found.state_dir is found.policy_path is found.is_host is found.failure_domain is None
    assert (found.run_id, found.run_key, found.endpoint) == ("run", "run", "host-a:29500")


def test_every_key() -> None:
    found = options(
        {
            "store_type": "file",
            "policy": "p.yaml",
            "lm_resiliency_restart_context_path": "/c.json",
            "state_dir": "/s",
            "node_id": "n.1_a-B",
            "failure_domain": "rack 1",
            "is_host": "True",
            "timeout": "3",
            "read_timeout": "1.5",
            "join_timeout": 1e2,
        },
        endpoint="/tmp/store",
        local_addr="10.0.0.1",
    )
    assert (found.store_type, found.path, found.host, found.port) == ("file", "/tmp/store", None, None)
    assert (found.policy_path, found.restart_context_path, found.state_dir) == ("p.yaml", "/c.json", "/s")
    assert (found.node_id, found.failure_domain, found.is_host) == ("n.1_a-B", "rack 1", True)
    assert (found.timeout_s, found.read_timeout_s, found.join_timeout_s) == (3.0, 1.5, 100.0)
    assert found.local_addr == "10.0.0.1"


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"stor_type": "tcp"}, ["stor_type: unknown key with value 'tcp'", "did you mean 'store_type'?"]),
        ({"zzz": "1"}, ["zzz: unknown key", "valid here: ", "state_dir"]),
        ({"a\nb": "1"}, ["'a\\nb': unknown key"]),
        ({"store_type": "tpc"}, ["store_type: found 'tpc'", "did you mean 'tcp'?"]),
        ({"store_type": "etcd"}, ["store_type: found 'etcd', not available in this version; use tcp or file"]),
        ({"secret_file": "/s"}, ["secret_file: found '/s'", "authentication is not available in this version"]),
        ({"etcd_prefix": "/x"}, ["etcd_prefix", "not available in this version"]),
        ({"timeout": "soon"}, ["timeout: found 'soon'; allowed: seconds"]),
        ({"timeout": True}, ["timeout: found true"]),
        ({"timeout": None}, ["timeout: found null"]),
        ({"timeout": "nan"}, ["timeout: found 'nan'"]),
        ({"timeout": "1_0"}, ["timeout: found '1_0'"]),
        ({"read_timeout": float("inf")}, ["read_timeout: found inf"]),
        ({"read_timeout": "1e999"}, ["read_timeout: found '1e999'"]),
        ({"join_timeout": 0}, ["join_timeout: found 0"]),
        ({"join_timeout": "-1"}, ["join_timeout: found '-1'"]),
        ({"join_timeout": 10**400}, ["join_timeout: found a whole number of more than"]),
        ({"is_host": "maybe"}, ["is_host: found 'maybe'; allowed: true or false"]),
        ({"is_host": 2}, ["is_host: found 2"]),
        ({"node_id": "a/b"}, ["node_id: found 'a/b'", "1 to 128 characters"]),
        ({"node_id": ".."}, ["node_id: found '..'"]),
        ({"node_id": "n" * 129}, ["node_id: found 'nnn"]),
        ({"state_dir": ""}, ["state_dir: found ''"]),
        ({"state_dir": "a\0b"}, ["state_dir: found 'a\\x00b'"]),
        (
            {"lm_resiliency_worker_config": "a", "policy": "b"},
            ["lm_resiliency_worker_config: found 'a'", "policy has 'b'", "one of the two"],
        ),
    ],
)
def test_a_bad_key_is_named_with_value_and_remedy(config: dict[str, object], parts: list[str]) -> None:
    message = refusal(config)
    for part in parts:
        assert part in message, message


def test_all_problems_are_in_one_message() -> None:
    message = refusal({"a": 1, "is_host": "x"}, endpoint="h:0", run_id="", min_nodes=3, max_nodes=2, local_addr="a b")
    for part in ("a: unknown", "is_host", "--rdzv-endpoint", "--rdzv-id", "--nnodes: found '3:2'", "--local-addr"):
        assert part in message


def test_the_alias_of_the_policy() -> None:
    assert options({"lm_resiliency_worker_config": "a", "policy": "a"}).policy_path == "a"
    assert options({"lm_resiliency_worker_config": "a"}).policy_path == "a"


@pytest.mark.parametrize(("value", "want"), [("1", True), ("no", False), (0, False), (True, True), ("F", False)])
def test_is_host_reads_what_torch_reads(value: object, want: bool) -> None:
    assert options({"is_host": value}).is_host is want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("host:1", ("host", 1)),
        ("host", ("host", 29400)),
        (" host.example.org:29400 ", ("host.example.org", 29400)),
        ("host_1.ns.svc.:80", ("host_1.ns.svc.", 80)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("10.0.0.1", ("10.0.0.1", 29400)),
        ("[::1]:5", ("::1", 5)),
        ("[::1]", ("::1", 29400)),
        ("[fe80::1%eth0]:5", ("fe80::1%eth0", 5)),
        ("", ("localhost", 29400)),
    ],
)
def test_endpoints(text: str, want: tuple[str, int]) -> None:
    assert parse_endpoint(text) == want


@pytest.mark.parametrize(
    "text",
    [
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:1a",
        "host:+1",
        "host:\u0661",
        ":29400",
        "::1",
        "::1:29400",
        "a:b:c",
        "[::1",
        "[::1]x",
        "[::1]5",
        "[host]:5",
        "[10.0.0.1]:5",
        "10.0.0.300:5",
        "10.1:5",
        "tcp://host:5",
        "a b:5",
        "-a:5",
        "0.0.0.0:5",
        "[::]:5",
        "1.0.0.127.in-addr.arpa:5",
        f"1.{'0.' * 31}ip6.arpa:5",
        f"{'a' * 254}:5",
    ],
)
def test_bad_endpoints(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--rdzv-endpoint: found .*(allowed|give)"):
        parse_endpoint(text)


def test_several_nodes_need_an_endpoint() -> None:
    assert "--rdzv-endpoint: missing" in refusal(endpoint="")
    assert options(endpoint="", min_nodes=1, max_nodes=1).host == "localhost"
    assert "the path of a file" in refusal({"store_type": "file"}, endpoint="")


def test_run_keys_are_safe_bounded_and_different() -> None:
    ids = ["a", "a/b", "a b", "a%2Fb", ".", "..", ".a", "~", "é" * 256, "é" * 255 + "e", "x" * 256, "x" * 255, "none"]
    keys = [encode_run_id(each) for each in ids]
    assert len(set(keys)) == len(ids)
    for key in keys:
        assert 0 < len(key) <= 128
        assert key.isascii() and "/" not in key and " " not in key and not key.startswith(".")
    for bad in ("", "a\nb", "x" * 257, "\ud800"):
        with pytest.raises(ConfigError, match="--rdzv-id"):
            encode_run_id(bad)


def test_node_ids() -> None:
    assert is_node_id("host-1.a_b") and is_node_id("n" * 128)
    assert not any(map(is_node_id, ["", ".", "..", "a\n", "a/b", "é", "n" * 129]))
