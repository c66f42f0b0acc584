"""What a worker is told at its birth, whichever executor brings it to life."""

from __future__ import annotations

from typing import Any

import msgspec

from eagleray.config.sections import Config
from eagleray.identity import EngineId, WorkerId


class RayCaller(msgspec.Struct, frozen=True, kw_only=True):
    """The actor or task that asks for an engine in its own placement group."""

    name: str
    """For people."""
    held: dict[int, dict[str, float]]
    """Resources of the group that it holds, by index of the bundle. It keeps them while it waits for the engine."""


class RayContext(msgspec.Struct, frozen=True, kw_only=True):
    """Where a program is that runs inside a Ray cluster."""

    address: str
    """Of the cluster, `host:port`."""
    runtime_env: dict[str, Any] = {}
    """The program's, with packages by their URIs: what its own actors would inherit."""
    placement_group: str | None = None
    """Id, in hex, of the placement group that the program runs in."""
    group_bundles: list[dict[str, float]] = []
    """Total resources of each bundle of that group."""
    caller: RayCaller | None = None
    """The program's own actor or task in that group."""
    devices: list[str] = []
    """GPUs that Ray has assigned to the program without setting CUDA_VISIBLE_DEVICES, because it was told not to."""
    bundles: list[int] = []
    """Of an engine that is an actor: which bundle of that group each of its workers has, by rank. Some may be equal."""


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Where the workers of one engine are. Learned when they are placed."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    nodes: list[str]
    """[world_size] the node of each rank; equal names are one node, with one shared memory"""
    addresses: list[str]
    """[world_size] the IP address of that node, for those on other nodes"""

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    @property
    def sampler_rank(self) -> int:
        """The rank that samples and answers steps, see `parallel.Mesh`."""
        return self.world_size - self.tensor_parallel_size

    def local_ranks(self, rank: int) -> list[int]:
        """The ranks on the node of `rank`, in order."""
        return [other for other, node in enumerate(self.nodes) if node == self.nodes[rank]]

    def worker_id(self, engine: EngineId, rank: int) -> WorkerId:
        pp, tp = divmod(rank, self.tensor_parallel_size)
        return WorkerId(engine, tp=tp, pp=pp)


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    rank: int
    """In its engine: pp x tensor_parallel_size + tp."""
    config: Config
    topology: Topology
    device_index: int | None = None
    """Which of the GPUs that torch sees here; None: the first, or none."""
    is_local: bool
    """On the engine's node: they may share memory. Elsewhere they do not try, even if it would work."""
    queue: bytes
    """Ticket for `transport.Listener`."""
    pulse: bytes
    """Ticket for `transport.Pulse`."""
