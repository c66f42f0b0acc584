"""The order in which engines leave nodes that drain: one after another, while another one serves.

Pure: owned by `FleetState`, which carries out a move as a planned restart. The engine's replacement is placed on a node
that stays.
"""

from __future__ import annotations

from eagleray.fleet.membership import Membership
from eagleray.fleet.replica import Up
from eagleray.fleet.replicas import Replicas
from eagleray.fleet.scaling_operations import FleetChanges
from eagleray.identity import EngineId, replica_key


class NodeDrain:
    """The notice of a node is repeated until its engine has left, so one that comes too early is dropped."""

    def __init__(self, replicas: Replicas, membership: Membership, changes: FleetChanges) -> None:
        self._replicas = replicas
        self._membership = membership
        self._changes = changes
        self._moving: EngineId | None = None
        """Engine that was told to leave last."""

    def begin(self, engine: EngineId) -> bool:
        """Begin the move of an engine, if it may begin now. Returns whether it has begun."""
        replica, key = self._replicas.of(engine), replica_key(engine)
        if replica is None or not isinstance(replica.state, Up):
            return False
        if key in self._changes.held or key in self._changes.undrained:  # a scaling operation is at work on it
            return False
        others = [
            member
            for other, member in self._replicas.expected().items()
            if isinstance(member, EngineId) and other != key and other not in self._changes.held
        ]
        if self._is_moving or (others and not any(self._membership.has_joined(other) for other in others)):
            return False
        self._moving = engine
        return True

    @property
    def _is_moving(self) -> bool:
        """Whether the replacement of an engine that was moved has neither joined nor been given up."""
        replica = None if self._moving is None else self._replicas.get(replica_key(self._moving))
        if replica is None or replica.expected is None:
            return False
        return replica.member == self._moving or not self._membership.has_joined(replica.member)
