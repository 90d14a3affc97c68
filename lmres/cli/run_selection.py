"""Which run a command is about, by the options and variables that torchrun reads.

An option wins over its variable: ``--rdzv-endpoint`` (PET_RDZV_ENDPOINT), ``--rdzv-id`` (PET_RDZV_ID, else "none" as
torchrun has it), ``--store-type``, else the ``store_type`` in ``--rdzv-conf`` (PET_RDZV_CONF), else ``tcp``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lmres.errors import ConfigError
from lmres.fields import nearest_name, shown
from lmres.ids import Keys
from lmres.rendezvous.options import encode_run_id, parse_endpoint

STORE_TYPES = ("tcp", "file")
TORCHRUN_DEFAULT_ID = "none"
MAX_PATH_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSelection:
    """``endpoint`` as given. ``host`` and ``port`` for ``tcp``, ``path`` for ``file``."""

    endpoint: str
    store_type: Literal["tcp", "file"]
    run_id: str
    keys: Keys
    host: str = ""
    port: int = 0
    path: str = ""


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options that select a run. Their values are read by ``select_run``."""
    group = parser.add_argument_group("which run (as given to torchrun)")
    group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="or the store's path; else PET_RDZV_ENDPOINT")
    group.add_argument("--rdzv-id", metavar="RUN", help="else PET_RDZV_ID, else 'none'")
    group.add_argument("--store-type", metavar="TYPE", help="tcp or file; else by --rdzv-conf, else tcp")
    group.add_argument("--rdzv-conf", metavar="CONF", help="only its store_type is read; else PET_RDZV_CONF")


def select_run(arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> RunSelection:
    """Raises ConfigError for anything that can not name a run."""
    env = os.environ if environ is None else environ
    endpoint = arguments.rdzv_endpoint or env.get("PET_RDZV_ENDPOINT") or ""
    if not endpoint:
        raise ConfigError("which run? give --rdzv-endpoint, the same as to torchrun (or set PET_RDZV_ENDPOINT)")
    run_id = chosen_run_id(arguments, env) or TORCHRUN_DEFAULT_ID
    store_type = _store_type(arguments, env)
    keys = Keys(run=encode_run_id(run_id))
    if store_type == "file":
        if not endpoint.isprintable() or len(endpoint) > MAX_PATH_CHARS:
            raise ConfigError(f"--rdzv-endpoint: found {shown(endpoint)}; allowed with store type file: a path")
        return RunSelection(endpoint=endpoint, store_type="file", run_id=run_id, keys=keys, path=endpoint)
    host, port = parse_endpoint(endpoint, max_nodes=2)
    return RunSelection(endpoint=endpoint, store_type="tcp", run_id=run_id, keys=keys, host=host, port=port)


def chosen_run_id(arguments: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """The run id that was given, None if none was."""
    return arguments.rdzv_id or environ.get("PET_RDZV_ID") or None


def _store_type(arguments: argparse.Namespace, env: Mapping[str, str]) -> Literal["tcp", "file"]:
    found, where = arguments.store_type, "--store-type"
    if found is None:
        conf, where = arguments.rdzv_conf, "--rdzv-conf"
        if conf is None:
            conf, where = env.get("PET_RDZV_CONF", ""), "PET_RDZV_CONF"
        found = _conf(conf, where).get("store_type", "tcp")
    if found == "tcp":
        return "tcp"
    if found == "file":
        return "file"
    if found == "etcd":
        raise ConfigError(f"{where}: store_type 'etcd' is not available in this version; use tcp or file")
    raise ConfigError(f"{where}: found store_type {shown(found)}; {nearest_name(str(found), STORE_TYPES)}")


def _conf(text: str, where: str) -> dict[str, str]:
    """As torchrun reads it: KEY=VALUE pairs with commas between them."""
    pairs: dict[str, str] = {}
    for part in text.split(",") if text.strip() else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not key or not equals or not value:
            raise ConfigError(f"{where}: found {shown(part)}; allowed: KEY=VALUE,KEY=VALUE")
        pairs[key] = value
    return pairs
