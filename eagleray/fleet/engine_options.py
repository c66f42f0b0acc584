"""The options that engines start with, while they are the same for all and while a restart changes them.

Pure: owned by `FleetState`. New options are tried by one engine. Once it has started, every engine that starts gets
them, whatever made it start. If an engine cannot start with them, all get those from before again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagleray.config.sections import Config
from eagleray.errors import ClusterError, ClusterLost, EagleRayError
from eagleray.fleet.process_exit import as_exception
from eagleray.identity import EngineId, replica_key
from eagleray.messages.failure import Failure

NO_ROOM = (ClusterError.__name__, ClusterLost.__name__)
"""Kinds of failures that another start, or other options, do not mend."""


@dataclass(frozen=True)
class EngineOptions:
    config: Config
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Options that differ from those of the start of the instance, by name."""
    update: int = 0
    """Number of the weight update that the weights of the checkpoint count as; 0 for those of the start."""


@dataclass
class Rollout:
    """New options that engines are getting one after another."""

    options: EngineOptions
    trial: EngineId | None = None
    """Key of the engine that tries the options; None while no engine may."""
    is_proven: bool = False
    """Whether an engine has started with the options."""
    error: EagleRayError | None = None
    """Why an engine cannot start with the options."""


class OptionsOfEngines:
    """`start`: the configuration of the start of the instance."""

    def __init__(self, start: Config) -> None:
        self.settled = EngineOptions(start)
        """Options of all engines, but for those that a rollout has reached."""
        self.rollout: Rollout | None = None
        self.surge: EngineId | None = None
        """Key of the engine that runs while others are restarted."""
        self.is_undoing_checkpoint = False
        """Whether engines may still have the checkpoint of a rollout that was withdrawn."""
        self._of: dict[EngineId, EngineOptions] = {}
        """Options of the newest incarnation of each engine, by replica key."""

    def of(self, engine: EngineId) -> EngineOptions:
        """Return the options of the newest incarnation of an engine; before its first start, those that it gets."""
        key = replica_key(engine)
        return self._of[key] if key in self._of else self._next(key)

    def on_spawn(self, engine: EngineId) -> None:
        """Decide which options an engine that starts gets."""
        key = replica_key(engine)
        self._of[key] = self._next(key)

    def on_started(self, engine: EngineId) -> bool:
        """Handle the start of an engine. Returns whether it has proven new options."""
        rollout = self.rollout
        if rollout is None or rollout.is_proven or not self.has_new(engine):
            return False
        rollout.is_proven = True
        return True

    def on_failure(self, engine: EngineId, cause: Failure, *, is_given_up: bool) -> bool:
        """Handle the failure of an engine. Returns whether new options are to blame, and are withdrawn. The surge
        engine, which tries them first, may lack room with any options."""
        if (rollout := self.rollout) is None or not self.has_new(engine):
            return False
        if cause.kind in NO_ROOM and replica_key(engine) == self.surge:
            return False
        is_mistake = cause.is_user_error and not rollout.is_proven and cause.kind not in NO_ROOM
        if is_given_up or is_mistake:
            rollout.error = rollout.error or as_exception(engine.label, cause)
        return rollout.error is not None

    def has_new(self, engine: EngineId) -> bool:
        """Whether the newest incarnation of an engine has the options of the rollout."""
        return self.rollout is not None and self.of(engine) is self.rollout.options

    def begin(self, options: EngineOptions) -> None:
        """Begin a rollout."""
        self.rollout = Rollout(options)

    def withdraw(self) -> list[EngineId]:
        """End the rollout: every engine that starts gets the options from before. Returns the keys of the engines that
        have the new ones."""
        self.is_undoing_checkpoint = self.changes_checkpoint
        reached = [key for key in self._of if self.has_new(key)]
        self.rollout = None
        return reached

    @property
    def changes_checkpoint(self) -> bool:
        """Whether the rollout brings another checkpoint."""
        return self.rollout is not None and self.rollout.options.update != self.settled.update

    def settle(self) -> None:
        """End the rollout: the new options are those of all engines."""
        if self.rollout is not None:
            self.settled, self.rollout = self.rollout.options, None

    def _next(self, key: EngineId) -> EngineOptions:
        rollout = self.rollout
        if rollout is None or rollout.error is not None or not (rollout.is_proven or rollout.trial == key):
            return self.settled
        return rollout.options
