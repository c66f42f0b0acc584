"""Adapters of an engine: has its workers load those that the instance has, and frees the slots of the others.

Driven by `EngineControl`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

from eagleray.engine.core import EngineCore
from eagleray.errors import CheckpointError, WrongState
from eagleray.log import get_logger
from eagleray.messages.adapters import Adapter
from eagleray.messages.control import InstanceState
from eagleray.messages.failure import Failure
from eagleray.messages.steps import AdapterWritten, WriteAdapter

logger = get_logger(__name__)


class EngineAdapters:
    def __init__(self, core: EngineCore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock

    def load(self, adapter: Adapter, timeout: float) -> Generator[str, None, dict[str, Any] | Failure]:
        """Load an adapter into a slot of its own, within `timeout` seconds. It waits until one is free: requests that
        run with adapters from before may have all. Returns the hash of the files as `digest`."""
        slots, deadline = self._core.scheduler.adapters, self._clock() + timeout
        while not slots.has_free and adapter.number not in slots:
            if not self._core.scheduler.may_plan:
                return Failure.of(
                    WrongState(
                        "requests that are paused have all slots, with adapters that were replaced or unloaded: call "
                        "resume first, or raise option `max_loras`"
                    )
                )
            yield "requests that run with adapters that were replaced or unloaded"
        if adapter.number in slots:
            return {"digest": adapter.digest}
        used = slots.allocate(adapter)
        call = WriteAdapter(slot=used.slot, path=adapter.path)
        replies = self._core.executor.call(call, AdapterWritten, timeout=max(0.0, deadline - self._clock()))
        failure = next((reply.failure for reply in replies if reply.failure is not None), None)
        digests = {reply.digest for reply in replies}
        if failure is None and (len(digests) > 1 or adapter.digest not in ("", *digests)):
            failure = Failure.of(CheckpointError(f"{adapter.path}: has changed since {adapter.name!r} was loaded"))
        if failure is not None:
            slots.retire(adapter.number)
            return failure
        return {"digest": digests.pop()}

    def drop(self, number: int) -> None:
        """Drop an adapter that not all engines could load."""
        self._core.scheduler.adapters.retire(number)

    def adopt(self, state: InstanceState, timeout: float, *, needs_all: bool) -> Generator[str, None, None]:
        """Load the adapters of the instance that are not here, and retire the others. One that cannot be loaded here
        fails its own requests only, unless the engine `needs_all`: then it raises `CheckpointError`."""
        slots = self._core.scheduler.adapters
        slots.retire_others(state.adapters)
        if "weights" in state.asleep:
            return
        for adapter in state.adapters:
            if adapter.number in slots:
                continue
            outcome = yield from self.load(adapter, timeout)
            if isinstance(outcome, Failure):
                if needs_all:
                    raise CheckpointError(f"adapter {adapter.name!r}: {outcome.message}")
                logger.error("adapter %r cannot be used: %s", adapter.name, outcome.message)
                slots.set_missing(adapter.name, f"this engine could not load it: {outcome.message}")
