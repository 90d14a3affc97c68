"""Who keeps a store process alive: a table of agents and of the time each may still be away. Pure.

Rules:

1. The server is there for agents. Observers (command line tools) never count.
2. An agent is a client id; it is there as long as one of its connections is.
3. An agent that leaves without a word may be reconnecting: it is expected back for ``linger_ms``. One that said bye
   is not, but the others get a moment (``settle_ms``): a hello may already be waiting in the listen queue.
4. Before the first agent the server waits ``first_agent_ms`` for it.
5. Time is what the server was told with ``passed``, not a clock: a process that was stopped for a minute must not
   count that minute against clients that could not reach it.
"""

from __future__ import annotations

SETTLE_MS = 100


class Lifetime:
    """The table. ``over`` says that nobody needs the server any more."""

    __slots__ = ("_bye", "_connections", "_expected_ms", "_first_agent_ms", "_linger_ms", "_settle_ms")

    def __init__(self, *, linger_ms: int, first_agent_ms: int, settle_ms: int = SETTLE_MS) -> None:
        self._linger_ms = linger_ms
        self._settle_ms = settle_ms
        self._first_agent_ms = first_agent_ms  # 0 once an agent has come
        self._connections: dict[str, int] = {}
        self._bye: set[str] = set()
        self._expected_ms: dict[str, int] = {}  # agents that left, and for how long each is still expected back

    def joined(self, client_id: str) -> None:
        """A connection of this agent said hello."""
        self._first_agent_ms = 0
        self._connections[client_id] = self._connections.get(client_id, 0) + 1
        self._bye.discard(client_id)
        self._expected_ms.pop(client_id, None)

    def said_bye(self, client_id: str) -> None:
        """This agent will not come back once its connections are closed."""
        self._bye.add(client_id)

    def left(self, client_id: str) -> None:
        """A connection of this agent, joined before, is gone."""
        remaining = self._connections[client_id] - 1
        if remaining > 0:
            self._connections[client_id] = remaining
            return
        del self._connections[client_id]
        self._expected_ms[client_id] = self._settle_ms if client_id in self._bye else self._linger_ms
        self._bye.discard(client_id)

    def passed(self, ran_ms: int) -> None:
        """The server ran, and could have heard from clients, for this long."""
        self._first_agent_ms = max(0, self._first_agent_ms - ran_ms)
        self._expected_ms = {
            client_id: left_ms - ran_ms for client_id, left_ms in self._expected_ms.items() if left_ms > ran_ms
        }

    @property
    def over(self) -> bool:
        return not (self._connections or self._expected_ms or self._first_agent_ms)
