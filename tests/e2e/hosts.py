"""Hosts made of network namespaces, joined by a bridge in a namespace of its own. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


def ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(args)}: {done.stderr.strip()}")


@dataclass
class Hosts:
    """``names`` have the addresses 10.77.0.1 and following."""

    tag: str
    names: tuple[str, ...]

    def namespace(self, name: str) -> str:
        return f"{self.tag}-{name}"

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def prefix(self, name: str) -> list[str]:
        """What to put before a command to run it on this host."""
        return ["ip", "netns", "exec", self.namespace(name)]

    def cut(self, name: str) -> None:
        """The host's cable is pulled."""
        ip("-n", self.namespace("switch"), "link", "set", f"p-{name}", "down")

    def mend(self, name: str) -> None:
        ip("-n", self.namespace("switch"), "link", "set", f"p-{name}", "up")

    def build(self) -> None:
        switch = self.namespace("switch")
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for name in self.names:
            space = self.namespace(name)
            ip("netns", "add", space)
            ip("-n", switch, "link", "add", f"p-{name}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", switch, "link", "set", f"p-{name}", "master", "br0", "up")
            ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in (*self.names, "switch"):
            with contextlib.suppress(RuntimeError):
                ip("netns", "del", self.namespace(name))


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Skips the test where namespaces can not be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    made = Hosts(tag=f"lm{os.getpid() % 100000}", names=names)
    try:
        try:
            made.build()
        except RuntimeError as error:
            pytest.skip(f"network namespaces can not be made here: {error}")
        yield made
    finally:
        made.remove()
