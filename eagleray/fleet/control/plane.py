"""The control plane of a supervisor: it passes events to `Control` and carries out the effects.

Owns the timer of the next deadline. Driven by the supervisor, in its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from eagleray.config.lora_modules import lora_modules
from eagleray.config.resolve import expert_engines, local_ranks, served_names
from eagleray.config.sections import Config
from eagleray.fleet.control.instance import (
    Effect,
    JoinEngine,
    PublishState,
    ReplaceEngine,
    SendAnswer,
    SendCommand,
    SteeredInstance,
)
from eagleray.fleet.control.machine import Control
from eagleray.fleet.membership import MembershipPublisher
from eagleray.hub.locate import model_root
from eagleray.identity import EngineId, MemberId
from eagleray.log import get_logger
from eagleray.messages.control import CommandDone, ControlCall
from eagleray.messages.lifecycle import EngineStarted
from eagleray.messages.membership import EngineInfo, Left

logger = get_logger(__name__)


class ControlPlane:
    """`join(engine, info)` publishes that an engine is ready. `replace(engine, cause)` has it replaced.

    `guarded(function)` calls a function; an exception of it fails the instance. Must be made in a running event loop.
    """

    def __init__(
        self,
        config: Config,
        instance: str,
        publisher: MembershipPublisher,
        *,
        join: Callable[[EngineId, EngineInfo], None],
        replace: Callable[[EngineId, str], None],
        guarded: Callable[..., None],
    ) -> None:
        parallel = config.parallel
        self._control = Control(
            SteeredInstance(
                instance,
                ranks=local_ranks(config),
                workers_per_engine=parallel.world_size,
                num_workers=parallel.data_parallel_size * parallel.world_size,
                shares_experts=expert_engines(config) > 1,
                adapters=lora_modules(config),
                max_adapters=config.lora.max_loras if config.lora.enable_lora else 0,
                model_names=served_names(config.model),
                updates_in_place=config.execution.weight_update == "in-place",
            ),
            weight_update_timeout=config.recovery.weight_update_timeout,
            checkpoint=None if config.model.load_format == "dummy" else model_root(config.model),
        )
        if self._control.state.adapters:
            publisher.publish_state(self._control.state)
        self._publisher = publisher
        self._join = join
        self._replace = replace
        self._guarded = guarded
        self._infos: dict[EngineId, EngineInfo] = {}
        """Properties of engines that have started and not joined."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, member: MemberId) -> None:
        """Add an engine or a client of the instance's own, which is being attached."""
        self._control.attach(member, self._loop.time())

    def start(self, started: EngineStarted) -> None:
        """Have an engine join once it has the state and the weights of the instance."""
        self._infos[started.engine] = started.info
        self._carry_out(self._control.start(started.engine, started.update, self._loop.time()))
        if started.engine in self._infos and started.update != (required := self._control.state.update):
            logger.info(
                "%s has started; it serves when it has the weights of update %d", started.engine.label, required
            )

    def leave(self, left: Left) -> None:
        """Handle the exit of a member."""
        if isinstance(left.member, EngineId):
            self._infos.pop(left.member, None)
        self._carry_out(self._control.leave(left.member, left.cause, left.returns, self._loop.time()))

    def handle(self, message: ControlCall | CommandDone) -> None:
        """Handle the message of a member."""
        now = self._loop.time()
        match message:
            case ControlCall():
                self._carry_out(self._control.call(message, now))
            case CommandDone():
                self._carry_out(self._control.on_done(message, now))

    def close(self) -> None:
        """Stop the timer. Calls that are open are not answered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendCommand(member, command):
                    self._publisher.send(member, command)
                case SendAnswer(client, answer):
                    self._publisher.send(client, answer)
                case PublishState(state):
                    self._publisher.publish_state(state)
                case JoinEngine(engine):
                    self._join(engine, self._infos.pop(engine))
                case ReplaceEngine(engine, cause):
                    # Later, because its exit is an event in turn.
                    self._loop.call_soon(partial(self._guarded, self._replace, engine, cause))
        self._set_timer()

    def _set_timer(self) -> None:
        self.close()
        if (deadline := self._control.deadline) is not None:
            self._timer = self._loop.call_at(deadline, partial(self._guarded, self._pass_time))

    def _pass_time(self) -> None:
        self._carry_out(self._control.pass_time(self._loop.time()))
