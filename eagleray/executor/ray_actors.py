"""Workers as Ray actors in bundles of a placement group. Ray is for life and death; what is said goes by the queue."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import msgspec

from eagleray.cluster.spawn import Actors
from eagleray.cluster.team import open_team
from eagleray.cluster.waiting import Wait
from eagleray.cluster.watch import Watch
from eagleray.config import Config
from eagleray.executor.losses import Losses
from eagleray.executor.queue_group import QueueGroup
from eagleray.identity import EngineId
from eagleray.messages.workers import RayContext, WorkerSpec
from eagleray.transport import Broadcaster, PulseMonitor

__all__ = ["start_ray_actors"]

WORKER = "eagleray.worker.entry:run"

END_SECONDS = 3.0
"""How long workers may take to end after the queue was closed."""


def start_ray_actors(
    engine: EngineId, config: Config, *, runtime_dir: Path, context: RayContext | None, worker: str = WORKER
) -> QueueGroup:
    """The workers of `engine`, every one attached to the queue.

    `context`: the cluster and placement group that the asking program is in. `worker`: what each actor runs,
    `module:function`, called with an encoded `WorkerSpec`. Raises `ClusterError`, `ConfigError`, `WorkerLost` or
    `DeadlineExceeded`, and leaves nothing behind then.
    """
    wait = Wait(config.execution.startup_timeout, "startup_timeout")
    with ExitStack() as stack:
        team = open_team(engine, config, context=context, wait=wait)
        stack.callback(team.close)
        topology, labels = team.topology, team.labels
        broadcaster = Broadcaster.open(num_peers=topology.world_size, runtime_dir=runtime_dir, host=team.host)
        stack.callback(broadcaster.close)
        losses = Losses(broadcaster.wake)
        pulse = PulseMonitor.open(
            num_peers=topology.world_size,
            runtime_dir=runtime_dir,
            host=team.host,
            limit=config.execution.heartbeat_timeout,
            on_silent=lambda rank, seconds: losses.report(labels[rank], f"it was silent for {seconds:.0f} s"),
        )
        stack.callback(pulse.close)
        specs = [
            WorkerSpec(
                worker=topology.worker_id(engine, rank),
                rank=rank,
                config=config,
                topology=topology,
                device_index=team.devices[rank],
                is_near=topology.nodes[rank] == team.engine_node,
                queue=broadcaster.ticket(rank),
                pulse=pulse.ticket(rank),
            )
            for rank in range(topology.world_size)
        ]
        sentinels = team.actors.run(worker, [msgspec.msgpack.encode(spec) for spec in specs])
        watch = Watch(sentinels, topology.nodes, lambda rank, reason: losses.report(labels[rank], reason))
        stack.callback(watch.close)
        broadcaster.wait_for_peers(wait.left, losses.check)
        stack.callback(_end, broadcaster, team.actors, losses)
        return QueueGroup(topology=topology, broadcaster=broadcaster, losses=losses, ends=stack.pop_all())


def _end(broadcaster: Broadcaster, actors: Actors, losses: Losses) -> None:
    """Workers end when the queue closes; what is left is killed with the team. When one is lost all are killed at once:
    the others wait for it, and would not hear."""
    broadcaster.close()
    if not losses.wait(0):
        actors.wait_until_ended(END_SECONDS)
