"""torchrun with a warm pool put in from outside: ``python -m tests.e2e.warm_agent TORCHRUN ARGUMENTS``.

What the node does when it is told to by the policy, for tests of the pool alone. With ``WARM=0`` workers start cold.
"""

from __future__ import annotations

import os
from typing import Any

from lmres.rendezvous.edge import crew, events, handler
from lmres.rendezvous.edge.workers.monitor import WorkerMonitor
from lmres.rendezvous.edge.workers.warm import WarmPool, names_of_report
from lmres.rendezvous.edge.workers.warm_guess import guess_launches


def wire() -> None:
    pools: list[WarmPool] = []
    start, close, reported = crew.Crew.start, crew.Crew.close, crew.Crew._reported
    started, emit = handler.LmresHandler._started, events.EventLog.emit

    def make_monitor(**options: Any) -> WorkerMonitor:
        pools.append(WarmPool(token_length=len(options["token"])))
        return WorkerMonitor(**options, warm=pools[0])

    def crew_start(self: crew.Crew) -> None:
        pools[0]._on_spawn, pools[0]._on_gone = self._guardian.register, self._guardian.unregister
        pools[0].start()
        start(self)

    def crew_close(self: crew.Crew) -> None:
        close(self)
        pools[0].close()

    def crew_reported(self: crew.Crew, worker: Any, message: dict[str, Any]) -> None:
        reported(self, worker, message)
        learned = message.get("kind") == "modules" and pools[0].learn(names_of_report(message))
        if learned or message.get("kind") == "first_step":
            pools[0].refill(paced=os.environ.get("PACED", "1") == "1")

    def handler_started(self: handler.LmresHandler) -> Any:
        fresh = self._node is None
        made = started(self)
        if fresh:
            pools[0].expect(guess_launches(self._agent))
        return made

    def events_emit(self: events.EventLog, event: str, *args: Any, **fields: Any) -> None:
        emit(self, event, *args, **fields)
        if event == "agent_parked":
            pools[0].refill(paced=False)

    crew.WorkerMonitor = make_monitor  # type: ignore[assignment,misc]
    crew.Crew.start, crew.Crew.close, crew.Crew._reported = crew_start, crew_close, crew_reported  # type: ignore
    handler.LmresHandler._started = handler_started  # type: ignore[method-assign]
    events.EventLog.emit = events_emit  # type: ignore[method-assign]


def main() -> None:
    from torch.distributed.run import main as torchrun

    if os.environ.get("WARM", "1") == "1":
        wire()
    torchrun()


if __name__ == "__main__":
    main()
