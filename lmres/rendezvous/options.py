"""The launch options: what torchrun passes to the rendezvous backend, checked and turned into one record.

torchrun hands over an endpoint, a run id, the node range and the ``--rdzv-conf`` map, mostly as text.
Everything wrong with them is found here, before a socket is opened, and reported in one message. The rules:

* Strict: an unknown key is an error with the nearest valid name, never ignored. So is a known key whose
  feature is not in this version: a shared secret that is accepted and not used would be worse than none.
* The endpoint stays as it was written. A numeric host is kept numeric; a name is kept a name and resolved at
  the edge.
* Run id and node id become parts of store keys, file names and log lines: both are bounded and have no odd
  characters, the run id by encoding (``run_key``), the node id by restriction.
* torchrun itself always adds ``timeout`` (900 when the user gave none), so that key is always present under
  torchrun.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, TypeVar
from urllib.parse import quote

from lmres.errors import ConfigError
from lmres.fields import nearest_name, shown

StoreType: TypeAlias = Literal["tcp", "file", "etcd"]

DEFAULT_PORT: Final = 29400
"""The port of torch's own ``c10d`` backend."""

MAX_RUN_ID_CHARS: Final = 256
MAX_RUN_KEY_CHARS: Final = 128
MAX_TEXT_CHARS: Final = 4096
MAX_TIMEOUT_S: Final = 1e8
MAX_REPORTED: Final = 20

ETCD_KEYS: Final = frozenset(
    {"etcd_prefix", "etcd_ca_cert", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file"}
)
KEYS: Final = ETCD_KEYS | {
    "store_type",
    "lm_resiliency_worker_config",
    "policy",
    "lm_resiliency_restart_context_path",
    "state_dir",
    "node_id",
    "failure_domain",
    "is_host",
    "timeout",
    "read_timeout",
    "join_timeout",
    "secret_file",
}

_NODE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_PORT = re.compile(r"[0-9]{1,5}")
_TRUE = frozenset({"1", "true", "t", "yes", "y"})
_FALSE = frozenset({"0", "false", "f", "no", "n"})


Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one agent. ``None`` where the edge finds the value: node id, folders, who hosts."""

    store_type: StoreType
    endpoint: str
    host: str | None
    """For ``tcp``: name or numeric address without brackets."""
    port: int | None
    path: str | None
    """For ``file``."""
    run_id: str
    run_key: str
    """The run id as one safe part of a store key or a file name, at most 128 characters."""
    min_nodes: int
    max_nodes: int
    local_addr: str | None
    policy_path: str | None
    restart_context_path: str | None
    state_dir: str | None
    node_id: str | None
    failure_domain: str | None
    is_host: bool | None
    timeout_s: float
    read_timeout_s: float
    join_timeout_s: float


def parse_options(
    *,
    endpoint: str,
    run_id: str,
    min_nodes: int,
    max_nodes: int,
    local_addr: str | None,
    config: Mapping[str, object],
) -> Options:
    """Checks what torchrun passed. Raises ConfigError that lists every problem: key, value, remedy."""
    taker = _Taker(config=config)
    taker.refuse_unknown()
    taker.check_nodes(min_nodes, max_nodes)
    store_type = taker.store_type()
    host_port = None
    path = None
    if store_type == "tcp":
        host_port = taker.attempt(lambda: parse_endpoint(endpoint, max_nodes=max_nodes))
    elif store_type == "file":
        path = taker.attempt(lambda: _file_path(endpoint))
    options = Options(
        store_type=store_type,
        endpoint=endpoint,
        host=host_port[0] if host_port else None,
        port=host_port[1] if host_port else None,
        path=path,
        run_id=run_id,
        run_key=taker.attempt(lambda: encode_run_id(run_id)) or "",
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        local_addr=taker.local_addr(local_addr),
        policy_path=taker.policy_path(),
        restart_context_path=taker.text("lm_resiliency_restart_context_path"),
        state_dir=taker.text("state_dir"),
        node_id=taker.node_id(),
        failure_domain=taker.text("failure_domain"),
        is_host=taker.flag("is_host"),
        timeout_s=taker.seconds("timeout", 600.0),
        read_timeout_s=taker.seconds("read_timeout", 60.0),
        join_timeout_s=taker.seconds("join_timeout", 600.0),
    )
    taker.raise_problems()
    return options


def is_node_id(text: str) -> bool:
    """Whether the text can be a node id: it is used in store keys, file names and log lines as it stands."""
    return _NODE_ID.fullmatch(text) is not None and text not in {".", ".."}


def encode_run_id(run_id: str) -> str:
    """The run id as one key-safe part: percent-encoded, and cut with a digest when that is long.

    Different run ids have different keys; none contains ``/``, none is ``.`` or ``..``. Raises ConfigError.
    """
    if not 0 < len(run_id) <= MAX_RUN_ID_CHARS or not run_id.isprintable():
        raise ConfigError(f"--rdzv-id: found {shown(run_id)}; allowed: 1 to {MAX_RUN_ID_CHARS} printable characters")
    # quote leaves "~" alone; here it marks a cut key, so that no run id looks like another one's cut key.
    key = quote(run_id, safe="").replace("~", "%7E")
    if key.startswith("."):
        key = f"%2E{key[1:]}"
    if len(key) > MAX_RUN_KEY_CHARS:
        digest = hashlib.sha256(run_id.encode()).hexdigest()[:32]
        key = f"{key[: MAX_RUN_KEY_CHARS - 33]}~{digest}"
    return key


def parse_endpoint(endpoint: str, max_nodes: int = 1) -> tuple[str, int]:
    """Host and port of ``HOST``, ``HOST:PORT``, ``[V6]`` or ``[V6]:PORT``. Raises ConfigError.

    An empty endpoint means this host, and is allowed only where no other node has to find it.
    """
    text = endpoint.strip()
    wants = "allowed: HOST:PORT, or [ADDRESS]:PORT for IPv6"
    if not text:
        if max_nodes == 1:
            return "localhost", DEFAULT_PORT
        raise ConfigError(f"--rdzv-endpoint: missing; {wants}, the same on every host")
    found = f"--rdzv-endpoint: found {shown(endpoint)}"
    host, port_text = _split(text, found)
    if not is_host(host):
        raise ConfigError(f"{found}, where {shown(host)} is no host name and no address; {wants}")
    if _address_or_none(host) in (ipaddress.IPv4Address(0), ipaddress.IPv6Address(0)):
        raise ConfigError(f"{found}, which no other host can connect to; {wants} of the host that keeps the store")
    if host.lower().rstrip(".").endswith((".ip6.arpa", ".in-addr.arpa")):
        raise ConfigError(f"{found}, a name for reverse lookups only; give the numeric address instead")
    if port_text is None:
        return host, DEFAULT_PORT
    if not _PORT.fullmatch(port_text) or not 0 < int(port_text) < 1 << 16:
        raise ConfigError(f"{found}, where the port is {shown(port_text)}; allowed: a port from 1 to 65535")
    return host, int(port_text)


def _split(text: str, found: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ConfigError(f"{found}; allowed: [ADDRESS]:PORT with one pair of brackets")
        if not isinstance(_address_or_none(host), ipaddress.IPv6Address):
            raise ConfigError(f"{found}, where {shown(host)} is no IPv6 address; allowed: [ADDRESS]:PORT")
        return host, rest[1:] if rest else None
    if text.count(":") > 1 and "/" not in text:
        # "::1:29400" is an address of its own: guessing where the port starts could find the wrong host.
        raise ConfigError(f"{found}; allowed: an IPv6 address in brackets, such as [::1]:{DEFAULT_PORT}")
    host, colon, port = text.partition(":")
    return host, port if colon else None


def is_host(host: str) -> bool:
    """Whether the text has the form of a host name or of a numeric address."""
    if _address_or_none(host) is not None:
        return True
    # A last label of digits is a mistyped IPv4 address; resolvers read "10.1" as 10.0.0.1.
    return _HOST_NAME.fullmatch(host) is not None and not host.rstrip(".").rsplit(".", 1)[-1].isdigit()


def _address_or_none(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _file_path(endpoint: str) -> str:
    if not endpoint or len(endpoint) > MAX_TEXT_CHARS or not endpoint.isprintable():
        raise ConfigError(f"--rdzv-endpoint: found {shown(endpoint)}; allowed with store_type=file: the path of a file")
    return endpoint


@dataclass(slots=True, kw_only=True)
class _Taker:
    """Takes keys out of the map by type and remembers what is wrong."""

    config: Mapping[str, object]
    problems: list[str] = field(default_factory=list)

    def add(self, key: str, value: object, allowed: str) -> None:
        self.problems.append(f"{key}: found {shown(value)}; allowed: {allowed}")

    def attempt(self, parse: Callable[[], Parsed]) -> Parsed | None:
        try:
            return parse()
        except ConfigError as refused:
            self.problems.append(str(refused))
            return None

    def raise_problems(self) -> None:
        if self.problems:
            more = len(self.problems) - MAX_REPORTED
            lines = [f"  {problem}" for problem in self.problems[:MAX_REPORTED]]
            tail = [f"  and {more} more; correct these first"] if more > 0 else []
            raise ConfigError("\n".join(["bad launch options of the lm_resiliency backend:", *lines, *tail]))

    def refuse_unknown(self) -> None:
        for key in sorted(self.config.keys() - KEYS, key=str):
            name = key if isinstance(key, str) and key.isprintable() and len(key) <= 64 else shown(key)
            self.problems.append(
                f"{name}: unknown key with value {shown(self.config[key])} in --rdzv-conf; "
                f"{nearest_name(str(key), KEYS)}"
            )
        for key in sorted(self.config.keys() & (ETCD_KEYS | {"secret_file"})):
            feature = "authentication" if key == "secret_file" else "the etcd store"
            self.problems.append(
                f"{key}: found {shown(self.config[key])}, but {feature} is not available in this version; "
                f"remove the key"
            )

    def store_type(self) -> StoreType:
        value = self.text("store_type")
        if value is None or value == "tcp":
            return "tcp"
        if value == "file":
            return "file"
        if value == "etcd":
            self.problems.append("store_type: found 'etcd', not available in this version; use tcp or file")
            return "etcd"
        self.problems.append(f"store_type: found {shown(value)}; {nearest_name(value, ('tcp', 'file'))}")
        return "etcd"

    def text(self, key: str) -> str | None:
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT_CHARS or not value.isprintable():
            self.add(key, value, f"one line of printable text, 1 to {MAX_TEXT_CHARS} characters")
            return None
        return value

    def node_id(self) -> str | None:
        value = self.text("node_id")
        if value is not None and not is_node_id(value):
            self.add("node_id", value, "1 to 128 characters of A-Z a-z 0-9 . _ -, and not . or ..")
        return value

    def policy_path(self) -> str | None:
        name, alias = self.text("lm_resiliency_worker_config"), self.text("policy")
        if name is not None and alias is not None and name != alias:
            self.problems.append(
                f"lm_resiliency_worker_config: found {shown(name)}, while its alias policy has "
                f"{shown(alias)}; give one of the two"
            )
        return name if name is not None else alias

    def flag(self, key: str) -> bool | None:
        value = self.config.get(key)
        if value is None or isinstance(value, bool):
            return value
        word = str(value).strip().lower() if isinstance(value, (int, str)) and len(str(value)) < 8 else ""
        if word not in _TRUE | _FALSE:
            self.add(key, value, "true or false")
            return None
        return word in _TRUE

    def seconds(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        number = math.nan
        # torch's own default is a number; what a user writes arrives as text.
        if isinstance(value, str):
            number = float(value) if _DECIMAL.fullmatch(value.strip()) else math.nan
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and value <= MAX_TIMEOUT_S:
            number = float(value)
        if not 0 < number <= MAX_TIMEOUT_S:
            self.add(key, value, f"seconds as a number more than 0, at most {MAX_TIMEOUT_S:.10g}")
            return default
        return number

    def local_addr(self, value: str | None) -> str | None:
        # An empty PET_LOCAL_ADDR means the same as none.
        if not value:
            return None
        if not is_host(value):
            self.add("--local-addr", value, "a name or a numeric address of this host")
        return value

    def check_nodes(self, min_nodes: int, max_nodes: int) -> None:
        if not 1 <= min_nodes <= max_nodes:
            self.add("--nnodes", f"{min_nodes}:{max_nodes}", "MIN:MAX with 1 <= MIN <= MAX")
