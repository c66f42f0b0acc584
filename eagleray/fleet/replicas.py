"""The replicas of the fleet by key: which engines and API servers run, come back, or leave for good.

Pure: owned by `FleetState`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import msgspec

from eagleray.config.sections import Config
from eagleray.fleet import timeouts
from eagleray.fleet.engine_options import OptionsOfEngines
from eagleray.fleet.membership import Membership
from eagleray.fleet.replica import Replica
from eagleray.fleet.restart_policy import Restart, RestartDecision, RestartHistory, decide_restart
from eagleray.fleet.turn import Turn
from eagleray.identity import ClientId, EngineId, MemberId, replica_key
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import Stop


class Replicas(Mapping[MemberId, Replica]):
    """Engines and API servers that were added and not dropped, by replica key."""

    def __init__(self, config: Config, turn: Turn, membership: Membership, options: OptionsOfEngines) -> None:
        self.instance_has_served = False
        """Whether the instance has served, so that a failing start is no mistake of the user."""
        self._config = config
        self._turn = turn
        self._membership = membership
        self._options = options
        self._replicas: dict[MemberId, Replica] = {}
        self._leaving: set[MemberId] = set()
        """Keys of replicas that are dropped when their processes have exited."""
        self._incarnations: dict[MemberId, int] = {}
        """Last incarnations of replicas that were dropped, by key."""

    def __getitem__(self, key: MemberId) -> Replica:
        return self._replicas[key]

    def __iter__(self) -> Iterator[MemberId]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def of(self, member: MemberId) -> Replica | None:
        """Return the member's replica; None for members without one, and for past incarnations."""
        replica = self._replicas.get(replica_key(member))
        return replica if replica is not None and replica.member == member else None

    def engine(self, key: MemberId) -> EngineId:
        """Return the newest incarnation of an engine."""
        engine = self._replicas[key].member
        assert isinstance(engine, EngineId)
        return engine

    def expected(self) -> dict[MemberId, MemberId]:
        """Return the present or next incarnations of the replicas that are not given up and do not leave, by key."""
        return {
            key: member
            for key, replica in self._replicas.items()
            if key not in self._leaving and (member := replica.expected) is not None
        }

    @property
    def are_settled(self) -> bool:
        """Whether each replica is up, or will never be."""
        return all(replica.is_settled for replica in self._replicas.values())

    def add(self, key: MemberId) -> None:
        """Spawn the first incarnation of a replica, or the next one of a replica that was dropped or given up."""
        if key in self._replicas:
            self._drop(key)
        first = msgspec.structs.replace(key, incarnation=self._incarnations.get(key, -1) + 1)
        execution, ray = self._config.execution, self._config.ray
        # An actor waits for its placement before it starts.
        is_actor = isinstance(first, EngineId) and self._config.parallel.data_parallel_backend == "ray"
        placement_seconds = ray.ray_placement_timeout if is_actor else 0.0
        self._replicas[key] = replica = Replica(
            first,
            turn=self._turn,
            decide=partial(self._decide_restart, first),
            start_seconds=execution.startup_timeout + placement_seconds + timeouts.START_MARGIN_SECONDS,
        )
        self._membership.expect(first)
        replica.start()

    def let_go(self, key: MemberId) -> Replica:
        """Mark a replica as one that leaves for good, and return it."""
        self._leaving.add(key)
        return self._replicas[key]

    def is_leaving(self, member: MemberId) -> bool:
        """Whether the member's replica leaves for good."""
        return replica_key(member) in self._leaving

    def drop_if_gone(self, replica: Replica) -> None:
        """Drop a replica that leaves, once nothing of it is left."""
        if replica.key in self._leaving and replica.is_gone:
            self._drop(replica.key)

    def _drop(self, key: MemberId) -> None:
        replica = self._replicas.pop(key)
        assert replica.is_gone
        self._leaving.discard(key)
        self._incarnations[key] = replica.member.incarnation

    def _decide_restart(
        self, member: MemberId, history: RestartHistory, uptime: float | None, cause: Failure
    ) -> tuple[RestartHistory, RestartDecision]:
        is_engine, max_restarts = isinstance(member, EngineId), self._config.recovery.max_engine_restarts
        after, decision = decide_restart(
            history,
            uptime=uptime,
            cause=cause,
            max_restarts=max_restarts if is_engine or max_restarts == 0 else None,
            max_delay=timeouts.MAX_ENGINE_DELAY_SECONDS if is_engine else timeouts.MAX_API_SERVER_DELAY_SECONDS,
            instance_has_served=self.instance_has_served,
        )
        is_given_up = not isinstance(decision, Restart)
        if isinstance(member, EngineId) and self._options.on_failure(member, cause, is_given_up=is_given_up):
            return history, Restart(0.0)  # with the options from before
        return after, decision

    # The end of the instance.

    def close(self) -> None:
        """Start no further incarnation."""
        for replica in self._replicas.values():
            replica.close()

    def kill(self) -> None:
        """Kill every process."""
        for replica in self._replicas.values():
            replica.kill()

    def stop(self, kind: type[EngineId | ClientId], stop: Stop) -> None:
        """Have the processes of the engines or API servers exit."""
        for replica in self._replicas.values():
            if isinstance(replica.member, kind) and replica.stop(stop.grace):
                self._turn.send(stop, replica.member)

    def have_stopped(self, kind: type[EngineId | ClientId]) -> bool:
        """Whether the processes of the engines or API servers have exited, or were killed and still run."""
        of_kind = (replica for replica in self._replicas.values() if isinstance(replica.member, kind))
        return all(replica.is_gone or replica.is_stuck for replica in of_kind)
