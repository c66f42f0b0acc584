"""Load and totals of a scheduler: the fields of `EngineStats` that it knows."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(slots=True)
class Counters:
    """Totals; they only grow. `EngineStats` says what each one counts."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in `EngineStats` but the engine's name, under the same names."""

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
