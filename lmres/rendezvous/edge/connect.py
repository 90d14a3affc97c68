"""From the endpoint to a store: who hosts it, and the first connection.

Exactly one process binds the endpoint's port; whoever does starts the store process there. All others connect, and wait
for the host to come up. An endpoint at which something else answers is a configuration error.
"""

from __future__ import annotations

import logging
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import tenacity

from lmres.errors import ConfigError, StoreLost, StoreProtocolError, StoreUnavailable
from lmres.ports import Store
from lmres.rendezvous.edge.host import advertised_address, is_local_endpoint, local_addresses, resolve
from lmres.rendezvous.edge.stores.file import FileStore
from lmres.rendezvous.edge.stores.spawn import bind_endpoint, start_server
from lmres.rendezvous.edge.stores.tcp import TcpStore
from lmres.rendezvous.options import Options

log = logging.getLogger("lmres")

FIRST_TRY_MS = 5_000
RETRY_MAX_S = 0.5
SAY_AFTER_TRIES = 4
"""The host of the store may be a moment behind; only a longer wait is worth a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """``server`` is the store process if this agent started it. ``address``: how peers reach this host."""

    store: Store
    address: str
    server: subprocess.Popen[bytes] | None = None


def connect(options: Options, *, client_id: str, state_dir: Path) -> Connection:
    """Opens the run's store. Raises ConfigError, or StoreLost when it could not be reached in time."""
    if options.store_type == "file":
        assert options.path is not None
        address = advertised_address(
            local_addr=options.local_addr, endpoint_host="127.0.0.1", connected_address="127.0.0.1"
        )
        return Connection(store=FileStore(Path(options.path)), address=address)
    return _connect_tcp(options, client_id, state_dir)


def _connect_tcp(options: Options, client_id: str, state_dir: Path) -> Connection:
    assert options.host is not None and options.port is not None
    start = time.monotonic()
    try:
        addresses = resolve(options.host, timeout_s=min(options.timeout_s, options.join_timeout_s))
    except StoreUnavailable as error:
        raise StoreLost(str(error)) from error
    server = None
    own = is_local_endpoint(addresses, override=options.is_host)
    if own:
        listener = bind_endpoint(addresses, options.port)
        if listener is not None:
            server = start_server(listener, log_path=state_dir / "store.log")
            log.info("this agent hosts the store at %s (pid %d)", options.endpoint, server.pid)
    store = TcpStore((options.host, options.port), client_id=client_id, addresses=addresses)
    left_s = max(1.0, options.timeout_s - (time.monotonic() - start))
    _first_answer(store, options, addresses, own, left_s)
    address = advertised_address(
        local_addr=options.local_addr,
        endpoint_host=options.host,
        connected_address=store.local_address() or addresses[0],
    )
    return Connection(store=store, address=address, server=server)


def _first_answer(store: TcpStore, options: Options, addresses: tuple[str, ...], own: bool, timeout_s: float) -> None:
    """Waits until the store answers, for as long as ``timeout`` allows."""
    end = time.monotonic() + timeout_s

    def attempt() -> None:
        left_ms = max(100, round((end - time.monotonic()) * 1000))
        store.connect_probe(timeout_ms=min(FIRST_TRY_MS, left_ms))

    def said_once(state: tenacity.RetryCallState) -> None:
        if state.attempt_number == SAY_AFTER_TRIES:
            error = state.outcome.exception() if state.outcome is not None else None
            log.info("waiting for the store at %s, for up to %.0f s (%s)", options.endpoint, timeout_s, error)

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(StoreUnavailable),
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=RETRY_MAX_S),
        stop=tenacity.stop_after_delay(timeout_s),
        before_sleep=said_once,
    )
    try:
        retrying(attempt)
    except StoreProtocolError as error:
        raise ConfigError(f"--rdzv-endpoint={options.endpoint}: {error}") from error
    except tenacity.RetryError as error:
        store.close()
        raise StoreLost(_unreachable(options, addresses, own, timeout_s, error)) from error


def _unreachable(
    options: Options, addresses: tuple[str, ...], own: bool, timeout_s: float, error: tenacity.RetryError
) -> str:
    cause = error.last_attempt.exception()
    message = f"no store answered at --rdzv-endpoint={options.endpoint} within {timeout_s:.0f} s: {cause}"
    if not own:
        ours = ", ".join(sorted(local_addresses()))
        message += (
            f". The endpoint leads to {', '.join(addresses)}; this host's addresses are {ours}, so it does not host "
            f"the store. If it should, give --rdzv-conf=is_host=true"
        )
    return message
