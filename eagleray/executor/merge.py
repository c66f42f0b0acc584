"""Merge of the replies of several ranks into one step result. Pure.

The rank that samples reports everything but the routed experts of other stages: if a request wants them, the first rank
of every other stage replies too.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from eagleray.errors import ExpertGroupBroken
from eagleray.messages.arrays import Array
from eagleray.messages.steps import StageRoutedExperts, StepBroken, StepPlan, StepResult, WorkerReply
from eagleray.messages.workers import Topology


def reporting_ranks(topology: Topology, plan: StepPlan) -> list[int]:
    """Return the ranks that reply to a step, in order of the stages; the last one samples."""
    if not plan.capture_rows:
        return [topology.sampler_rank]
    return list(range(0, topology.world_size, topology.tensor_parallel_size))


def merge_step(replies: Mapping[int, WorkerReply]) -> StepResult:
    """Merge the replies of the reporting ranks, in order of rank. Raises `ExpertGroupBroken` if one is `StepBroken`."""
    *others, sampled = [_unbroken(reply) for reply in replies.values()]
    assert isinstance(sampled, StepResult), f"the rank that samples replied with {type(sampled).__name__}"
    if not others:
        return sampled
    layers = [_experts(reply) for reply in replies.values()]
    return msgspec.structs.replace(sampled, routed_experts=np.concatenate(layers, axis=1))


def _experts(reply: WorkerReply) -> Array:
    assert isinstance(reply, StepResult | StageRoutedExperts) and reply.routed_experts is not None
    return reply.routed_experts


def _unbroken(reply: WorkerReply) -> WorkerReply:
    if isinstance(reply, StepBroken):
        raise ExpertGroupBroken(f"step {reply.step}: {reply.cause}")
    return reply
