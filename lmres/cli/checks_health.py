"""The host's health for ``lmres doctor``: the same checks that an agent runs, once."""

from __future__ import annotations

import socket
from pathlib import Path
from tempfile import gettempdir

from lmres.cli.finding import Finding, Status
from lmres.errors import ConfigError
from lmres.policy import Health, Policy
from lmres.rendezvous.edge.host import route_address
from lmres.rendezvous.edge.policy_file import load_policy
from lmres.scout.edge.health import Host, look_once
from lmres.scout.health import Reading

_STATUS: dict[str, Status] = {"fit": "ok", "unfit": "fail", "skipped": "skip"}
_ADVICE = {
    "memory": "end what holds the memory, or use another host",
    "disk": "free space there, or give another folder (state_dir)",
    "cpu": "check the host's cooling",
    "network": "check the cable, the switch port and the driver",
    "gpu": "reset or replace the device (nvidia-smi -q tells more)",
    "command": "the site's own check says so (detection.health.command)",
}
_LEFT_OUT = ("clock", "kernel")
"""Events: a single look says nothing about them."""


def check_health(policy_file: str | None) -> list[Finding]:
    """A finding for each check; the site's command runs too where a policy names one."""
    settings = _settings(policy_file)
    address = route_address(socket.AF_INET) or route_address(socket.AF_INET6) or "127.0.0.1"
    host = Host(folder=Path(gettempdir()), address=lambda: address)
    return [finding_of(r) for r in look_once(settings, host) if r.check not in _LEFT_OUT]


def finding_of(reading: Reading) -> Finding:
    return Finding(
        check=f"health_{reading.check}",
        status=_STATUS[reading.status],
        found=reading.found,
        advice=_ADVICE.get(reading.check, "") if reading.status == "unfit" else "",
    )


def _settings(policy_file: str | None) -> Health:
    if policy_file is None:
        return Policy().detection.health
    try:
        return load_policy(policy_file).detection.health
    except ConfigError:  # what is wrong with it is another check's finding
        return Policy().detection.health
