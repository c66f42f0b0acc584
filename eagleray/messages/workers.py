"""Spec of a worker, the same for every executor, and the handles by which the workers of a group join each other."""

from __future__ import annotations

from typing import Any

import msgspec

from eagleray.config.sections import Config
from eagleray.identity import EngineId, WorkerId


class RayCaller(msgspec.Struct, frozen=True, kw_only=True):
    """Actor or task that asks for an engine in its own placement group."""

    name: str
    """Name for logs and errors."""
    held: dict[int, dict[str, float]]
    """Resources of the group that the caller holds, by bundle index. It keeps them while it waits for the engine."""


class RayContext(msgspec.Struct, frozen=True, kw_only=True):
    """Context of a program that runs inside a Ray cluster."""

    address: str
    """Address of the cluster, `host:port`."""
    runtime_env: dict[str, Any] = {}
    """Runtime environment of the program, with packages by their URIs: its own actors would inherit it."""
    placement_group: str | None = None
    """Id, in hex, of the placement group that the program runs in."""
    group_bundles: list[dict[str, float]] = []
    """Total resources of each bundle of that group."""
    caller: RayCaller | None = None
    """Actor or task of the program in that group."""
    devices: list[str] = []
    """GPUs that Ray has assigned to the program without setting CUDA_VISIBLE_DEVICES, because it was configured not
    to."""
    bundles: list[int] = []
    """Bundle index of each worker in that group, by rank, for an engine that is an actor. Some may be equal."""


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Placement of the workers of one engine on nodes."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    nodes: list[str]
    """[world_size] Node of each rank; ranks with equal names share one node and its memory."""
    addresses: list[str]
    """[world_size] IP address of each rank's node, for ranks on other nodes."""

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    @property
    def sampler_rank(self) -> int:
        """Rank that samples and replies to steps; see `parallel.Mesh`."""
        return self.world_size - self.tensor_parallel_size

    def local_ranks(self, rank: int) -> list[int]:
        """Return the ranks on the node of `rank`, in order."""
        return [other for other, node in enumerate(self.nodes) if node == self.nodes[rank]]

    def worker_id(self, engine: EngineId, rank: int) -> WorkerId:
        pp, tp = divmod(rank, self.tensor_parallel_size)
        return WorkerId(engine, tp=tp, pp=pp)


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    rank: int
    """Rank in the engine: pp_rank * tensor_parallel_size + tp_rank."""
    config: Config
    topology: Topology
    device_index: int | None = None
    """Index among the GPUs that torch sees in the worker; None for the first one or none."""
    is_local: bool
    """Whether the worker is on the engine's node, where they may share memory. Otherwise they do not try to."""
    queue: bytes
    """Handle for `transport.message_queue_peer`."""
    heartbeat: bytes
    """Handle for `transport.heartbeat`."""


class GroupOpened(msgspec.Struct, frozen=True, tag=True):
    """Handles of the resources that this worker has opened, for the other workers; None for resources it did not
    open."""

    store: str | None = None
    """`host:port` of the rendezvous store of torch.distributed, bound by the first rank of the group."""
    segment: bytes | None = None
    """Handle of the shared memory of ranks on one node, created by the first of them. In an expert group every rank
    sends one, with its process, so that the ranks can watch each other."""


class EngineOpened(msgspec.Struct, frozen=True, kw_only=True):
    """Handles and nodes of the workers of one engine."""

    rank: int
    """Rank of the engine in the group."""
    topology: Topology
    opened: list[GroupOpened]
    """Handles by worker rank."""
