"""This node's vault, as the agent uses it: started or adopted, frozen, told what to restore and what to keep.

One thread does what the plans ask, in order, since each of it may wait for the vault; the control thread only asks.
A vault that has died is replaced at the next freeze; until then training goes on without. To the vault a generation is
the plan's ``origin``: it bears the images captured in it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lmres.adapters.resume.settings import Settings
from lmres.errors import LmresError, VaultError
from lmres.gemini.edge.vault import SOCKET_NAME, Vault
from lmres.gemini.inventory import Holdings, topology_text
from lmres.gemini.placement import Host, placement
from lmres.gemini.restore import copies_of
from lmres.gemini.session import Assignment, Peer, Prepare
from lmres.policy import Detection, Policy
from lmres.rendezvous.plan import Plan
from lmres.rendezvous.state import Keeping, Member, View

log = logging.getLogger("lmres")

LINGER_S = 30.0
TOKEN_NAME = "vault.token"
STATUS_EVERY_S = 2.0
THAW_S = 2.0
CLOSE_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a plan means for the vaults: ``holdings`` and ``domains`` of all live nodes, by node id.

    ``standbys``: those that are there now, whether or not they were when the plan was made.
    """

    plan: Plan
    slot: int | None
    holdings: Mapping[str, Holdings]
    domains: Mapping[str, str]
    standbys: tuple[str, ...] = ()


def assignment(scene: Scene, node_id: str, *, local_world_size: int, replicas: int) -> Assignment:
    """What this node's vault keeps in the plan's generation. Pure."""
    plan = scene.plan
    size = len(plan.active)
    active = [Host(node_id=n.node_id, domain=scene.domains.get(n.node_id, n.node_id)) for n in plan.active]
    spare = [Host(node_id=n, domain=scene.domains.get(n, n)) for n in scene.standbys if _peer(scene.holdings.get(n))]
    partners = placement(active, replicas, spare).get(node_id, ())
    hub = plan.active[0].node_id
    return Assignment(
        generation=plan.origin,
        ranks=_ranks(scene.slot, local_world_size),
        world_size=size * local_world_size,
        topology=topology_text(nodes=size, local_world_size=local_world_size),
        safe=(plan.recovery_step, plan.recovery_origin) if plan.recovery_step else None,
        peers=tuple(p for n in partners if (p := _peer(scene.holdings.get(n))) is not None),
        hub=None if hub == node_id else _peer(scene.holdings.get(hub)),
        members=tuple(n.node_id for n in plan.active),
    )


def preparation(scene: Scene, *, local_world_size: int) -> Prepare | None:
    """What has to be made ready here before the plan's workers go on; None at step 0 or on a standby. Pure."""
    plan = scene.plan
    if not plan.recovery_step or scene.slot is None:
        return None
    ranks = _ranks(scene.slot, local_world_size)
    key = (plan.recovery_step, plan.recovery_origin)
    return Prepare(
        generation=plan.origin,
        step=plan.recovery_step,
        origin=plan.recovery_origin,
        ranks=ranks,
        sources=tuple(p for n in sorted(scene.holdings) if (p := _peer(scene.holdings[n])) is not None),
        manifests=copies_of(scene.holdings.values(), key, ranks),
    )


def _ranks(slot: int | None, local_world_size: int) -> tuple[int, ...]:
    return () if slot is None else tuple(range(slot * local_world_size, (slot + 1) * local_world_size))


def _peer(holdings: Holdings | None) -> Peer | None:
    if holdings is None or not holdings.port:
        return None
    return Peer(node_id=holdings.node_id, address=holdings.address, port=holdings.port)


class Safekeeping:
    """``holdings`` is what was told last, for the store; it changes in this object's thread."""

    def __init__(
        self,
        *,
        policy: Policy,
        run_id: str,
        me: Callable[[], Member],
        local_world_size: int,
        state_dir: Path,
        on_event: Callable[[str, Mapping[str, Any]], None],
        poke: Callable[[], None],
    ) -> None:
        self._policy = policy
        self._run_id = run_id
        self._me = me
        self._local_world_size = local_world_size
        self._state_dir = state_dir
        self._on_event = on_event
        self._poke = poke
        self._vault: Vault | None = None
        self._told: Holdings | None = None
        self._ever = False  # outlives the vault
        self._problem = ""
        self.keeping: Keeping | None = None
        """For people, no older than a few seconds."""
        self._token = ""
        self._frozen = -1
        self._unasked_s: float | None = None
        self._followed = self._begun = 0
        self._holders: tuple[Peer, ...] = ()
        self._prepared: tuple[int, Vault | None] = (0, None)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lmres-vault-orders", daemon=True)

    # -- asked by the node --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()
        self._orders.put(self._wake)

    def confirm(self, token: str) -> None:
        """The run's records have this token. A vault that was found here and holds the memory of other records, in
        which the same origins meant other images, is replaced."""
        if self._token != token:
            self._token = token
            self._orders.put(lambda: self._confirm(token))
            self.freeze(0)

    @property
    def holdings(self) -> Holdings | None:
        told = self._told
        return None if told is None else replace(told, incarnation=self._me().incarnation)

    def freeze(self, generation: int) -> None:
        """Let nothing change any more, and tell what is held. Asked again in the same generation it does nothing."""
        self._unasked_s = None
        if generation != self._frozen:
            self._frozen = generation
            self._orders.put(lambda: self._freeze(generation))

    def follow(self, scene: Scene) -> None:
        """A plan is committed: its state is made ready while the old workers are stopped. A standby keeps copies."""
        if scene.plan.generation > self._followed and scene.plan.action != "stop":
            self._followed = scene.plan.generation
            self._orders.put(lambda: self._prepare(scene))
            if scene.slot is None:
                self._orders.put(lambda: self._assign(scene))

    def begin(self, scene: Scene) -> None:
        """The workers of a plan are about to start: what they capture is kept."""
        self.follow(scene)
        self._frozen, self._told = -1, None
        self._begun, self._holders = scene.plan.generation, _standby_peers(scene)
        self._orders.put(lambda: self._assign(scene))

    def mind(self, scene: Scene) -> None:
        """Standbys come and go while workers run: who is to hold copies is assigned anew. Not once the vault is frozen:
        what was told must not change."""
        if scene.slot is None or scene.plan.generation != self._begun or self._frozen >= 0:
            return
        holders = _standby_peers(scene)
        if holders != self._holders:
            self._holders = holders
            self._orders.put(lambda: self._assign_anew(scene))

    def thaw(self, scene: Scene) -> None:
        """No plan is coming after all: who has been frozen in the generation that goes on keeps states again. Asked
        after each round, and done when it has been so for a while."""
        generation = scene.plan.generation
        goes_on = generation == (self._followed if scene.slot is None else self._begun)
        if self._frozen != generation or not goes_on:
            self._unasked_s = None
            return
        now_s = time.monotonic()
        if self._unasked_s is None:
            self._unasked_s = now_s
        elif now_s - self._unasked_s >= THAW_S:
            log.info("no plan came after all: states are kept again in generation %d", generation)
            self._frozen, self._told, self._unasked_s = -1, None, None
            self._holders = _standby_peers(scene)
            self._orders.put(lambda: self._assign_anew(scene))

    def settings(self, plan: Plan) -> Settings:
        """For the workers of a generation."""
        checkpoint = self._policy.checkpoint
        interval = checkpoint.interval_steps
        return Settings(
            vault=str(self._state_dir / SOCKET_NAME),
            run_id=self._run_id,
            generation=plan.origin,
            resume=self._policy.workers.resume,
            resume_step=plan.recovery_step,
            interval_steps=interval if isinstance(interval, int) else 0,
            overhead_budget=checkpoint.overhead_budget,
            topology=topology_text(nodes=len(plan.active), local_world_size=self._local_world_size),
            replay_every=replays(self._policy.detection),
        )

    def close(self) -> None:
        """Ends the vault with all it holds."""
        self._orders.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        if self._vault is not None:
            self._vault.end()
            with contextlib.suppress(OSError):  # a vault that was killed has left it
                (self._state_dir / SOCKET_NAME).unlink()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            order: Callable[[], None] | None = self._look
            with contextlib.suppress(queue.Empty):
                order = self._orders.get(timeout=STATUS_EVERY_S)
            if order is None:
                return
            try:
                order()
            except LmresError as error:
                self._tell_problem(str(error))
            except Exception as error:
                log.exception("the vault's orders: one has failed")
                self._tell_problem(repr(error))

    def _living(self) -> Vault:
        """Raises VaultError when no vault can be had."""
        if self._vault is None or not self._vault.alive:
            checkpoint = self._policy.checkpoint
            directory = checkpoint.durable.directory
            self._vault = Vault.start(
                state_dir=self._state_dir,
                run_id=self._run_id,
                node_id=self._me().node_id,
                address=self._me().address,
                on_event=self._hear,
                memory_limit_fraction=checkpoint.memory_limit_fraction,
                linger_s=LINGER_S,
                durable_directory=directory,
                durable_every=checkpoint.durable.interval_steps if directory is not None else None,
                durable_keep=checkpoint.durable.keep,
                compare=_compare(self._policy.detection),
                anchors=replays(self._policy.detection) > 0,
            )
        return self._vault

    def _hear(self, kind: str, fields: Mapping[str, Any]) -> None:
        """From the vault, in its thread."""
        self._ever = self._ever or kind in ("safe", "restored")
        self._on_event(kind, fields)

    def _wake(self) -> None:
        self._living()

    def _confirm(self, token: str) -> None:
        note = self._state_dir / TOKEN_NAME
        vault = self._living()
        known = note.read_text() if note.exists() else ""
        if vault.adopted and known != token:
            vault.end()
            self._vault = None
            self._living()
        note.write_text(token)

    def _freeze(self, generation: int) -> None:
        me = self._me()
        told = Holdings(node_id=me.node_id, incarnation=me.incarnation, generation=generation, ever=self._ever)
        try:
            vault = self._living()
            copies = vault.freeze(generation)
            self._ever = self._ever or vault.ever
            told = replace(
                told, address=vault.address, port=vault.port, copies=copies, problem=vault.problem, ever=self._ever
            )
        except LmresError as error:
            self._tell_problem(str(error))
            told = replace(told, problem=str(error))
        self._told = told
        self._poke()

    def _prepare(self, scene: Scene) -> None:
        order = preparation(scene, local_world_size=self._local_world_size)
        if order is not None:
            vault = self._living()
            vault.prepare(order)
            self._prepared = (scene.plan.generation, vault)

    def _assign(self, scene: Scene) -> None:
        try:
            self._assign_to(self._living(), scene)
        except VaultError:
            if self._vault is not None and self._vault.alive:
                raise
            self._assign_to(self._living(), scene)  # killed just now

    def _assign_to(self, vault: Vault, scene: Scene) -> None:
        if self._prepared != (scene.plan.generation, vault):  # another one by now, or it could not be told
            self._prepare(scene)
        if scene.slot is None and self._told is None:
            self._told = self._where(vault)
            self._poke()
        vault.assign(
            assignment(
                scene,
                self._me().node_id,
                local_world_size=self._local_world_size,
                replicas=self._policy.checkpoint.replicas,
            )
        )

    def _assign_anew(self, scene: Scene) -> None:
        if self._vault is not None and self._vault.alive:
            self._assign(scene)

    def _where(self, vault: Vault) -> Holdings:
        """Nothing but where copies can be kept."""
        me = self._me()
        return Holdings(
            node_id=me.node_id,
            incarnation=me.incarnation,
            generation=0,
            address=vault.address,
            port=vault.port,
            ever=self._ever,
        )

    def _look(self) -> None:
        vault = self._vault
        if vault is None or not vault.alive:
            self.keeping = None
            return
        status = vault.status()
        copies, durable, safe = status["copies"], status["durable"], status["safe"]
        newest, verified = durable.get("newest"), status.get("verified")
        self.keeping = Keeping(
            memory_bytes=status["memory_bytes"],
            memory_limit_bytes=status["memory_limit_bytes"],
            safe_step=None if safe is None else safe[0],
            copies=copies["held"],
            copies_wanted=copies["wanted"],
            durable_step=None if newest is None else newest[0],
            verified_step=None if verified is None else verified[0],
            problem=str(
                durable.get("problem") or "; ".join(p["problem"] for p in copies["peers"].values() if p["problem"])
            ),
        )

    def _tell_problem(self, reason: str) -> None:
        if reason != self._problem:
            self._problem = reason
            self._on_event("problem", {"reason": reason})


def scene_of(plan: Plan, slot: int | None, view: View) -> Scene:
    """The holdings of a node count while the incarnation that told them lives."""
    members, found = view.live_members(), view.holdings()
    told = {m.node_id: found[m.node_id][1] for m in members if m.node_id in found}
    holdings = {m.node_id: told[m.node_id] for m in members if _told_by(told.get(m.node_id), m)}
    return Scene(
        plan=plan,
        slot=slot,
        holdings=holdings,
        domains={m.node_id: m.failure_domain for m in members},
        standbys=tuple(m.node_id for m in view.standbys()),
    )


def _compare(detection: Detection) -> Literal["off", "report", "hold"]:
    """A state that differs between equals is held back where something is done about it; else it is only told."""
    if not detection.enabled:
        return "off"
    return "hold" if detection.corruption.action == "replace" else "report"


def replays(detection: Detection) -> int:
    """Steps between two replays; 0: none."""
    corruption = detection.corruption
    return corruption.interval_steps if detection.enabled and corruption.replay else 0


def _standby_peers(scene: Scene) -> tuple[Peer, ...]:
    return tuple(p for n in sorted(scene.standbys) if (p := _peer(scene.holdings.get(n))) is not None)


def _told_by(holdings: Holdings | None, member: Member) -> bool:
    return holdings is not None and holdings.incarnation == member.incarnation
