"""Load and totals of a scheduler: its part of `EngineStats`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from eagleray.messages.distributions import EngineDistributions


@dataclass(slots=True)
class Counters:
    """Totals, which only grow. `EngineStats` documents each field."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """All fields of `EngineStats` except the engine's id, under the same names."""

    num_running: int
    num_waiting: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    update: int
    num_deferred: int
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    distributions: EngineDistributions
