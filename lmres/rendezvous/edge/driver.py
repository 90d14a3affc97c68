"""Runs the protocol's rounds against a store that may not answer.

A round whose request got no answer is given up and run again from the start, with a jittered pause: what was written is
found when it is read. When the store stays out of reach for ``read_timeout``, or nobody even listens there, it is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import tenacity

from lmres.errors import StoreLost, StoreRefused, StoreUnavailable
from lmres.ports import Store
from lmres.rendezvous.agent import Agent
from lmres.rendezvous.rounds import Inputs, Outcome

log = logging.getLogger("lmres")

REFUSED_S = 10.0
"""How long a store at which nobody listens is tried again: its process is gone, and its records with it."""
LEAVE_S = 3.0
"""How long an agent that leaves tries to say so."""


class Driver:
    """``inputs`` gives this moment's facts for each try; ``sleep`` may end early."""

    def __init__(
        self,
        *,
        agent: Agent,
        store: Store,
        inputs: Callable[[], Inputs],
        sleep: Callable[[float], None],
        endpoint: str,
        read_timeout_s: float,
        heartbeat_interval_s: float,
        heartbeat_timeout_s: float,
    ) -> None:
        self._agent = agent
        self._store = store
        self._inputs = inputs
        self._sleep = sleep
        self._endpoint = endpoint
        self._read_timeout_s = read_timeout_s
        self._retry_max_s = min(0.5, heartbeat_interval_s)
        # Two requests must fit into a lease, or one slow answer would cost it.
        self._request_ms = max(500, min(2_000, round(heartbeat_timeout_s * 400)))

    def round(self) -> tuple[Outcome, Inputs]:
        """One whole round and what it knew. Raises StoreLost when the store stays away for too long."""
        outage = _Outage(limit_s=self._read_timeout_s)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreUnavailable),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=self._retry_max_s),
            stop=outage.is_too_long,
            before_sleep=outage.note,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            result: tuple[Outcome, Inputs] = retrying(self._attempt, outage)
        except StoreUnavailable as error:
            raise StoreLost(
                f"the store at {self._endpoint} has been out of reach for {outage.lasted_s():.0f} s: {error}"
            ) from error
        outage.over()
        return result

    def _attempt(self, outage: _Outage) -> tuple[Outcome, Inputs]:
        inputs = self._inputs()
        outage.leaving = outage.leaving or inputs.leave is not None
        steps = self._agent.round(inputs)
        try:
            txn = next(steps)
            while True:
                txn = steps.send(self._store.transact(txn, timeout_ms=self._request_ms))
        except StopIteration as stop:
            outcome: Outcome = stop.value
            return outcome, inputs
        finally:
            steps.close()


class _Outage:
    """How long the store has not answered in one round, and when that is too long."""

    def __init__(self, *, limit_s: float) -> None:
        self.leaving = False
        self._limit_s = limit_s
        self._began = time.monotonic()
        self._leaving_since: float | None = None
        self._refused_since: float | None = None
        self._noted = False

    def lasted_s(self) -> float:
        return time.monotonic() - self._began

    def is_too_long(self, state: tenacity.RetryCallState) -> bool:
        now = time.monotonic()
        if not isinstance(_error(state), StoreRefused):
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        if self.leaving and self._leaving_since is None:
            self._leaving_since = now
        return (
            now - self._began >= self._limit_s
            or _lasts(self._refused_since, now, min(REFUSED_S, self._limit_s))
            or _lasts(self._leaving_since, now, LEAVE_S)
        )

    def note(self, state: tenacity.RetryCallState) -> None:
        if not self._noted:
            self._noted = True
            log.warning("the store does not answer (%s); trying again for up to %.0f s", _error(state), self._limit_s)

    def over(self) -> None:
        if self._noted:
            log.warning("the store answers again after %.1f s", self.lasted_s())


def _error(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None


def _lasts(since: float | None, now: float, limit_s: float) -> bool:
    return since is not None and now - since >= limit_s
