"""One agent process: the shipped rounds inside, torch's behaviour around them.

Torch's main thread is either inside ``next_rendezvous`` (``waiting``) or watches workers. It follows the outcome of
the last round: workers of an older plan are stopped before anything else; a node in a formed group starts workers; a
charged node spends one restart on the way back; an end stops the workers, says goodbye and exits with its code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from lmres.gemini.inventory import Holdings, Key
from lmres.ports import Txn, TxnResult
from lmres.rendezvous.agent import Agent
from lmres.rendezvous.plan import Cause, ExceptionInfo, Plan
from lmres.rendezvous.resume import Checkpointing
from lmres.rendezvous.rounds import Broken, Inputs, Leave, Outcome, Settings
from lmres.rendezvous.state import Banned, Evidence, Member, Paused, RunConfig
from lmres.scout.evidence import Weight, classify_exception, classify_exit
from lmres.scout.sighting import Sighting

if TYPE_CHECKING:
    from tests.sim.states import Vault
    from tests.sim.world import Host, World

LEAVE_MS = 5_000


class Workers:
    """The workers of one node in one generation (one each, for simplicity). ``state``: starting, running, failed
    (held for the plan, or ended badly), hung (waits for one that has gone), stuck (at fault itself), done, stopping,
    gone. ``moved_ms``: when it last made progress. ``word``: where it is asked to stand still, ``ignored`` one of them;
    ``stands_at``, ``stood``: at which step it does, and with its state saved."""

    def __init__(self, epoch: int, generation: int, slot: int) -> None:
        self.group = (epoch, generation)
        self.generation = generation
        self.slot = slot
        self.state = "starting"
        self.vault: Vault | None = None
        self.moved_ms = 0
        self.word = self.ignored = 0
        self.stands_at: int | None = None
        self.stood: int | None = None

    @property
    def alive(self) -> bool:
        return self.state not in ("done", "gone", "dead")


class Process:
    def __init__(self, world: World, *, node_id: str, number: int, host: Host, pid: int) -> None:
        self.world, self.node_id, self.host, self.pid = world, node_id, host, pid
        self.name = f"{node_id}#{number}"
        self.alive = True
        self.started_ms = world.now_ms
        self.paused = False
        self.paused_ms: int | None = None
        self.exit_code: int | None = None
        self.end_reason = ""
        self.end_epoch = 0
        self.leave: Leave | None = None
        self.left = False
        self.workers: Workers | None = None
        self.workers_generation = 0
        self.succeeded = 0
        self.waiting = True
        self.restarts_left = world.scenario.max_restarts
        self.faults: tuple[Evidence, ...] = ()
        self.banned: tuple[Banned, ...] = ()
        self.holdings: Holdings | None = None
        self.broken: dict[str, Broken] = {}
        self.linked_as = ""
        self.sighting: Sighting | None = None
        self.sights = 0
        self.paused_word: int | None = None
        self.stands: Paused | None = None
        self.restored: Key | None = None
        self.ever: set[int] = set()
        self.deaf_until_ms = 0
        self._freezing: tuple[int, int] | None = None
        self._told_epoch = 0
        self.outcome: Outcome | None = None
        self.unkillable_ms = 0
        self._spent_for = 0
        self._round: Generator[Txn, TxnResult, Outcome] | None = None
        self._leaving_round = False
        self.round_epoch = 0
        self._attempt = 0
        self._wake_at: int | None = None
        self._poked = False
        self._leave_since: int | None = None
        self._deferred: list[Callable[[], None]] = []
        self._incarnations = 0
        self._port = 20_000
        self._shown = ""
        self.agent = Agent(
            settings=self._settings(), new_incarnation=self._new_incarnation, process_is_dead=self._process_is_dead
        )

    # -- set-up -------------------------------------------------------------------------------------------------------

    def _settings(self) -> Settings:
        s = self.world.scenario
        config = RunConfig(
            min_nodes=s.min_nodes,
            max_nodes=s.max_nodes,
            local_world_size=1,
            role="default",
            heartbeat_interval_ms=s.interval_ms,
            heartbeat_timeout_ms=s.timeout_ms,
            policy=None,
            written_by=self.node_id,
            version="sim",
        )
        me = Member(
            node_id=self.node_id,
            incarnation=self._new_incarnation(),
            address=f"10.0.0.{len(self.world.processes)}",
            host=self.host.name,
            boot_id=self.host.boot_id,
            pid=self.pid,
            pid_start=0,
            failure_domain=self.node_id,
            pulse_port=1 if self.world.links.on else 0,
        )
        return Settings(
            keys=self.world.keys,
            me=me,
            config=config,
            recovery=s.recovery,
            join_timeout_ms=s.join_timeout_ms,
            form_timeout_ms=s.form_timeout_ms,
            checkpointing=Checkpointing(enabled=self.world.states.on),
            watched=self.world.looks.on,
        )

    def _new_incarnation(self) -> str:
        self._incarnations += 1
        return f"{self.name}.{self._incarnations}"

    def _process_is_dead(self, member: Member) -> bool:
        return member.boot_id == self.host.boot_id and member.pid not in self.host.pids

    def boot(self) -> None:
        self.host.pids.add(self.pid)
        self.world.log(f"{self.name} starts on {self.host.name}")
        self.wake(self.world.rng.randint(0, 300))

    @property
    def clock_ms(self) -> int:
        return self.host.clock_ms(self.world.now_ms)

    # -- time ---------------------------------------------------------------------------------------------------------

    def later(self, delay_ms: int, action: Callable[[], None]) -> None:
        """An event of this process: lost with it, put off while it is stopped."""

        def happen() -> None:
            if not self.alive:
                return
            if self.paused:
                self._deferred.append(action)
                return
            action()

        self.world.after(delay_ms, happen)

    def wake(self, delay_ms: int) -> None:
        """At most one wake-up is pending: the earliest."""
        at_ms = self.world.now_ms + delay_ms
        if self._wake_at is not None and self._wake_at <= at_ms:
            return
        self._wake_at = at_ms

        def woken() -> None:
            if self._wake_at == at_ms:
                self._wake_at = None
                self._begin()

        self.later(delay_ms, woken)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._round is not None:
            self._poked = True
            return
        self._poked = False
        inputs = Inputs(
            now_ms=self.clock_ms,
            waiting=self.waiting,
            workers_generation=self.workers_generation,
            workers_alive=self.workers is not None and self.workers.alive,
            succeeded=self.succeeded,
            restarts_left=self.restarts_left,
            master_port=self._port,
            step=self.world.program.step,
            faults=self.faults,
            banned=self.banned,
            holdings=self.holdings,
            broken=tuple(sorted(self.broken.values(), key=lambda b: b.number)),
            sighting=self.sighting,
            paused=self.stands,
            health=self.world.doubts.health(self),
            leave=self.leave,
        )
        self._leaving_round = self.leave is not None
        self.round_epoch = self.world.oracle.epoch
        self._round = self.agent.round(inputs)
        self._ask(None)

    def _ask(self, result: TxnResult | None) -> None:
        assert self._round is not None
        try:
            txn = next(self._round) if result is None else self._round.send(result)
        except StopIteration as stop:
            self._round = None
            self._follow(stop.value)
            return
        self._attempt += 1
        attempt = self._attempt

        def answered(answer: TxnResult) -> None:
            if self._round is not None and attempt == self._attempt:
                self._ask(answer)

        def timed_out() -> None:
            if self._round is not None and attempt == self._attempt:
                self._abandon()

        self.world.oracle.asks(self, txn)
        self.world.request(txn, self, lambda answer: self.later(0, lambda: answered(answer)))
        self.later(self.world.scenario.client_timeout_ms, timed_out)

    def _abandon(self) -> None:
        assert self._round is not None
        self._round.close()
        self._round = None
        if self._leave_since is not None and self.world.now_ms - self._leave_since > LEAVE_MS:
            self.exit()
            return
        self.wake(self.world.rng.randint(20, 500))

    # -- torch --------------------------------------------------------------------------------------------------------

    def _follow(self, outcome: Outcome) -> None:
        world = self.world
        self.outcome = outcome
        generation = outcome.plan.generation if outcome.plan is not None else 0
        shown = f"{outcome.standing} g{generation} slot {outcome.slot}: {outcome.waiting_for}"
        if shown != self._shown:
            self._shown = shown
            world.log(f"{self.name} {shown}")
        if outcome.end is not None and not self.end_epoch:
            self.end_epoch = self.round_epoch
        if self._leaving_round:
            self.left = True
            self.exit()
            return
        self._stop_if_told(outcome)
        if world.links.on:
            world.links.follow(self)
        if world.looks.on:
            world.looks.follow(self)
        if self.world.states.on:
            self._mind_the_vault(outcome)
            self.world.standing.follow(self)
        if outcome.end is not None:
            self._end(outcome)
            return
        running = self.workers is not None and self.workers.alive
        if not running and not self.waiting and outcome.stop_workers:
            self._come_back(outcome, generation)
        formed = outcome.formed
        if (
            self.waiting
            and not running
            and self.leave is None
            and formed is not None
            and outcome.slot is not None
            and formed.generation == generation > self.workers_generation
        ):
            self._start(generation, outcome.slot)
        self.wake(1 if self._poked else max(1, int(outcome.next_ms / self.host.rate)))

    # -- the vault ----------------------------------------------------------------------------------------------------

    def _mind_the_vault(self, outcome: Outcome) -> None:
        """As the edge: it follows plans, and is frozen and told of when that is asked for."""
        states, wanted = self.world.states, outcome.freeze
        if outcome.plan is not None and outcome.plan.action != "stop":
            states.follow(self, outcome.plan)
        asked = (self.round_epoch, wanted) if wanted is not None else None
        if asked is not None:
            self.world.oracle.asked(asked)
        told = self.holdings is not None and asked == (self._told_epoch, self.holdings.generation)
        if asked is None or told or self._freezing == asked:
            return
        self._freezing = asked
        delay_ms = max(states.delay_ms(), self.deaf_until_ms - self.world.now_ms)
        self.later(delay_ms, lambda: self._freeze(asked))

    def _freeze(self, asked: tuple[int, int]) -> None:
        epoch, generation = asked
        self._freezing = None
        if self.round_epoch != epoch:
            return
        slot = self.outcome.slot if self.outcome is not None else None
        vault = self.world.states.vault(self)
        vault.frozen = vault.frozen or (generation > 0 and (slot is None or self.workers_generation == generation))
        self._told_epoch = epoch
        self.holdings = self.world.states.holdings(self, generation, "")
        self.world.log(f"{self.name} holds in generation {generation}: {_shown_copies(self.holdings)}")
        self.wake(1)

    def vault_lost(self) -> None:
        """Its vault was killed; the agent starts another, which is empty."""
        self.holdings = self._freezing = None
        self.wake(1)

    def _prepare(self, workers: Workers, plan: Plan) -> None:
        """The chosen image is put in place, or the state is banned and a plan with another one asked for."""
        states, key = self.world.states, Key(plan.recovery_step, plan.recovery_origin)
        self.holdings = None
        states.assign(self, plan, workers.slot)
        workers.vault = states.vault(self)
        problem = states.prepare(self, plan, workers.slot)
        if not problem:
            self.restored = key
            return
        self.world.log(f"{self.name} {problem}")
        workers.state = "failed"
        self.banned = (*self.banned, Banned(step=key.step, origin=key.origin, reason=problem))
        me = self.agent.me
        cause = Cause(
            failure_class="unknown",
            node_id=self.node_id,
            incarnation=me.incarnation,
            host=self.host.name,
            detail=problem,
        )
        self._witness(workers.generation, "primary", cause)
        self.world.oracle.failed(workers.group)
        self.wake(self.world.rng.randint(1, 20))

    def _witness(self, generation: int, weight: Weight, cause: Cause) -> None:
        evidence = Evidence(
            generation=generation,
            reporter=self.node_id,
            incarnation=self.agent.me.incarnation,
            weight=weight,
            cause=cause,
            boot_id=self.host.boot_id,
            at_ms=self.clock_ms,
        )
        self.faults = (*self.faults, evidence)

    # -- its workers --------------------------------------------------------------------------------------------------

    def _stop_if_told(self, outcome: Outcome) -> None:
        workers = self.workers
        if not outcome.stop_workers or workers is None or not workers.alive or workers.state == "stopping":
            return
        self.world.oracle.stops(self, outcome)
        self.stop_workers()

    def stop_workers(self) -> None:
        workers, rng = self.workers, self.world.rng
        if workers is None or not workers.alive or workers.state == "stopping":
            return
        workers.state = "stopping"
        self.world.program.changed(workers.group)
        takes_ms = rng.randint(20, 1500)
        if not self.world.calm and rng.random() < self.world.scenario.slow_stops:
            takes_ms = rng.randint(5_000, 30_000)

        def stopped() -> None:
            if workers.state != "gone":
                workers.state = "gone"
                self.wake(1)

        self.later(takes_ms, stopped)

    def _come_back(self, outcome: Outcome, generation: int) -> None:
        """torch is back in ``next_rendezvous``; where the plan charges this node, one restart is spent."""
        self.waiting = True
        self._port += 1
        if outcome.charged and self._spent_for < generation:
            self._spent_for = generation
            self.restarts_left -= 1
            self.world.oracle.charged(self, generation)
        self.wake(self.world.rng.randint(1, 100))

    def _start(self, generation: int, slot: int) -> None:
        self.waiting = False
        self.workers_generation = generation
        self.workers = Workers(self.round_epoch, generation, slot)
        self.paused_word = self.stands = None
        self.world.oracle.starts(self, generation, slot)
        self.world.program.joined(self, self.workers)
        if self.world.looks.on:
            self.world.looks.watch(self, self.workers)
        if self.world.states.on:
            assert self.outcome is not None and self.outcome.plan is not None
            self._prepare(self.workers, self.outcome.plan)

    def _end(self, outcome: Outcome) -> None:
        end = outcome.end
        assert end is not None
        if self.workers is not None and self.workers.alive:
            return  # ``stopped`` wakes us
        self.exit_code, self.end_reason = end.exit_code, end.reason
        self.world.oracle.ends(self, end)
        if self.leave is None:
            self.leave = Leave(reason=end.reason, planned=end.run_over)
        self._leave_since = self.world.now_ms
        self.wake(1)

    def exit(self) -> None:
        """The process is gone, with what it started."""
        if self.exit_code is None:
            self.exit_code = 0
        self.world.log(f"{self.name} exits with {self.exit_code}: {self.end_reason}")
        self.world.links.died(self, goodbye=True)
        self.die()

    # -- what is done to it -------------------------------------------------------------------------------------------

    def die(self) -> None:
        self.alive = False
        self.host.pids.discard(self.pid)
        if self._round is not None:
            self._round.close()
            self._round = None
        self._kill_workers()

    def _kill_workers(self) -> None:
        if self.workers is not None and self.workers.alive:
            self.workers.state = "gone"
            self.world.program.changed(self.workers.group)

    def kill(self) -> None:
        self.world.log(f"FAULT {self.name} killed")
        self.exit_code = -9
        self.die()
        self.world.links.died(self, goodbye=False)

    def pause(self, duration_ms: int) -> None:
        self.world.log(f"FAULT {self.name} stopped for {duration_ms} ms")
        self.paused, self.paused_ms = True, self.world.now_ms
        self.world.after(duration_ms, self.resume)
        workers = self.workers

        def guardian() -> None:
            if self.alive and self.paused and workers is self.workers and workers is not None and workers.alive:
                self.world.log(f"{self.name} its workers are killed by the guardian")
                self._kill_workers()
                self._deferred.append(lambda: self.worker_failed(workers, exit_status=-9))

        self.world.after(self.world.scenario.timeout_ms, guardian)

    def resume(self) -> None:
        if self.alive and self.paused:
            self.world.log(f"{self.name} continues")
            self.paused = False
            deferred, self._deferred = self._deferred, []
            for action in deferred:
                self.later(0, action)

    def sigterm(self) -> None:
        """torch stops the workers; the control thread says goodbye."""
        if self.leave is None:
            self.world.log(f"FAULT {self.name} gets SIGTERM")
            self.leave = Leave(reason="SIGTERM received", planned=True)
            self.end_reason = "SIGTERM"
            self._leave_since = self.world.now_ms
            self.stop_workers()
            self.wake(1)

    # -- what becomes of the workers ----------------------------------------------------------------------------------

    def worker_failed(
        self, workers: Workers, *, exit_status: int = 1, exception: tuple[str, str] | None = None
    ) -> None:
        """The witness is this agent. A reported exception holds the worker's process for the plan."""
        if workers is not self.workers or workers.state in ("stopping", "done"):
            return
        if exception is not None:
            finding = classify_exception(type_name=exception[0], message=exception[1])
            workers.state = "failed"
        else:
            finding = classify_exit(exit_status)
            workers.state = "dead"
        cause = Cause(
            failure_class=finding.failure_class,
            node_id=self.node_id,
            incarnation=self.agent.me.incarnation,
            host=self.host.name,
            detail=finding.detail,
            rank=workers.slot,
            local_rank=0,
            exit_status=exit_status,
            exception=ExceptionInfo(type_name=exception[0], message=exception[1]) if exception is not None else None,
            step=self.world.program.step,
        )
        self._witness(workers.generation, finding.weight, cause)
        self.world.oracle.failed(workers.group)
        self.world.log(f"{self.name} worker failed: {finding.weight} {finding.detail}")
        self.world.program.changed(workers.group)
        self.wake(self.world.rng.randint(1, 20))

    def workers_succeeded(self, workers: Workers) -> None:
        if workers is self.workers and workers.state == "running":
            workers.state = "done"
            self.succeeded = workers.generation
            self.world.oracle.succeeded(self, workers)
            self.wake(self.world.rng.randint(1, 20))


def _shown_copies(holdings: Holdings) -> str:
    return " ".join(f"{c.rank}@{c.step}/{c.origin}{'f' * (c.place == 'durable')}" for c in holdings.copies) or "nothing"
