"""The guardian's process: when the agent can not clean up, it does.

It holds one end of a socket pair whose other end only the agent has, and hears messages on it: ``token T``,
``timeout SECONDS``, ``worker PID STARTED``, ``gone PID``, ``pulse``, ``bye``.

1. The agent died (its end is closed, or its pidfd says so): kill all of its workers, with everything they started,
   and end.
2. The agent is silent for the timeout (stopped, wedged): kill the workers and go on listening. By then the cluster
   has given their place to others. ``fenced SECONDS`` waits in the socket for the agent's return.
3. Silence counts only while the guardian itself was running. After a gap in its own turns (it was stopped, the
   machine slept or was overloaded) it counts anew: it may fence late, never wrongly.
4. ``bye``: end, and touch nothing.

It is started by path with ``python -I -S`` and imports only its neighbour ``proctree``: no torch, no package, about
10 MB. Terminal and stop signals of the job do not concern it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lmres.rendezvous.edge.workers import proctree
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 (no pathlib here)
    import proctree

KILL_S = 10.0
_MESSAGE_BYTES = 4096
_TURNS_IN_TIMEOUT = 20
_LONGEST_TURN_S = 0.5
_GAP_TURNS = 4


class Guard:
    """State and rules; ``turn`` is one look at the world."""

    def __init__(self, channel: int, agent: int) -> None:
        process = proctree.read_process(agent)
        self.channel = channel
        self.agent = agent
        self.since = process.started if process is not None else 0
        self.family = proctree.Family(set(), self.since)
        self.workers: dict[int, int] = {}
        self.timeout_s = 0.0
        self.pulse_at = 0.0  # 0: neither pulse nor worker yet, so silence does not count
        self.turn_at = time.monotonic()
        self.fenced = False

    def turn_s(self) -> float:
        return min(_LONGEST_TURN_S, self.timeout_s / _TURNS_IN_TIMEOUT) if self.timeout_s else _LONGEST_TURN_S

    def listen(self) -> bool:
        """Act on what the agent said; False: it said bye or is gone (then its workers are already killed)."""
        while True:
            try:
                message = os.read(self.channel, _MESSAGE_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                message = b""
            if not message:
                self.kill()
                return False
            if message == b"bye":
                return False
            try:
                self.obey(*message.decode("ascii").split())
            except (ValueError, TypeError):
                self.say("ignored a message")

    def obey(self, verb: str, value: str = "", started: str = "0") -> None:
        if verb == "pulse":
            self.pulse_at = time.monotonic()
            self.fenced = False
        elif verb == "worker":
            self.workers[int(value)] = int(started)
            self.family.add_root(int(value), int(started))
            self.pulse_at = self.pulse_at or time.monotonic()
        elif verb == "gone":
            self.workers.pop(int(value), None)
            self.family.remove_root(int(value))
        elif verb == "timeout":
            self.timeout_s = float(value)
        elif verb == "token":
            self.family = proctree.Family({value}, self.since)
            self.family.never(self.agent)
            for pid, begun in self.workers.items():
                self.family.add_root(pid, begun)

    def judge(self) -> None:
        """Fence a silent agent."""
        now = time.monotonic()
        if now - self.turn_at > _GAP_TURNS * self.turn_s() and self.pulse_at:
            self.pulse_at = now
        self.turn_at = now
        silent_s = now - self.pulse_at
        if self.pulse_at and self.timeout_s and not self.fenced and silent_s > self.timeout_s:
            self.fenced = True
            self.kill()
            self.say(f"fenced {silent_s:.3f}")
            self.turn_at = time.monotonic()

    def kill(self) -> None:
        self.family.kill(time.monotonic() + KILL_S)

    def say(self, line: str) -> None:
        try:  # noqa: SIM105 (contextlib would cost more than all of this file)
            os.write(self.channel, line.encode("ascii"))
        except OSError:
            pass  # the agent is gone or does not read: the next turn sees it


def watch_agent(poller: select.poll, agent: int) -> None:
    """End of file is not enough if a fork of the agent holds its end of the socket."""
    try:
        descriptor = os.pidfd_open(agent)
    except (AttributeError, OSError):
        return
    if os.getppid() == agent:
        poller.register(descriptor, select.POLLIN)
    else:
        os.close(descriptor)


def main() -> None:
    channel, agent = int(sys.argv[1]), int(sys.argv[2])
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    os.set_blocking(channel, False)
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    watch_agent(poller, agent)
    guard = Guard(channel, agent)
    while True:
        events = [number for number, _event in poller.poll(int(guard.turn_s() * 1000))]
        if not guard.listen():
            return
        if any(number != channel for number in events):
            guard.kill()
            return
        guard.judge()


if __name__ == "__main__":
    main()
