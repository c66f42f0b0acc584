"""The options that engines start with, and what a change of them means to the rest of the fleet.

Pure: owned by `FleetState`. `OptionsOfEngines` records who has which options; this class makes the configuration of an
engine that starts, decides which changes a restart may bring, and has the weights of another checkpoint count as a
weight update. The steps of a restart are those of `RollingRestart`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from eagleray.config.resolve import (
    DEMO_MODEL_DIR,
    expert_engines,
    is_whole_deployment,
    option_that_needs_ray,
)
from eagleray.config.restart_options import changed_options, requested_changes, with_changes
from eagleray.config.sections import Config
from eagleray.errors import EagleRayError, InvalidRequest, Unavailable, WrongState
from eagleray.fleet import timeouts
from eagleray.fleet.engine_options import EngineOptions, OptionsOfEngines
from eagleray.fleet.membership import Membership
from eagleray.fleet.replicas import Replicas
from eagleray.identity import EngineId, replica_key
from eagleray.messages.scaling import RestartEngines

if TYPE_CHECKING:
    from eagleray.fleet.control.instance import Effect
    from eagleray.fleet.control.machine import Control


class EngineUpgrades:
    """`config`: the configuration of the start. `shortage(num_added)` returns why that many added engines find no room;
    None if there is room."""

    def __init__(
        self,
        config: Config,
        options: OptionsOfEngines,
        replicas: Replicas,
        membership: Membership,
        control: Control,
        *,
        shortage: Callable[[int], str | None],
    ) -> None:
        self._config = config
        self._options = options
        self._replicas = replicas
        self._membership = membership
        self._control = control
        self._shortage = shortage

    # Engines that start.

    def config_of(self, engine: EngineId) -> Config:
        """Return the configuration of an engine that is spawned now. Its `data_parallel_size` covers the ranks of all
        engines that run or start, which divide the cores and the memory of their host by it. A surge engine leaves its
        part to the others soon."""
        config, surge = self._options.of(engine).config, self._options.surge
        parallel = config.parallel
        if not is_whole_deployment(self._config):
            return config
        is_surge = replica_key(engine) == surge
        waits_for_ray = option_that_needs_ray(config) is not None  # else an option of Ray would choose it as executor
        if is_surge and waits_for_ray and config.ray.ray_placement_timeout > timeouts.SURGE_PLACEMENT_SECONDS:
            ray = msgspec.structs.replace(config.ray, ray_placement_timeout=timeouts.SURGE_PLACEMENT_SECONDS)
            config = msgspec.structs.replace(config, ray=ray)
        ranks = [
            member.rank
            for key, member in self._replicas.expected().items()
            if isinstance(member, EngineId) and (is_surge or key != surge)
        ]
        # An engine of an expert group is never alone by its configuration.
        least = 2 if expert_engines(self._config) > 1 else 1
        parallel = msgspec.structs.replace(
            parallel,
            data_parallel_size=max(least, max(ranks) + 1),
            data_parallel_size_local=None,
            data_parallel_start_rank=None,
            data_parallel_rank=None,
        )
        return msgspec.structs.replace(config, parallel=parallel)

    def on_started(self, engine: EngineId, now: float) -> list[Effect]:
        """Handle the start of an engine. The first one with another checkpoint makes that the weights of the
        instance."""
        if not (self._options.on_started(engine) and self._options.changes_checkpoint):
            return []
        options = self._options.of(engine)
        return self._control.use_checkpoint(options.update, options.config.model.model or str(DEMO_MODEL_DIR), now)

    def keep_weights(self) -> None:
        """Allow no weight update while some engines have another checkpoint than the rest."""
        kept = None
        if self._options.changes_checkpoint:
            kept = "a restart changes the checkpoint (GET /scale has its status)"
        elif self._options.is_undoing_checkpoint:
            kept = "a failed change of the checkpoint is undone (GET /scale has its status)"
        self._control.keep_weights(kept)

    # Restarts.

    def forbidden(self, request: RestartEngines) -> EagleRayError | None:
        """Return the reason why a restart may not bring its options now."""
        if not request.options:
            return None
        if request.ranks:
            return InvalidRequest("options change for all engines: leave out `ranks`", param="ranks")
        try:
            self.options_with(request.options)
        except EagleRayError as error:
            return error
        return None

    def options_with(self, given: Mapping[str, Any]) -> EngineOptions:
        """Return the options of engines with the changes that a restart asks for. Raises the reason why they may not
        begin now."""
        settled, changes = self._options.settled, requested_changes(given)
        changes_checkpoint = "model" in changes
        if changes_checkpoint and self._config.parallel.enable_expert_parallel:
            raise InvalidRequest(
                "engines that share experts (`enable_expert_parallel`) need the same weights at any time, so `model` "
                "cannot be changed one engine after another: use update_weights with `weight_dir`",
                param="model",
            )
        if changes_checkpoint and (self._control.weights_are_changing or "weights" in self._control.state.asleep):
            raise WrongState("the weights are asleep or being updated: change `model` afterwards")
        infos = self._membership.engine_infos
        if changes_checkpoint and not infos:
            raise Unavailable("no engine serves at present, so it is not known which checkpoint would fit")
        config = with_changes(settled.config, changes, max_model_len=infos[0].max_model_len if infos else 0)
        update = self._control.next_update if changes_checkpoint else settled.update
        return EngineOptions(config, changed_options(self._config, config), update)

    def no_surge(self) -> str | None:
        """Return why no engine can be added while others are restarted; None if one can."""
        config = self._config
        if not is_whole_deployment(config) or config.parallel.enable_expert_parallel or config.ray.bundle_indices:
            return "the options of the deployment leave no place for it"
        if self._control.state.asleep:
            return "the instance is asleep"
        return self._shortage(1)
