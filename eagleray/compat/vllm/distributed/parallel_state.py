"""The ranks of a worker's engine, for worker extensions."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist


class WorldGroup(NamedTuple):
    """The workers of an engine."""

    rank: int
    """Rank of this worker in its engine."""
    world_size: int


def get_world_group() -> WorldGroup:
    """Return the ranks of this worker's engine: those of torch's default group, which mixins find initialized."""
    return WorldGroup(dist.get_rank(), dist.get_world_size())
