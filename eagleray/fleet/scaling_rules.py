"""The operations that may not begin now, each with its reason. Pure: owned by `FleetState`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagleray.config.resolve import expert_engines, is_whole_deployment
from eagleray.config.sections import Config
from eagleray.errors import EagleRayError, InvalidRequest, WrongState
from eagleray.fleet.scaling_operations import FleetChanges
from eagleray.messages.scaling import RestartEngines, Scale

if TYPE_CHECKING:
    from eagleray.fleet.control.machine import Control
    from eagleray.fleet.engine_upgrades import EngineUpgrades


class ScalingRules:
    """`config`: the configuration of the start."""

    def __init__(self, config: Config, control: Control, changes: FleetChanges, upgrades: EngineUpgrades) -> None:
        self._config = config
        self._control = control
        self._changes = changes
        self._upgrades = upgrades

    def forbidden(self, request: Scale | RestartEngines) -> EagleRayError | None:
        """Return the reason why an operation of an instance that serves may not begin now; None if it may."""
        if self._control.weights_are_changing:
            return WrongState(
                "a weight update is open or its trainer is connected: scale after finish_weight_update and "
                "shutdown_weight_transfer_engine"
            )
        if isinstance(request, RestartEngines):
            return self._upgrades.forbidden(request)
        if request.num_engines is None and not request.remove_ranks:
            return None
        if self._config.parallel.enable_expert_parallel and (error := self._regrouping_forbidden(request)) is not None:
            return error
        if not is_whole_deployment(self._config):
            return InvalidRequest(
                "the engines of this deployment are started by several programs (`data_parallel_rank`, "
                "`data_parallel_start_rank` or `data_parallel_size_local`): start or stop one of the programs instead",
                param="num_engines",
            )
        return None

    def _regrouping_forbidden(self, request: Scale) -> EagleRayError | None:
        """Return the reason why engines that share experts may not be added or removed now."""
        if expert_engines(self._config) == 1:
            return InvalidRequest(
                "this engine has all experts (`enable_expert_parallel` with `data_parallel_size` 1), so others cannot "
                "share them: start with `data_parallel_size` 2 or more, which can be scaled later",
                param="num_engines",
            )
        if self._control.state.asleep:
            return WrongState("engines that share experts cannot be scaled while memory sleeps: call wake_up first")
        if self._control.state.update > 0 and self._changes.adds_engines(request):
            return WrongState(
                "the weights were updated since the start, and an added engine would read those of the checkpoint: "
                "engines that share experts can only be removed now"
            )
        return None
