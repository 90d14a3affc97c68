"""A run told record by record, with the decision that follows: for transcripts and tests of ``decide``.

Each call writes records into a view, as the store would give them, and a line into the transcript.
"""

from __future__ import annotations

import hashlib
from typing import Any

from lmres.gemini.inventory import Copy, Holdings, Part, topology_text
from lmres.ids import Keys
from lmres.policy import Recovery
from lmres.ports import Entry
from lmres.rendezvous.codec import encode
from lmres.rendezvous.decide import Commit, Decision, Finish, Observed, Wait, decide
from lmres.rendezvous.plan import Cause, ExceptionInfo, Plan
from lmres.rendezvous.resume import Checkpointing
from lmres.rendezvous.state import (
    Banned,
    Done,
    Evidence,
    Finished,
    Formed,
    Gone,
    Health,
    Hold,
    Member,
    Paused,
    Ready,
    RunConfig,
    StopRequest,
    View,
)
from lmres.scout.evidence import classify_exception, classify_exit
from lmres.scout.sighting import GroupSight, OpMark, Sighting, WorkerSight


class Story:
    """``checkpointing``: states are kept; each rank's image is told by ``holds``."""

    def __init__(self, *, min_nodes: int = 2, max_nodes: int = 4, checkpointing: bool = False, **recovery: Any) -> None:
        self.keys = Keys(run="story")
        self.view = View(keys=self.keys)
        self.policy = Recovery(**recovery)
        self.checkpointing = Checkpointing(enabled=checkpointing)
        self.watched = False
        self._nodes = min_nodes
        self.lines: list[str] = []
        self.revision = 0
        self._incarnations: dict[str, int] = {}
        config = RunConfig(
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            local_world_size=1,
            role="default",
            heartbeat_interval_ms=500,
            heartbeat_timeout_ms=5000,
            policy=None,
            written_by="a",
            version="1",
        )
        self.put(self.keys.config, config)
        rules = "".join(f", {name} {value}" for name, value in sorted(recovery.items()))
        kept = ", states are kept in memory" if checkpointing else ""
        self.lines.append(f"run of {min_nodes} to {max_nodes} nodes{rules}{kept}")

    # -- records ------------------------------------------------------------------------------------------------------

    def put(self, key: str, record: object) -> None:
        self.text(key, encode(record))

    def text(self, key: str, value: str) -> None:
        self.revision += 1
        before = self.view.stored.get(key)
        created = before.created if before is not None else self.revision
        entry = Entry(key=key, value=value, create_revision=created, mod_revision=self.revision)
        self.view.apply((entry,), self.revision)

    def incarnation(self, node: str) -> str:
        return f"{node}.{self._incarnations[node]}"

    def head(self) -> Plan:
        head = self.view.head()
        assert head is not None
        return head

    def joins(self, *nodes: str, domain: str | None = None) -> Story:
        for node in nodes:
            self._incarnations[node] = self._incarnations.get(node, 0) + 1
            member = Member(
                node_id=node,
                incarnation=self.incarnation(node),
                address=f"10.0.0.{ord(node[0])}",
                host=f"host-{node}",
                boot_id=f"boot-{node}",
                pid=100,
                pid_start=1,
                failure_domain=domain or node,
            )
            self.put(self.keys.member(node), member)
        self.lines.append(f"joins: {' '.join(self.incarnation(n) for n in nodes)}")
        return self

    def goes(self, node: str, *, how: Any = "lost", planned: bool = False, reason: str | None = None) -> Story:
        reason = reason or {"lost": "no heartbeat for 5.0 s", "left": "SIGTERM received"}[how]
        gone = Gone(
            node_id=node, incarnation=self.incarnation(node), how=how, reason=reason, by="somebody", planned=planned
        )
        self.put(self.keys.gone(node), gone)
        self.lines.append(f"gone: {gone.incarnation} {how}{' as planned' if planned else ''} ({reason})")
        return self

    def forms(self, *, restarts_left: dict[str, int] | None = None) -> Story:
        """All nodes of the newest plan are ready and the group has formed."""
        plan, left = self.head(), restarts_left or {}
        for node in plan.active:
            ready = Ready(
                generation=plan.generation,
                node_id=node.node_id,
                incarnation=node.incarnation,
                address="10.0.0.1",
                master_port=29500,
                restarts_left=left.get(node.node_id, 3),
            )
            self.put(self.keys.ready(plan.generation, node.node_id), ready)
        formed = Formed(generation=plan.generation, master_address="10.0.0.1", master_port=29500)
        self.put(self.keys.formed(plan.generation), formed)
        budget = "".join(f", {n} has {k} restarts left" for n, k in sorted(left.items()))
        self.lines.append(f"generation {plan.generation} forms{budget}")
        return self

    def exits(self, node: str, status: int, *, step: int | None = None, at_ms: int = 0, boot: str = "") -> Story:
        finding = classify_exit(status)
        return self._fails(node, finding, step=step, at_ms=at_ms, boot=boot, status=status, exception=None)

    def raises(
        self, node: str, type_name: str, message: str, *, step: int | None = None, at_ms: int = 0, boot: str = ""
    ) -> Story:
        finding = classify_exception(type_name=type_name, message=message)
        exception = ExceptionInfo(type_name=type_name, message=message)
        return self._fails(node, finding, step=step, at_ms=at_ms, boot=boot, status=1, exception=exception)

    def _fails(self, node: str, finding: Any, **what: Any) -> Story:
        plan = self.head()
        slot = next(n.slot for n in plan.active if n.node_id == node)
        cause = Cause(
            failure_class=finding.failure_class,
            node_id=node,
            incarnation=self.incarnation(node),
            host=f"host-{node}",
            detail=finding.detail,
            rank=slot,
            local_rank=0,
            exit_status=what["status"],
            exception=what["exception"],
            step=what["step"],
        )
        self.sees(node, cause, weight=finding.weight, at_ms=what["at_ms"], boot=what["boot"])
        self.lines.append(f"evidence: {finding.weight}, {cause.headline()}")
        return self

    def sees(self, node: str, cause: Cause, *, weight: Any, at_ms: int = 0, boot: str = "", **more: Any) -> Story:
        generation = self.head().generation
        prefix = f"{self.keys.reg}evidence/{generation:08d}/{node}/"
        number = sum(key.startswith(prefix) for key in self.view.stored)
        evidence = Evidence(
            generation=generation,
            reporter=node,
            incarnation=self.incarnation(node),
            weight=weight,
            cause=cause,
            boot_id=boot or f"boot-{node}",
            at_ms=at_ms,
            **more,
        )
        self.put(self.keys.evidence(generation, node, number), evidence)
        return self

    def holds(
        self,
        node: str,
        *images: str,
        files: str = "",
        ever: bool | None = None,
        problem: str = "",
        spoilt: str = "",
        nodes: int = 0,
        ddp: bool = False,
        incarnation: str = "",
        generation: int | None = None,
    ) -> Story:
        """The node tells what its vault holds: images as RANK@STEP/ORIGIN, with +PART where not all parts are there.

        ``files``: such images on disk. ``spoilt``: one that is not finite. ``nodes``: of a group of so many. ``ddp``:
        the shared part is the same for all ranks.
        """
        topology = topology_text(nodes=nodes or self._nodes, local_world_size=1)
        places = [(i, "memory") for i in images] + [(i, "durable") for i in files.split()]
        copies = tuple(_copy(i, place, topology, ddp=ddp, finite=i != spoilt) for i, place in places)
        head = self.view.head()
        held = Holdings(
            node_id=node,
            incarnation=incarnation or self.incarnation(node),
            generation=generation if generation is not None else (head.generation if head is not None else 0),
            address=f"10.0.0.{ord(node[0])}",
            port=4000,
            copies=copies,
            ever=bool(copies) if ever is None else ever,
            problem=problem,
        )
        self.put(self.keys.holdings(node), held)
        what = [*images, *(f"{i} in files" for i in files.split())]
        what += [f"{spoilt} is not finite"] if spoilt else []
        what += [f"of {topology}"] if nodes else []
        what += [f"problem: {problem}"] if problem else []
        what += ["had state once"] if held.ever and not copies else []
        self.lines.append(f"holds: {held.incarnation} in generation {held.generation}: {', '.join(what) or 'nothing'}")
        return self

    def looks(
        self,
        node: str,
        *,
        alarm: bool = False,
        entered: int = 10,
        op: str = "allreduce",
        shape: str = "float32[8]",
        phase: Any = "backward",
        state: str = "S",
        quiet_ms: int = 4000,
        step: int = 7,
    ) -> Story:
        """The node tells what its worker is doing: it has entered so many operations, the last is ``op``."""
        head = self.head()
        slot = next(n.slot for n in head.active if n.node_id == node)
        said = self.view.sightings(head.generation).get(node)
        recent = tuple(
            OpMark(number=i, op="allreduce", shape="float32[8]", step=step - (i < 10))
            for i in range(max(1, entered - 2), entered)
        )
        last = OpMark(number=entered, op=op, shape=shape, step=step - (entered < 10))
        ranks = tuple(n.slot for n in head.active)
        group = GroupSight(name="0", ranks=ranks, entered=entered, left=entered - 1, recent=(*recent, last))
        worker = WorkerSight(
            rank=slot,
            local_rank=0,
            pid=100 + slot,
            step=step,
            phase=phase,
            phase_ms=quiet_ms,
            quiet_ms=quiet_ms,
            state=state,
            groups=(group,),
            timeout_ms=3000,
        )
        sighting = Sighting(
            generation=head.generation,
            node_id=node,
            incarnation=self.incarnation(node),
            number=1 + (said.number if said is not None else 0),
            alarm=alarm,
            timeout_ms=3000,
            workers=(worker,),
        )
        self.put(self.keys.sighting(head.generation, node), sighting)
        kind = "alarm" if alarm else "withdrawn" if said is not None and said.alarm else "look"
        self.lines.append(
            f"{kind}: {node}: rank {slot} in {phase} for {quiet_ms} ms, state {state}, {op} number {entered} {shape}"
        )
        return self

    def health(self, node: str, reason: str = "") -> Story:
        """Unfit for this reason, or fit again."""
        record = Health(node_id=node, incarnation=self.incarnation(node), fit=not reason, reason=reason)
        self.put(self.keys.health(node), record)
        self.lines.append(f"health: {node} is {f'unfit: {reason}' if reason else 'fit'}")
        return self

    def stands(self, node: str, step: int | None = None, *, reach: int = 0, problem: str = "") -> Story:
        """Its workers stand still at this step, or come no further than ``reach`` without standing still."""
        generation = self.head().generation
        record = Paused(
            generation=generation,
            node_id=node,
            incarnation=self.incarnation(node),
            reach=reach or step or 0,
            step=step,
            problem=problem,
        )
        self.put(self.keys.paused(generation, node), record)
        where = f"stand still at step {step}" if step else problem or f"come no further than step {record.reach}"
        self.lines.append(f"workers of {node}: {where}")
        return self

    def finds(self, node: str, failure_class: str, suspect: str | None, detail: str, **more: Any) -> Story:
        """Evidence of a detector: ``more`` as in ``Evidence``."""
        head = self.head()
        slot = next((n.slot for n in head.active if n.node_id == suspect), None)
        cause = Cause(
            failure_class=failure_class,
            node_id=suspect or "",
            incarnation=self.incarnation(suspect) if suspect else "",
            host=f"host-{suspect}" if suspect else "",
            detail=detail,
            rank=slot,
            local_rank=0 if suspect else None,
            step=9,
        )
        self.sees(node, cause, weight="primary", **more)
        shown = "".join(f", {name} {value}" for name, value in sorted(more.items()))
        self.lines.append(f"found by {node}: {failure_class}, {cause.headline()}{shown}")
        return self

    def bans(self, step: int, origin: int) -> Story:
        record = Banned(step=step, origin=origin, reason="not finite soon after it was restored")
        self.put(self.keys.banned(step, origin), record)
        self.lines.append(f"banned: step {step} of origin {origin} ({record.reason})")
        return self

    def succeeds(self, *nodes: str) -> Story:
        generation = self.head().generation
        for node in nodes:
            done = Done(generation=generation, node_id=node, incarnation=self.incarnation(node))
            self.put(self.keys.done(generation, node), done)
        self.lines.append(f"workers ended well: {' '.join(nodes)}")
        return self

    def operator(self, kind: Any, node: str) -> Story:
        head = self.view.head()
        generation = head.generation if head is not None else 0
        self.put(self.keys.hold(node), Hold(node_id=node, kind=kind, generation=generation, reason="maintenance"))
        self.lines.append(f"operator: {kind} {node} (seen generation {generation})")
        return self

    def operator_stops(self) -> Story:
        self.put(self.keys.stop, StopRequest(reason="enough"))
        self.lines.append("operator: stop")
        return self

    def garbage(self, key: str, value: str) -> Story:
        self.text(key, value)
        self.lines.append(f"garbage in {key.removeprefix(self.keys.base)}: {value!r}")
        return self

    def ends(self, outcome: Any) -> Story:
        self.put(self.keys.finished, Finished(outcome=outcome, exit_code=0, reason="told", generation=1))
        self.lines.append(f"finished: {outcome}")
        return self

    # -- decisions ----------------------------------------------------------------------------------------------------

    def decides(self, **observed: Any) -> Decision:
        """The decision, told; a plan is not yet written."""
        decision = decide(self.view, self.policy, Observed(**observed), self.checkpointing, watched=self.watched)
        if observed:
            self.lines.append("seen: " + ", ".join(f"{k} {_plain(v)}" for k, v in sorted(observed.items())))
        self.lines += _told(decision)
        return decision

    def commits(self, **observed: Any) -> Plan:
        """The decision must be a plan; it is written."""
        decision = self.decides(**observed)
        assert isinstance(decision, Commit), decision
        self.put(self.keys.plan(decision.plan.generation), decision.plan)
        return decision.plan

    def waits(self, **observed: Any) -> Wait:
        decision = self.decides(**observed)
        assert isinstance(decision, Wait), decision
        return decision

    def transcript(self) -> str:
        return "\n".join(self.lines) + "\n"


def started(*, nodes: str = "ab", standbys: str = "", **settings: Any) -> Story:
    """A run whose first generation has formed."""
    story = Story(min_nodes=len(nodes), max_nodes=len(nodes) + len(standbys) + 2, **settings)
    story.joins(*nodes, *standbys)
    if story.checkpointing.enabled:
        for node in (*nodes, *standbys):
            story.holds(node)
    story.commits()
    story.forms()
    return story


def _copy(text: str, place: Any, topology: str, *, ddp: bool, finite: bool) -> Copy:
    """``RANK@STEP/ORIGIN``, then ``+part`` for each part that is there, if not all are."""
    name, _, only = text.partition("+")
    rank, _, key = name.partition("@")
    step, _, origin = key.partition("/")
    parts = {p: f"{p} {key}{'' if ddp and p == 'shared' else f' {rank}'}" for p in ("shared", "own", "log")}
    return Copy(
        rank=int(rank),
        step=int(step),
        origin=int(origin),
        has=tuple(only.split("+")) if only else ("shared", "own", "log"),
        place=place,
        finite=finite,
        trust="unverified",
        topology=topology,
        **{p: Part(digest=hashlib.md5(t.encode()).hexdigest(), length=100) for p, t in parts.items()},
    )


def _plain(value: Any) -> str:
    return " ".join(sorted(value)) if isinstance(value, frozenset) else str(value)


def _told(decision: Decision) -> list[str]:
    match decision:
        case Wait():
            return [f"=> wait{' for a standby' if decision.for_standby else ''}: {decision.reason}"]
        case Finish():
            record = decision.record
            return [f"=> finish: {record.outcome} with {record.exit_code}: {record.reason}"]
        case Commit():
            return _plan_told(decision)


def _plan_told(decision: Commit) -> list[str]:
    plan = decision.plan
    slots = " ".join(f"{n.slot}={n.incarnation}" for n in plan.active)
    lines = [f"=> {plan.action} generation {plan.generation} (settle {decision.settle}): {slots}"]
    details = {
        "class": plan.failure_class,
        "verdict": plan.verdict if plan.verdict != "attributed" else "",
        "standby": " ".join(plan.standby),
        "quarantined": " ".join(f"{q.node_id}@{q.generation}" for q in plan.quarantined),
        "charged": " ".join(plan.charged),
        "dismissed": " ".join(plan.dismissed),
        "strikes": " ".join(s.node_id for s in plan.strikes),
        "streak": f"{plan.streak.count} x {plan.streak.signature}" if plan.streak.count else "",
        "resumes": _resumes(plan) if plan.recovery_step else "",
        "exit code": str(plan.exit_code) if plan.exit_code is not None else "",
    }
    lines += [f"   {name}: {value}" for name, value in details.items() if value]
    return [*lines, f"   reason: {plan.reason}"]


def _resumes(plan: Plan) -> str:
    sources = " ".join(f"{slot}={source}" for slot, source in sorted(plan.recovery_source.items()))
    return f"step {plan.recovery_step}/{plan.recovery_origin} from {sources}, {plan.trust}, captures as {plan.origin}"
