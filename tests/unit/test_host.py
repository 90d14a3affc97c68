from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lmres.errors import ConfigError, StoreUnavailable
from lmres.rendezvous.edge import host
from lmres.rendezvous.edge.host import HostIdentity, advertised_address, default_node_id, is_local_endpoint, resolve
from lmres.rendezvous.options import is_node_id

LOCAL = frozenset({"127.0.0.1", "::1", "10.0.0.5", "192.168.1.5", "169.254.1.1", "fe80::1", "fd00::5"})


def never(name: str) -> list[str]:
    raise AssertionError(f"{name} was looked up")


def no_route(family: socket.AddressFamily) -> None:
    return None


def unknown(name: str) -> list[str]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class LateName:
    """A name that starts to resolve at its third lookup."""

    def __init__(self) -> None:
        self.lookups = 0

    def __call__(self, name: str) -> list[str]:
        self.lookups += 1
        if self.lookups == 1:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [] if self.lookups == 2 else ["10.0.0.9", "10.0.0.8"]


def test_a_name_that_resolves_late_is_looked_up_anew() -> None:
    late, slept = LateName(), list[float]()
    assert resolve("pod-0.svc", timeout_s=60, lookup=late, sleep=slept.append) == ("10.0.0.9", "10.0.0.8")
    assert late.lookups == 3
    assert len(slept) == 2 and all(0 <= each <= host.RETRY_MAX_S for each in slept)


def test_a_name_that_never_resolves_ends_in_time_with_the_reason() -> None:
    with pytest.raises(StoreUnavailable, match=r"'nowhere' did not resolve within 0 s \(.*not known.*numeric"):
        resolve("nowhere", timeout_s=0, lookup=unknown)


@pytest.mark.parametrize("text", ["10.0.0.1", "::1", "fe80::1%eth0"])
def test_a_numeric_address_is_never_looked_up(text: str) -> None:
    assert resolve(text, timeout_s=0, lookup=never) == (text,)
    assert resolve("[::1]", timeout_s=0, lookup=never) == ("::1",)


def test_a_name_that_can_not_be_one_is_not_tried_again() -> None:
    with pytest.raises(ConfigError, match="is no host name"):
        resolve("a" * 80 + ".x", timeout_s=60, lookup=lambda name: [name.encode("idna").decode()])


@pytest.mark.parametrize(
    ("addresses", "want"),
    [
        (["10.0.0.5"], True),
        (["10.0.0.6"], False),
        (["10.0.0.6", "10.0.0.5"], True),
        (["127.0.1.1"], True),
        (["::1"], True),
        (["fe80::1%eth3"], True),
        (["::ffff:10.0.0.5"], True),
        (["fd00:0:0::5"], True),
        ([], False),
    ],
)
def test_an_endpoint_is_local_by_address(addresses: list[str], want: bool) -> None:
    assert is_local_endpoint(addresses, override=None, local=LOCAL) is want
    assert is_local_endpoint(addresses, override=True, local=LOCAL) is True
    assert is_local_endpoint(addresses, override=False, local=LOCAL) is False


@pytest.mark.parametrize(
    ("endpoint", "connected", "want"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("::1", "::1", "::1"),
        ("localhost", "::1", "::1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("host-a", "10.0.0.5", "10.0.0.5"),
        ("10.0.0.9", "192.168.1.5", "192.168.1.5"),
        ("host-a", "::ffff:10.0.0.5", "10.0.0.5"),
        ("host-a", "127.0.0.1", "10.0.0.5"),
        ("host-a", "127.0.1.1", "10.0.0.5"),
        ("host-a", "::1", "fd00::5"),
        ("10.0.0.5", "127.0.0.1", "10.0.0.5"),
    ],
)
def test_the_advertised_address(endpoint: str, connected: str, want: str) -> None:
    assert (
        advertised_address(
            local_addr=None,
            endpoint_host=endpoint,
            connected_address=connected,
            local=LOCAL,
            lookup=never,
            route=no_route,
        )
        == want
    )


def test_the_default_route_chooses_among_several_interfaces() -> None:
    def advertised(route: str | None, local: frozenset[str] = LOCAL) -> str:
        return advertised_address(
            local_addr=None,
            endpoint_host="host-a",
            connected_address="127.0.1.1",
            local=local,
            lookup=never,
            route=lambda family: route,
        )

    assert advertised("192.168.1.5") == "192.168.1.5"
    assert advertised("127.0.0.1") == "10.0.0.5"
    assert advertised("8.8.8.8") == "10.0.0.5"
    assert advertised(None, frozenset({"127.0.0.1", "169.254.1.1"})) == "169.254.1.1"
    assert advertised(None, frozenset({"127.0.0.1", "fd00::5"})) == "127.0.1.1"


def chosen(local_addr: str, lookup: host.Lookup) -> str:
    return advertised_address(
        local_addr=local_addr,
        endpoint_host="host-a",
        connected_address="10.0.0.5",
        local=LOCAL,
        lookup=lookup,
        route=no_route,
    )


def test_local_addr_wins() -> None:
    assert chosen("192.168.1.5", never) == "192.168.1.5"
    assert chosen("host-a-fast", lambda name: ["192.168.1.5"]) == "host-a-fast"


@pytest.mark.parametrize("bad", ["nowhere", "0.0.0.0", "::", f"1.{'0.' * 31}ip6.arpa"])
def test_a_local_addr_that_can_not_be_used(bad: str) -> None:
    with pytest.raises(ConfigError, match="--local-addr: found"):
        chosen(bad, unknown)
    with pytest.raises(ConfigError, match="no address"):
        chosen("empty", lambda name: [])


def test_the_identity_survives_a_host_that_tells_little(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("abc\n")
    full = host.read_host_identity(
        hostname="h", boot_id_path=tmp_path / "id", machine_id_paths=(tmp_path / "no", tmp_path / "id")
    )
    assert full == HostIdentity(hostname="h", boot_id="abc", machine_id="abc")
    bare = host.read_host_identity(hostname="h", boot_id_path=tmp_path / "no", machine_id_paths=())
    assert bare.machine_id == "" and bare.boot_id.startswith("boot-")


@pytest.mark.parametrize("name", ["host", "host.example.org", "", "é ü", "x" * 300, "...", "a\ud800"])
def test_default_node_ids_are_valid_and_stable(name: str) -> None:
    one, two = (HostIdentity(hostname=name, boot_id=boot, machine_id="m") for boot in ("1", "2"))
    assert is_node_id(default_node_id(one))
    assert default_node_id(one) == default_node_id(two)
    other = HostIdentity(hostname=name, boot_id="1", machine_id="n")
    assert default_node_id(one) != default_node_id(other)


def test_this_host() -> None:
    addresses = host.local_addresses()
    assert addresses and all(host.parse_address(each) is not None and "%" not in each for each in addresses)
    assert is_node_id(default_node_id())
