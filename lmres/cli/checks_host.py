"""Checks of this host: can peers reach it, and does the system allow what the agent does?"""

from __future__ import annotations

import errno
import os
import resource
import socket
from pathlib import Path

import psutil

from lmres import cgroups
from lmres.cli.finding import Finding
from lmres.errors import ConfigError, StoreUnavailable
from lmres.rendezvous.edge.host import (
    Lookup,
    is_local_endpoint,
    is_reverse_name,
    parse_address,
    resolve,
    route_address,
    system_lookup,
)
from lmres.rendezvous.options import parse_endpoint

NETWORK_TIMEOUT_S = 3.0
MIN_OPEN_FILES = 4096
MIN_FREE_BYTES = 2 << 30
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def check_endpoint(endpoint: str | None) -> Finding:
    """On the store's host: is the port free. On others: does the host answer."""
    if not endpoint:
        return Finding(check="endpoint", status="skip", found="no endpoint given; --rdzv-endpoint HOST:PORT checks it")
    try:
        host, port = parse_endpoint(endpoint)
        addresses = resolve(host, timeout_s=NETWORK_TIMEOUT_S)
    except (ConfigError, StoreUnavailable) as error:
        return Finding(check="endpoint", status="fail", found=str(error), advice="correct --rdzv-endpoint or DNS")
    where = f"{endpoint} ({', '.join(addresses)} port {port})"
    if is_local_endpoint(addresses, override=None):
        return _local_port(addresses[0], port, where)
    return _remote_port(addresses[0], port, where)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _local_port(address: str, port: int, where: str) -> Finding:
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are only waiting to be forgotten is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return Finding(
                    check="endpoint",
                    status="warn",
                    found=f"{where} is this host, and the port is in use",
                    advice="fine if the run is already up; else give another port or end what listens there",
                )
            return Finding(
                check="endpoint",
                status="fail",
                found=f"{where} is this host, and the port can not be used: {error.strerror}",
                advice="give a port of 1024 or higher",
            )
    return Finding(check="endpoint", status="ok", found=f"{where} is this host, and the port is free")


def _remote_port(address: str, port: int, where: str) -> Finding:
    try:
        socket.create_connection((address, port), timeout=NETWORK_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return Finding(
            check="endpoint",
            status="warn",
            found=f"{where} is another host; it answers, and nobody listens on the port",
            advice="fine before the run is started on that host",
        )
    except OSError as error:
        return Finding(
            check="endpoint",
            status="fail",
            found=f"{where} is another host and can not be reached: {error}",
            advice="check the address, the route and the firewall between the hosts",
        )
    return Finding(check="endpoint", status="ok", found=f"{where} is another host, and somebody listens there")


def check_host_name(
    *, hostname: str | None = None, canonical: str | None = None, lookup: Lookup = system_lookup
) -> Finding:
    """The host's name and address as peers are likely to see them."""
    name = socket.gethostname() if hostname is None else hostname
    routed = route_address(socket.AF_INET) or route_address(socket.AF_INET6)
    advice = f"give --local-addr, here {routed}" if routed else "give --local-addr with an address of this host"
    try:
        addresses = tuple(lookup(name))
    except (OSError, UnicodeError) as error:
        return Finding(
            check="host_name",
            status="warn",
            found=f"the name {name} of this host does not resolve ({error})",
            advice=f"do not use it as endpoint; {advice}",
        )
    found = f"{name} is {', '.join(addresses) or 'without address'}, the default route leaves from {routed or 'none'}"
    full = socket.getfqdn(name) if canonical is None else canonical
    if is_reverse_name(full):
        return Finding(check="host_name", status="warn", found=f"{found}; its full name is {full}", advice=advice)
    if not addresses or any((parsed := parse_address(each)) and parsed.is_loopback for each in addresses):
        return Finding(
            check="host_name",
            status="warn",
            found=f"{found}: on this host the name means loopback",
            advice=f"do not use the name as endpoint unless other hosts resolve it to a real address; {advice}",
        )
    return Finding(check="host_name", status="ok", found=found)


def check_memory() -> Finding:
    """The memory that copies of the training state may take: of the host, or of the control group."""
    memory = psutil.virtual_memory()
    group = min(cgroups.memory_groups(), key=lambda g: g.free, default=None)
    free = memory.available if group is None else min(memory.available, group.free)
    found = f"{_gib(free)} free of {_gib(memory.total)}"
    if group is not None and group.limit < memory.total:
        found = f"{found}, limited to {_gib(group.limit)} by the control group"
    if free < MIN_FREE_BYTES:
        return Finding(
            check="memory",
            status="warn",
            found=found,
            advice="raise the limit, or lower checkpoint.memory_limit_fraction in the policy",
        )
    return Finding(check="memory", status="ok", found=found)


def _gib(count: int) -> str:
    return f"{max(count, 0) / 2**30:.1f} GiB"


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        return Finding(
            check="open_files",
            status="warn",
            found=f"at most {limit} open files in a process",
            advice=f"run: ulimit -n {MIN_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)}",
        )
    return Finding(check="open_files", status="ok", found=f"open files in a process: {limit}")


def check_process_control(ptrace_scope: Path = _PTRACE_SCOPE) -> Finding:
    """Whether ended processes can be waited for by descriptor, and stacks of workers be read."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return Finding(
            check="process_control",
            status="warn",
            found=f"process descriptors (pidfd) do not work: {error}",
            advice="use Linux 5.3 or newer, and allow pidfd_open in the container's seccomp profile",
        )
    scope = cgroups.number(ptrace_scope) or 0
    if scope >= 2 and os.geteuid() != 0:
        return Finding(
            check="process_control",
            status="warn",
            found=f"pidfd works; ptrace is for administrators only (ptrace_scope {scope})",
            advice="stacks of hung workers can not be read from outside; set kernel.yama.ptrace_scope to 1",
        )
    return Finding(check="process_control", status="ok", found=f"pidfd works; ptrace_scope is {scope}")
