"""Workers as Ray actors in bundles of a placement group. Ray starts and kills them; messages go over a queue."""

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

STOP_TIMEOUT_SECONDS = 3.0
"""Time for workers to exit after the queue was closed, before they are killed."""


def start_ray_actors(
    engine: EngineId,
    config: Config,
    *,
    runtime_dir: Path,
    context: RayContext | None,
    on_lost: OnLost | None = None,
    worker: str = WORKER,
) -> QueueGroup:
    """Start the workers of `engine`, and wait until each is attached to the queue.

    `context`: the cluster and placement group of the program that asks. `worker`: function that each actor runs,
    `module:function`, called with an encoded `WorkerSpec`. `on_lost`: see `cluster.connect`. Raises `ClusterError`,
    `ConfigError`, `WorkerLost` or `DeadlineExceeded`, and leaves nothing behind then.
    """
    deadline = Deadline(config.execution.startup_timeout, "startup_timeout")
    with ExitStack() as stack:
        workers = open_worker_actors(engine, config, context=context, deadline=deadline, on_lost=on_lost)
        stack.callback(workers.close)
        topology, labels = workers.topology, workers.labels
        hub = MessageQueueHub.open(num_peers=topology.world_size, runtime_dir=runtime_dir, host=workers.host)
        stack.callback(hub.close)
        failures = FailureMonitor(hub.wake)
        heartbeats = open_heartbeat_monitor(labels, failures, config=config, runtime_dir=runtime_dir, host=workers.host)
        stack.callback(heartbeats.close)
        specs = encode_worker_specs(
            engine,
            config,
            topology,
            devices=workers.devices,
            is_local=workers.is_local,
            queue=hub.handle,
            heartbeats=heartbeats,
        )
        sentinels = workers.actors.run(worker, specs)
        monitor = ActorMonitor(sentinels, topology.nodes, lambda rank, cause: failures.report(labels[rank], cause))
        stack.callback(monitor.close)
        hub.wait_for_peers(deadline.remaining, failures.check)
        stack.callback(_stop, hub, workers.actors, failures)
        return QueueGroup(topology=topology, hub=hub, failures=failures, exit_stack=stack.pop_all())


def _stop(hub: MessageQueueHub, actors: ActorHandles, failures: FailureMonitor) -> None:
    """Close the queue, which makes the workers exit; the remaining ones are killed with their actors. If one failed,
    all are killed at once, because the others wait for it and do not read the queue."""
    hub.close()
    if not failures.is_broken:
        actors.wait_for_exit(STOP_TIMEOUT_SECONDS)
