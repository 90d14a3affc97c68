"""Starting the store process: the parent binds, the child serves.

Whoever binds the port hosts the store. Binding here, before the process exists, makes that one step of the kernel:
two agents of one host that both think they are the host cannot both win, the loser knows at once, and clients that
come before the server runs wait in the listen queue.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import lmres
from lmres.detached import package_root, start_detached
from lmres.errors import ConfigError
from lmres.rendezvous.edge.stores.sockets import LISTEN_BACKLOG

# The package's folder comes last, so that no module next to it hides one of the standard library.
_BOOTSTRAP = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from lmres.rendezvous.edge.stores.tcp_server import main; main(sys.argv[1:])"
)


def bind_endpoint(addresses: Sequence[str], port: int) -> socket.socket | None:
    """A listening socket for the endpoint, or None if the port is taken.

    ``addresses`` are the IP addresses that the endpoint's host name resolves to. If all are loopback addresses only
    loopback is served (IPv4 first: every process of this host must choose the same one), else every interface.
    Raises ConfigError if the port cannot be used at all.
    """
    try:
        return _listen(addresses, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise ConfigError(
            f"cannot listen at port {port} for addresses {', '.join(addresses)}: {error.strerror or error}; "
            "choose another port in the rendezvous endpoint"
        ) from error


def start_server(
    listener: socket.socket,
    *,
    log_path: Path,
    linger_ms: int = 5_000,
    first_agent_ms: int = 60_000,
    stall_ms: int = 10_000,
) -> subprocess.Popen[bytes]:
    """Starts the store process on a socket from ``bind_endpoint``, which is closed here.

    The process leads a session of its own and has nothing of this one open but the socket and the log. The caller
    keeps the Popen and polls it, so that no zombie stays if the server ends first; it never has to end it.
    """
    numbers = {"fd": listener.fileno(), "linger-ms": linger_ms, "first-agent-ms": first_agent_ms, "stall-ms": stall_ms}
    options = [text for name, number in numbers.items() for text in (f"--{name}", str(number))]
    arguments = [package_root(lmres.__file__), *options]
    try:
        return start_detached(_BOOTSTRAP, arguments, listener=listener, log_path=log_path)
    except OSError as error:
        raise ConfigError(f"cannot start the store process, log {log_path}: {error}") from error


def _listen(addresses: Sequence[str], port: int) -> socket.socket:
    parsed = [ipaddress.ip_address(address.partition("%")[0]) for address in addresses]
    if parsed and all(address.is_loopback for address in parsed):
        first = min(parsed, key=lambda address: (address.version, address))
        family = socket.AF_INET if first.version == 4 else socket.AF_INET6
        return socket.create_server((str(first), port), family=family, backlog=LISTEN_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=LISTEN_BACKLOG)
    return socket.create_server(("", port), backlog=LISTEN_BACKLOG)
