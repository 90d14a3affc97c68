"""Agents around one store, driven request by request, with clocks that only move when told."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from lmres.ids import Keys
from lmres.policy import Recovery
from lmres.ports import Put, Txn, TxnResult
from lmres.rendezvous.agent import Agent
from lmres.rendezvous.codec import encode
from lmres.rendezvous.edge.stores.engine import Engine
from lmres.rendezvous.resume import Checkpointing
from lmres.rendezvous.rounds import Inputs, Outcome, Settings
from lmres.rendezvous.state import Member, RunConfig

INTERVAL, TIMEOUT = 500, 3000
KEYS = Keys(run="unit")


class Node:
    """One agent and what its host says. ``see`` sets inputs that stay."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        process: str = "",
        dead: Callable[[Member], bool] | None = None,
        **config: Any,
    ) -> None:
        self.engine = engine
        self.name = name
        self.now_ms = 0
        self.inputs: dict[str, Any] = {"waiting": True, "master_port": 29500, "restarts_left": 3}
        self.outcome: Outcome | None = None
        self._count = 0
        self._process = process or name
        recovery = config.pop("recovery", Recovery())
        checkpointing = config.pop("checkpointing", Checkpointing())
        watched = config.pop("watched", False)
        values = {"min_nodes": 2, "max_nodes": 3, "policy": None, **config}
        self.agent = Agent(
            settings=Settings(
                keys=KEYS,
                me=Member(
                    node_id=name,
                    incarnation=self._incarnation(),
                    address=f"addr-{self._process}",
                    host=f"host-{name}",
                    boot_id=f"boot-{name}",
                    pid=1,
                    pid_start=1,
                    failure_domain=name,
                ),
                config=RunConfig(
                    local_world_size=1,
                    role="default",
                    heartbeat_interval_ms=INTERVAL,
                    heartbeat_timeout_ms=TIMEOUT,
                    written_by=name,
                    version="1",
                    **values,
                ),
                recovery=recovery,
                join_timeout_ms=20_000,
                form_timeout_ms=8_000,
                checkpointing=checkpointing,
                watched=watched,
            ),
            new_incarnation=self._incarnation,
            process_is_dead=dead or (lambda member: False),
        )

    def _incarnation(self) -> str:
        self._count += 1
        return f"{self._process}.{self._count}"

    def see(self, **inputs: Any) -> Node:
        self.inputs.update(inputs)
        return self

    def begin(self) -> Generator[Txn, TxnResult, Outcome]:
        return self.agent.round(Inputs(now_ms=self.now_ms, **self.inputs))

    def round(self, *, after_ms: int = 0) -> Outcome:
        """One whole round."""
        self.now_ms += after_ms
        outcome = self.cut(10**6)
        assert outcome is not None
        return outcome

    def cut(self, requests: int, *, answered: bool = True) -> Outcome | None:
        """A round that is abandoned after so many requests; the last one's answer may get lost."""
        steps = self.begin()
        try:
            txn = next(steps)
            for number in range(1, requests + 1):
                result = self.engine.apply(txn)
                if number == requests and not answered:
                    break
                txn = steps.send(result)
        except StopIteration as stop:
            self.outcome = stop.value
            return self.outcome
        steps.close()
        return None

    def starts(self) -> None:
        """As torch: workers of the formed group."""
        assert self.outcome is not None and self.outcome.formed is not None
        self.see(waiting=False, workers_alive=True, workers_generation=self.outcome.formed.generation)

    def returns(self) -> None:
        """As torch: the workers are gone and ``next_rendezvous`` is called again."""
        self.see(waiting=True, workers_alive=False)


def let(*nodes: Node, ms: int, step_ms: int = 250) -> None:
    """Time passes for these nodes; the others are as if stopped."""
    for _ in range(0, ms, step_ms):
        for node in nodes:
            node.round(after_ms=step_ms)


def running(engine: Engine, *names: str, standbys: tuple[str, ...] = (), **config: Any) -> list[Node]:
    """Nodes whose first generation runs."""
    config = {"min_nodes": len(names), "max_nodes": len(names) + len(standbys) + 1, **config}
    nodes = [Node(engine, name, **config) for name in (*names, *standbys)]
    for node in nodes:
        node.round()
    let(*nodes, ms=1500)
    for node in nodes[: len(names)]:
        node.starts()
    let(*nodes, ms=500)
    return nodes


def put(engine: Engine, key: str, record: object) -> None:
    engine.apply(Txn(success=(Put(key=key, value=record if isinstance(record, str) else encode(record)),)))
