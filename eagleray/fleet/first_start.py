"""The first start of an instance: when its members have started and its clients can use the engines. Pure: owned by
`FleetState`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from eagleray.fleet.replicas import Replicas
from eagleray.fleet.turn import Serve, Turn
from eagleray.identity import ClientId, EngineId


class FirstStart:
    def __init__(self, replicas: Replicas, turn: Turn) -> None:
        self.is_serving = False
        """Whether every member that was started or adopted at first has started, or was given up, and the clients know
        the engines."""
        self._replicas = replicas
        self._turn = turn
        self._adopted: set[ClientId] = set()
        """Clients in the supervisor's process."""
        self._known: set[tuple[ClientId, EngineId]] = set()
        """Pairs of a client and an engine of which it has received `Joined`; empty once the instance serves."""
        self._pairs: Iterator[tuple[ClientId, EngineId]] = iter(())
        """Pairs that `_known` must have before the instance serves, from the one after `_awaited_pair`."""
        self._awaited_pair: tuple[ClientId, EngineId] | None = None
        """The first pair that is missing in `_known`; None while a member has not started."""

    def adopt(self, client: ClientId) -> None:
        """Record a client in the supervisor's process."""
        self._adopted.add(client)

    def on_known(self, client: ClientId, engine: EngineId) -> None:
        """Handle that a client has received `Joined` of an engine."""
        if not self.is_serving:
            self._known.add((client, engine))
            if self._awaited_pair == (client, engine):
                self._await_next_pair()

    def check(self) -> None:
        """Begin to serve when every member has started and the clients know the engines."""
        self._awaited_pair = None
        if self.is_serving or not self._replicas.are_settled:
            return
        members = self._replicas.expected().values()
        engines = [member for member in members if isinstance(member, EngineId)]
        clients = [member for member in members if isinstance(member, ClientId)]
        self._pairs = itertools.product([*clients, *self._adopted], engines)
        self._await_next_pair()

    def _await_next_pair(self) -> None:
        """Serve unless a client still has to report that it knows an engine. Each pair is looked at once, because there
        are as many reports as pairs."""
        self._awaited_pair = next((pair for pair in self._pairs if pair not in self._known), None)
        if self._awaited_pair is None:
            self.is_serving = self._replicas.instance_has_served = True
            self._known.clear()
            self._turn.act(Serve())
