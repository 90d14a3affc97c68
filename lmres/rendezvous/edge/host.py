"""This host: what it is called, which addresses it has, and by which address peers can reach it.

Names are the weakest part of a cluster's start. A pod's name resolves seconds after the pod runs; a host's
own name resolves to ``127.0.1.1`` on one distribution and to an ``ip6.arpa`` name on another. The rules:

* A numeric address stays numeric: it is never looked up and never turned into a name.
* A name is looked up anew on each attempt, until it resolves or the time is over.
* An endpoint is local when one of its addresses is one of ours; the user's word (``is_host``) wins over that.
* What is advertised to peers is ``--local-addr``, else the address from which the store was reached: the one
  address of this host of which it is known that it has a route to the others.

Everything that asks the world (resolver, interfaces, routes, files) is an argument with the real thing as
default.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import psutil
import tenacity

from lmres.errors import ConfigError, StoreUnavailable

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Lookup: TypeAlias = Callable[[str], Iterable[str]]
"""Resolves a name to numeric addresses; raises OSError (``socket.gaierror``) when it can not."""

RETRY_FIRST_S: Final = 0.1
RETRY_MAX_S: Final = 2.0
MAX_NODE_ID_CHARS: Final = 128

_REVERSE_SUFFIXES: Final = (".ip6.arpa", ".in-addr.arpa")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MACHINE_IDS: Final = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIdentity:
    """Which host this is. ``boot_id`` changes with each boot; empty where the system does not tell."""

    hostname: str
    boot_id: str
    machine_id: str


def read_host_identity(
    *,
    hostname: str | None = None,
    boot_id_path: Path = _BOOT_ID,
    machine_id_paths: tuple[Path, ...] = _MACHINE_IDS,
) -> HostIdentity:
    """Reads this host's identity; never fails, since containers often lack some of it."""
    boot_id = _first_line(boot_id_path)
    if not boot_id:
        # Without procfs: the time of the boot, in whole seconds, is the same for every process of one boot.
        try:
            boot_id = f"boot-{int(psutil.boot_time())}"
        except (OSError, RuntimeError):
            boot_id = ""
    machine_id = next(filter(None, map(_first_line, machine_id_paths)), "")
    name = socket.gethostname() if hostname is None else hostname
    return HostIdentity(hostname=name, boot_id=boot_id, machine_id=machine_id)


def default_node_id(identity: HostIdentity | None = None) -> str:
    """A node id from host name and machine id: the same after a reboot, so that a node keeps its record.

    Containers of one image may share the machine id, and hosts installed carelessly the name: both go in.
    """
    who = read_host_identity() if identity is None else identity
    digest = hashlib.sha256(f"{who.hostname}\0{who.machine_id}".encode(errors="replace")).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", who.hostname.split(".", 1)[0]).strip("-") or "node"
    return f"{name[: MAX_NODE_ID_CHARS - 9]}-{digest}"


def local_addresses() -> frozenset[str]:
    """The numeric addresses of this host's interfaces, without ``%scope``."""
    families = {socket.AF_INET, socket.AF_INET6}
    return frozenset(
        _plain(entry.address)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in families
    )


def parse_address(text: str) -> IpAddress | None:
    """The numeric address, without scope and with an IPv4-mapped one as IPv4; None for a name."""
    try:
        address = ipaddress.ip_address(text.strip("[]").split("%", 1)[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def system_lookup(name: str) -> tuple[str, ...]:
    """Asks the system's resolver for stream addresses, in its order of preference."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(_plain(str(entry[4][0])) for entry in found))


def resolve(
    host: str,
    *,
    timeout_s: float,
    lookup: Lookup = system_lookup,
    sleep: Callable[[float], None] = tenacity.nap.sleep,
) -> tuple[str, ...]:
    """Numeric addresses of a host, trying again for ``timeout_s`` seconds while its name does not resolve.

    A numeric host is returned as it is. One lookup takes as long as the system's resolver lets it (usually
    5 to 20 s), so the whole can end that much later. Raises StoreUnavailable when the name did not resolve.
    """
    if parse_address(host) is not None:
        return (host.strip("[]"),)

    def attempt() -> tuple[str, ...]:
        try:
            return tuple(lookup(host))
        except UnicodeError as error:
            # The codec of international names refuses empty and over-long labels.
            raise ConfigError(f"{host!r} is no host name: {error}; correct it") from error

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(OSError) | tenacity.retry_if_result(lambda found: not found),
        wait=tenacity.wait_random_exponential(multiplier=RETRY_FIRST_S, max=RETRY_MAX_S),
        stop=tenacity.stop_before_delay(timeout_s),
        sleep=sleep,
    )
    try:
        return retrying(attempt)
    except tenacity.RetryError as error:
        last = error.last_attempt.exception()
        raise StoreUnavailable(
            f"the name {host!r} did not resolve within {timeout_s:g} s ({last or 'no address'}); correct the "
            f"name, wait for the cluster's DNS longer (join_timeout), or give a numeric address"
        ) from last


def is_local_endpoint(addresses: Iterable[str], *, override: bool | None, local: frozenset[str] | None = None) -> bool:
    """Whether this host is where the endpoint's addresses lead; ``override`` (``is_host``) wins both ways."""
    if override is not None:
        return override
    ours = {parse_address(text) for text in (local_addresses() if local is None else local)}
    for text in addresses:
        address = parse_address(text)
        # All of 127.0.0.0/8 leads here, though interfaces list only 127.0.0.1.
        if address is not None and (address.is_loopback or address in ours):
            return True
    return False


def route_address(family: socket.AddressFamily) -> str | None:
    """The source address of the default route, or None. Sends nothing: UDP connect only picks a route."""
    # Addresses reserved for documentation (RFC 5737, RFC 3849): routed like any other, owned by nobody.
    target = "192.0.2.1" if family == socket.AF_INET else "2001:db8::1"
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return _plain(str(probe.getsockname()[0]))
    except OSError:
        return None


def advertised_address(
    *,
    local_addr: str | None,
    endpoint_host: str,
    connected_address: str,
    local: frozenset[str] | None = None,
    lookup: Lookup = system_lookup,
    route: Callable[[socket.AddressFamily], str | None] = route_address,
) -> str:
    """The address by which peers reach this host.

    ``local_addr`` is the user's choice, ``connected_address`` the local address of the socket to the store.
    Raises ConfigError when ``local_addr`` can not be used.
    """
    if local_addr is not None:
        return _chosen(local_addr, lookup)
    connected = parse_address(connected_address)
    endpoint = parse_address(endpoint_host)
    if endpoint is not None and endpoint.is_loopback:
        return str(endpoint)
    if endpoint is None and endpoint_host.lower().rstrip(".") in {"localhost", "ip6-localhost"}:
        return str(connected) if connected is not None and connected.is_loopback else "127.0.0.1"
    if connected is None:
        raise ConfigError(f"found {connected_address!r} as this host's address, not a numeric one; give --local-addr")
    if not connected.is_loopback:
        return str(connected)
    return _routable(connected, local_addresses() if local is None else local, route)


def _chosen(local_addr: str, lookup: Lookup) -> str:
    address = parse_address(local_addr)
    if address is not None:
        if address.is_unspecified:
            raise ConfigError(f"--local-addr: found {local_addr!r}; allowed: an address peers can connect to")
        return local_addr.strip("[]")
    if is_reverse_name(local_addr):
        raise ConfigError(f"--local-addr: found {local_addr!r}, a name for reverse lookups; give the address")
    try:
        found = tuple(lookup(local_addr))
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--local-addr: found {local_addr!r}, which does not resolve ({error}); give a numeric "
            f"address of this host, such as one that 'ip -brief address' shows"
        ) from error
    if not found:
        raise ConfigError(f"--local-addr: found {local_addr!r}, which has no address; give a numeric address")
    return local_addr


def _routable(loopback: IpAddress, local: Iterable[str], route: Callable[[socket.AddressFamily], str | None]) -> str:
    """An address of the loopback address's family that peers may know.

    The host of the store reaches its own endpoint over loopback where its name is mapped to 127.0.1.1.
    """
    family = socket.AF_INET if loopback.version == 4 else socket.AF_INET6
    ours = {address for address in map(parse_address, local) if address is not None}
    candidates = sorted(
        (address for address in ours if address.version == loopback.version and not address.is_loopback),
        key=lambda address: (address.is_link_local, int(address)),
    )
    routed = parse_address(route(family) or "")
    if routed is not None and routed in candidates:
        return str(routed)
    # A host with loopback only has no peers elsewhere.
    return str(candidates[0]) if candidates else str(loopback)


def is_reverse_name(name: str) -> bool:
    """Whether a name is one of the reverse lookup trees, which resolve to no address."""
    return name.lower().rstrip(".").endswith(_REVERSE_SUFFIXES)


def _plain(address: str) -> str:
    return address.split("%", 1)[0]


def _first_line(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.readline(256).strip()
    except OSError:
        return ""
