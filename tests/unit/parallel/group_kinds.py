"""Groups of every kind that spans ranks. Each rank is a thread of the test's process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from ranks import together

from eagleray.parallel.distributed import TorchGroup, TorchProcessGroups
from eagleray.parallel.rendezvous import bind_store, reach_store
from eagleray.parallel.shared_memory import Segment

KINDS = ["shared memory", "gloo"]

BUFFER_BYTES = 4096
"""A small size, so that tensors go in pieces."""


def make_groups(kind: str, size: int, timeout: float = 20.0, **torch_options: Any) -> list:
    """`torch_options`: those of `TorchGroup`."""
    if kind == "shared memory":
        segment = Segment.create(size, buffer_bytes=BUFFER_BYTES)
        others = [Segment.attach(segment.handle, rank=rank, num_ranks=size, timeout=timeout) for rank in range(1, size)]
        return [segment.join(timeout=timeout), *others]
    store, address = bind_store("127.0.0.1")

    def connect(rank: int) -> TorchGroup:
        mine = reach_store(address, timeout=20.0)
        options = {"host": "127.0.0.1", "device": torch.device("cpu"), "timeout": 20.0}
        connections = TorchProcessGroups(mine, "test", rank=rank, size=size, **options)
        return TorchGroup(connections, timeout=timeout, **torch_options)

    groups = together([partial(connect, rank) for rank in range(size)])
    del store  # needed only until all are connected
    return groups
