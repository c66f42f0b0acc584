"""Specs that executors pass to their workers at spawn, and the monitor of the workers' heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from eagleray.config.sections import Config
from eagleray.executor.failure_monitor import FailureMonitor
from eagleray.identity import EngineId
from eagleray.messages.failure import Failure
from eagleray.messages.workers import Topology, WorkerSpec
from eagleray.transport.heartbeat import HeartbeatMonitor


def worker_labels(engine: EngineId, topology: Topology) -> list[str]:
    """Return the labels of the workers, by rank."""
    return [topology.worker_id(engine, rank).label for rank in range(topology.world_size)]


def open_heartbeat_monitor(
    labels: Sequence[str], failures: FailureMonitor, *, config: Config, runtime_dir: Path, host: str | None
) -> HeartbeatMonitor:
    """Open a monitor that reports a worker as failed once its heartbeats stop.

    `host`: address at which workers of other nodes reach the engine.
    """
    return HeartbeatMonitor.open(
        num_peers=len(labels),
        runtime_dir=runtime_dir,
        host=host,
        limit=config.execution.heartbeat_timeout,
        on_silent=lambda rank, seconds: failures.report(
            labels[rank], Failure.noticed(f"it was silent for {seconds:.0f} s")
        ),
    )


def encode_worker_specs(
    engine: EngineId,
    config: Config,
    topology: Topology,
    *,
    devices: Sequence[int | None],
    is_local: Sequence[bool],
    queue: Callable[[int], bytes],
    heartbeats: HeartbeatMonitor,
) -> list[bytes]:
    """Encode a `WorkerSpec` for each rank. `devices` and `is_local` are by rank; `queue` returns the handle of a
    rank."""
    specs = [
        WorkerSpec(
            worker=topology.worker_id(engine, rank),
            rank=rank,
            config=config,
            topology=topology,
            device_index=devices[rank],
            is_local=is_local[rank],
            queue=queue(rank),
            heartbeat=heartbeats.handle(rank),
        )
        for rank in range(topology.world_size)
    ]
    return [msgspec.msgpack.encode(spec) for spec in specs]
