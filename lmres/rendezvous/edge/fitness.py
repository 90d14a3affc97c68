"""This node's health as the agent uses it: the watch, its events, and the record that the protocol sends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from lmres.policy import Health as HealthSettings
from lmres.rendezvous.edge.events import EventLog
from lmres.rendezvous.edge.workers.guardian import Guardian
from lmres.rendezvous.state import Health, Member
from lmres.scout.edge.health import HealthWatch, Host
from lmres.scout.health import Said, Verdict

log = logging.getLogger("lmres")


class Fitness:
    """Owned by the node. ``generation`` gives the newest one, for events; ``has_workers``: training runs here;
    ``poke`` wakes the control thread."""

    def __init__(
        self,
        settings: HealthSettings,
        *,
        run_id: str,
        me: Callable[[], Member],
        state_dir: Path,
        guardian: Guardian,
        events: EventLog,
        generation: Callable[[], int],
        has_workers: Callable[[], bool],
        poke: Callable[[], None],
    ) -> None:
        self._me = me
        self._events = events
        self._generation = generation
        self._poke = poke
        self._verdict = Verdict()
        self._followed = 0
        host = Host(
            folder=state_dir,
            address=lambda: me().address,
            environ={"LMRES_RUN_ID": run_id, "LMRES_NODE_ID": me().node_id, "LMRES_STATE_DIR": str(state_dir)},
            on_spawn=guardian.register,
            on_gone=guardian.unregister,
            is_busy=has_workers,
        )
        self._watch = HealthWatch(
            settings, host, on_armed=self._armed, on_change=self._changed, on_said=self._said, on_off=self._off
        )

    @property
    def record(self) -> Health:
        me, verdict = self._me(), self._verdict
        return Health(node_id=me.node_id, incarnation=me.incarnation, fit=verdict.fit, reason=verdict.reason)

    def start(self) -> None:
        """Returns when the host has been looked at once, or after a bounded time."""
        self._watch.start()

    def follow(self, generation: int) -> None:
        """With each new generation a watch that has failed is tried again."""
        if generation > self._followed:
            self._followed = generation
            self._watch.rearm()

    def close(self) -> None:
        self._watch.close()

    # -- in the watch's thread ----------------------------------------------------------------------------------------

    def _armed(self, checks: tuple[str, ...], reason: str) -> None:
        self._events.emit("protection_armed", self._generation(), adapter="health", parts=list(checks), reason=reason)
        log.info("health of this host: %s looked at %s", ", ".join(checks), reason)

    def _changed(self, verdict: Verdict) -> None:
        self._verdict = verdict
        if verdict.fit:
            log.info("this host is fit for training again")
        else:
            log.warning("this host is unfit for training: %s", verdict.reason)
        self._poke()

    def _said(self, said: Said) -> None:
        if said.kind == "warning":
            log.warning("health of this host: %s", said.text)
            self._events.emit("health_warning", self._generation(), check=said.check, detail=said.text)
            return
        event = "protection_off" if said.kind == "skipped" else "protection_armed"
        words = "is not checked" if said.kind == "skipped" else "is checked again"
        log.warning("health of this host: %s %s: %s", said.check, words, said.text)
        self._events.emit(event, self._generation(), adapter="health", parts=[said.check], reason=said.text)

    def _off(self, reason: str) -> None:
        self._events.emit("protection_off", self._generation(), adapter="health", parts=["health"], reason=reason)
