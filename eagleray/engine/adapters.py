"""Low-rank adapters of an engine: its workers load the adapters of the instance, and the slots of others are freed.

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
        """Load an adapter into a slot of its own, within `timeout` seconds. Returns the hash of the files as `digest`.

        It waits for a free slot: running requests may use replaced or unloaded adapters in all of them.
        """
        slots, deadline = self._core.scheduler.adapters, self._clock() + timeout
        while not slots.has_free and adapter.number not in slots:
            if not self._core.scheduler.may_plan:
                return Failure.of(
                    WrongState(
                        "paused requests with replaced or unloaded adapters use all slots: call resume first, or raise "
                        "option `max_loras`"
                    )
                )
            yield "requests with replaced or unloaded adapters"
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
        """Drop an adapter that another engine could not load."""
        self._core.scheduler.adapters.retire(number)

    def adopt(self, state: InstanceState, timeout: float, *, needs_all: bool) -> Generator[str, None, None]:
        """Load the adapters of the instance that this engine lacks, and retire the others. If one cannot be loaded,
        only its own requests fail, unless `needs_all` is set: then `CheckpointError` is raised."""
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
