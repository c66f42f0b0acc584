"""The operation that replaces engines by new processes one after another, perhaps with other options.

Pure, like `scaling_operations`. Where there is room, one more engine, the surge engine, runs while the others are
replaced, so that the instance keeps its capacity, and a single engine leaves no gap. It is also the first to try new
options: if it cannot start with them, nothing has changed. Without room the first engine that is replaced tries them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from eagleray.errors import DeadlineExceeded, EagleRayError, EngineFailed
from eagleray.fleet import timeouts
from eagleray.fleet.engine_options import NO_ROOM, OptionsOfEngines
from eagleray.fleet.membership import Membership
from eagleray.fleet.replica import Replica, Starting, Up
from eagleray.fleet.scaling_operations import (
    Admit,
    FleetChanges,
    Remove,
    RestartReplica,
    RestoreWeights,
    ScalingOperation,
    StartReplica,
    Step,
    Steps,
    Until,
)
from eagleray.fleet.turn import Turn
from eagleray.identity import EngineId, MemberId
from eagleray.log import get_logger
from eagleray.messages.scaling import RestartEngines

if TYPE_CHECKING:
    from eagleray.fleet.engine_upgrades import EngineUpgrades

logger = get_logger(__name__)


class RollingRestart:
    """`replicas`: those of the fleet by key."""

    def __init__(
        self,
        changes: FleetChanges,
        options: OptionsOfEngines,
        upgrades: EngineUpgrades,
        replicas: Mapping[MemberId, Replica],
        membership: Membership,
        turn: Turn,
        *,
        instance: str,
    ) -> None:
        self._changes = changes
        self._options = options
        self._upgrades = upgrades
        self._replicas = replicas
        self._membership = membership
        self._turn = turn
        self._instance = instance

    @property
    def changes(self) -> dict[str, Any]:
        """Options of all engines that differ from those of the start."""
        return dict(self._options.settled.changes)

    def steps_of(self, operation: ScalingOperation, request: RestartEngines) -> Steps:
        """Return the generator of an operation."""
        if request.options:
            self._options.begin(self._upgrades.options_with(request.options))
        ranks = request.ranks or self._changes.ranks
        yield from self._add_surge_engine(operation)
        operation.phase = "committing"
        for rank in ranks:
            key = EngineId(self._instance, rank)
            if rollout := self._options.rollout:
                rollout.trial = key
            if (replica := self._replicas.get(key)) is not None and replica.expected is not None:
                yield from self._replace(operation, replica, self._outdated(replica), request.drain_timeout)
        self._options.settle()
        if self._options.surge is not None:
            yield from self._changes.drain(operation, [self._options.surge], request.drain_timeout)
            operation.phase = "committing"
            yield from self._remove_surge_engine()

    def undo(self, operation: ScalingOperation, error: EagleRayError) -> Steps:
        """Remove the surge engine of a failed operation, and give all engines the options from before. Raises
        `RolledBack` at the end."""
        if (rollout := self._options.rollout) is not None:
            changed_weights = rollout.is_proven and self._options.changes_checkpoint
            reached = [
                (self._replicas[key], self._replicas[key].member)
                for key in self._options.withdraw()
                if key in self._replicas and key != self._options.surge
            ]
            logger.warning("the engines get the options from before again: %s", error)
            if changed_weights:
                yield RestoreWeights()
            for replica, member in reached:
                yield from self._replace(operation, replica, member, 0.0, is_undone=True)
        if self._options.surge is not None:
            yield from self._remove_surge_engine()
        self._options.is_undoing_checkpoint = False
        yield from self._changes.remove_held(operation, error)

    def _add_surge_engine(self, operation: ScalingOperation) -> Generator[Step, None, None]:
        """Start one more engine, and wait until it serves, if there is room for it."""
        operation.phase = "preparing"
        if (obstacle := self._upgrades.no_surge()) is not None:
            logger.info("no engine is added while others are restarted: %s", obstacle)
            return
        self._options.surge = key = self._changes.free_engine()
        if rollout := self._options.rollout:
            rollout.trial = key
        self._changes.held[key] = None
        yield StartReplica(key)
        seconds = timeouts.SCALE_START_ATTEMPTS * self._replicas[key].start_seconds
        operation.deadline = due = self._turn.now + seconds

        def has_outcome() -> bool:
            self._check_options()
            return self._changes.held[key] is not None or key in self._changes.failures or self._turn.now >= due

        yield Until(has_outcome, lambda: f"{key.label} must start")
        operation.deadline = None
        if self._changes.held[key] is not None:
            yield Admit((key,))
            return
        late = DeadlineExceeded(f"{key.label} did not start within {seconds:.0f} s")
        error = self._changes.failures.pop(key, late)
        if rollout is not None and type(error).__name__ not in NO_ROOM:
            raise error
        logger.info("no engine is added while others are restarted: %s", error)
        yield from self._remove_surge_engine()

    def _remove_surge_engine(self) -> Generator[Step, None, None]:
        assert self._options.surge is not None
        key, self._options.surge = self._options.surge, None
        yield Remove(key, "the engines that it stood in for were restarted")
        self._changes.held.pop(key, None)
        yield self._changes.until_gone([key])

    def _outdated(self, replica: Replica) -> MemberId | None:
        """Return the incarnation that has to go; None if it has gone already, and its replacement starts."""
        if self._options.rollout is None:
            return replica.member if isinstance(replica.state, Up) else None
        assert isinstance(replica.key, EngineId)
        is_old = isinstance(replica.state, Starting | Up) and not self._options.has_new(replica.key)
        return replica.member if is_old else None

    def _replace(
        self,
        operation: ScalingOperation,
        replica: Replica,
        former: MemberId | None,
        drain_timeout: float,
        *,
        is_undone: bool = False,
    ) -> Generator[Step, None, None]:
        """Replace the incarnation `former` of an engine, and wait until another one serves."""
        key = replica.key
        assert isinstance(key, EngineId)
        if replica.member == former and isinstance(replica.state, Up):
            yield from self._changes.drain(operation, [key], drain_timeout)
            operation.phase = "committing"
        if replica.member == former and isinstance(replica.state, Starting | Up):
            yield RestartReplica(key, "it is restarted on purpose")
        seconds = timeouts.SCALE_START_ATTEMPTS * replica.start_seconds
        operation.deadline = due = self._turn.now + seconds

        def has_returned() -> bool:
            self._check_options()
            if replica.expected is None:
                if is_undone:
                    return True
                given_up = replica.member.label
                raise EngineFailed(f"{given_up} was restarted and is given up; the later ones were left alone")
            if self._turn.now >= due:
                if is_undone:
                    return True
                raise DeadlineExceeded(
                    f"{key.label} did not start within {seconds:.0f} s; the later ones were left alone"
                )
            return replica.member != former and self._membership.has_joined(replica.member)

        yield Until(has_returned, lambda: f"the replacement of {key.label} must start")
        operation.deadline = None

    def _check_options(self) -> None:
        """Raise the error of an engine that cannot start with new options."""
        rollout = self._options.rollout
        if rollout is not None and rollout.error is not None:
            raise rollout.error
