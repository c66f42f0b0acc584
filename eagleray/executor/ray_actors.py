"""Workers as Ray actors in bundles of a placement group. Ray is for life and death; what is said goes by the queue."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from eagleray.cluster.actor_monitor import ActorMonitor
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.local_cluster import OnLost
from eagleray.cluster.spawn import ActorHandles
from eagleray.cluster.worker_actors import open_worker_actors
from eagleray.config.sections import Config
from eagleray.executor.failure_monitor import FailureMonitor
from eagleray.executor.queue_group import QueueGroup
from eagleray.executor.worker_specs import encode_worker_specs, open_heartbeat_monitor
from eagleray.identity import EngineId
from eagleray.messages.workers import RayContext
from eagleray.transport.message_queue_hub import MessageQueueHub

WORKER = "eagleray.worker.entry:run"

END_SECONDS = 3.0
"""How long workers may take to end after the queue was closed."""


def start_ray_actors(
    engine: EngineId,
    config: Config,
    *,
    runtime_dir: Path,
    context: RayContext | None,
    on_lost: OnLost | None = None,
    worker: str = WORKER,
) -> QueueGroup:
    """The workers of `engine`, every one attached to the queue.

    `context`: the cluster and placement group that the asking program is in. `worker`: what each actor runs,
    `module:function`, called with an encoded `WorkerSpec`. `on_lost`: see `cluster.connect`. Raises `ClusterError`,
    `ConfigError`, `WorkerLost` or `DeadlineExceeded`, and leaves nothing behind then.
    """
    wait = Deadline(config.execution.startup_timeout, "startup_timeout")
    with ExitStack() as stack:
        team = open_worker_actors(engine, config, context=context, wait=wait, on_lost=on_lost)
        stack.callback(team.close)
        topology, labels = team.topology, team.labels
        broadcaster = MessageQueueHub.open(num_peers=topology.world_size, runtime_dir=runtime_dir, host=team.host)
        stack.callback(broadcaster.close)
        losses = FailureMonitor(broadcaster.wake)
        pulse = open_heartbeat_monitor(labels, losses, config=config, runtime_dir=runtime_dir, host=team.host)
        stack.callback(pulse.close)
        specs = encode_worker_specs(
            engine,
            config,
            topology,
            devices=team.devices,
            is_local=team.near,
            queue=broadcaster.ticket,
            heartbeats=pulse,
        )
        sentinels = team.actors.run(worker, specs)
        watch = ActorMonitor(sentinels, topology.nodes, lambda rank, cause: losses.report(labels[rank], cause))
        stack.callback(watch.close)
        broadcaster.wait_for_peers(wait.left, losses.check)
        stack.callback(_end, broadcaster, team.actors, losses)
        return QueueGroup(topology=topology, hub=broadcaster, failures=losses, exit_stack=stack.pop_all())


def _end(broadcaster: MessageQueueHub, actors: ActorHandles, losses: FailureMonitor) -> None:
    """Workers end when the queue closes; what is left is killed with the team. When one is lost all are killed at once:
    the others wait for it, and would not hear."""
    broadcaster.close()
    if not losses.is_broken:
        actors.wait_until_ended(END_SECONDS)
