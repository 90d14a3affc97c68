"""What goes into an agent's round and what comes out of it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from lmres.gemini.inventory import Holdings
from lmres.ids import Keys
from lmres.policy import Recovery
from lmres.ports import Txn, TxnResult
from lmres.rendezvous.plan import Cause, Plan
from lmres.rendezvous.resume import Checkpointing
from lmres.rendezvous.state import Banned, Evidence, Formed, Health, Keeping, Member, Paused, Recovered, RunConfig
from lmres.scout.sighting import Pace, Sighting

Requests: TypeAlias = Generator[Txn, TxnResult, None]
Asked: TypeAlias = Generator[Txn, TxnResult, bool]
Standing = Literal["joining", "standby", "quarantined", "active", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What does not change during an agent's life. ``me.incarnation`` is the first one.

    ``watched``: agents can tell what their workers are doing.
    """

    keys: Keys
    me: Member
    config: RunConfig
    recovery: Recovery
    join_timeout_ms: int
    form_timeout_ms: int
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    watched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """This agent is going. ``planned``: it was told to."""

    reason: str
    planned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Connections to this incarnation broke, as if it had died, and are not there again. ``number``: counts breaks."""

    node_id: str
    incarnation: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """This moment on this host.

    ``waiting``: torch's agent is inside ``next_rendezvous``. ``workers_generation``: the generation whose workers were
    last started here, 0 for none; ``workers_alive``: any process of theirs is left. ``succeeded``: the generation all
    of whose local workers ended with 0. ``faults``: all evidence collected here so far, in order. ``holdings``: what
    the vault holds, frozen in the generation that ``Outcome.freeze`` asked for; forgotten when workers of that
    generation are started. ``banned``: all states found bad here so far. ``broken``: the members to which
    connections are broken now. ``sighting``: the newest one of the workers here, None if there was no cause to look.
    ``health``: what the host's checks say, None while they have not. ``paces``: of the local ranks. ``paused``: where
    the workers here stand still, as asked; None if they were not.
    """

    now_ms: int
    waiting: bool
    workers_generation: int = 0
    workers_alive: bool = False
    succeeded: int = 0
    restarts_left: int | None = None
    master_port: int = 0
    step: int | None = None
    faults: tuple[Evidence, ...] = ()
    recovered: tuple[Recovered, ...] = ()
    holdings: Holdings | None = None
    banned: tuple[Banned, ...] = ()
    keeping: Keeping | None = None
    broken: tuple[Broken, ...] = ()
    sighting: Sighting | None = None
    health: Health | None = None
    paces: tuple[Pace, ...] = ()
    paused: Paused | None = None
    leave: Leave | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How this agent ends. ``cause`` is the first cause of a failed run."""

    exit_code: int
    reason: str
    cause: Cause | None = None
    run_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something worth telling: an event's name and its fields."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What this agent must do now. ``next_ms``: run the next round no later than this.

    ``stop_workers`` speaks of the workers that the round knew, those of ``workers_generation``; newer ones, started
    while the round was on its way, are not meant. ``alert``: ``waiting_for`` is something a person should know.
    ``freeze``: a plan is coming, so what the vault holds in this generation must be told: it is frozen, if workers of
    the generation were started here, for as long as the generation lasts. ``look``: somebody has raised an alarm in
    this generation, so what the workers here are doing must be told. ``pause``: the step at whose boundary the workers
    here must stand still, 1 for the next one; None: they go on.
    """

    standing: Standing
    waiting_for: str
    next_ms: int
    plan: Plan | None = None
    formed: Formed | None = None
    slot: int | None = None
    stop_workers: bool = False
    workers_generation: int = 0
    charged: bool = False
    alert: bool = False
    freeze: int | None = None
    look: int | None = None
    pause: int | None = None
    end: End | None = None
    notes: tuple[Note, ...] = ()
