"""Load of the experts, in tokens, reported to the clients at intervals. Driven by the engine loop."""

from __future__ import annotations

import math
import time

import numpy as np

from eagleray.engine.core import EngineCore
from eagleray.engine.timeouts import EXPERT_LOAD_INTERVAL_SECONDS
from eagleray.identity import EngineId
from eagleray.messages.arrays import Array
from eagleray.messages.outputs import ExpertLoad
from eagleray.messages.steps import WorkerExpertLoad


class ExpertLoadReporter:
    """Reports every few seconds while the engine works, and when it becomes idle."""

    def __init__(self, engine: EngineId, core: EngineCore) -> None:
        self._engine = engine
        self._core = core
        self._due = math.inf

    def report_soon(self) -> None:
        """Make the next report due at once, because a new client has not received the last one."""
        self._due = 0.0

    def report(self, *, is_idle: bool) -> ExpertLoad | None:
        """Return the load, or None if no report is due or nothing was computed since the last one."""
        now = time.monotonic()
        if self._due == math.inf and not is_idle:  # work has begun
            self._due = now + EXPERT_LOAD_INTERVAL_SECONDS
        if now < self._due and not (is_idle and self._due < math.inf):
            return None
        self._due = math.inf if is_idle else now + EXPERT_LOAD_INTERVAL_SECONDS
        tp_size = self._core.executor.topology.tensor_parallel_size
        counts = join_loads(self._core.read_expert_load(), tp_size=tp_size)
        return ExpertLoad(engine=self._engine, counts=counts)


def join_loads(loads: list[WorkerExpertLoad], *, tp_size: int) -> Array:
    """Return int64 [num_moe_layers, num_experts] from the counts of each rank, with layers in the order of the stages.

    Ranks of a stage have counted different tokens, or none.
    """
    stages = [loads[first : first + tp_size] for first in range(0, len(loads), tp_size)]
    counted = [[load.counts for load in stage if load.counts.size] for stage in stages]
    layers: list[Array] = [np.sum(counts, axis=0) for counts in counted if counts]
    return np.concatenate(layers) if layers else np.zeros((0, 0), np.int64)
