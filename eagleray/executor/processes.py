"""Workers as processes of this host."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from eagleray.config.log_config import log_settings
from eagleray.config.resolve import first_device
from eagleray.config.sections import Config
from eagleray.executor.failure_monitor import FailureMonitor
from eagleray.executor.queue_group import QueueGroup
from eagleray.executor.timeouts import PROCESS_STOP_SECONDS
from eagleray.executor.worker_specs import encode_worker_specs, open_heartbeat_monitor, worker_labels
from eagleray.identity import EngineId, WorkerId
from eagleray.log import get_logger
from eagleray.messages.failure import Ended
from eagleray.messages.lifecycle import ChildToParent
from eagleray.messages.workers import Topology
from eagleray.process.fork_server import ForksChildren
from eagleray.process.spawn import Child
from eagleray.transport.message_queue_hub import MessageQueueHub

logger = get_logger(__name__)


def start_processes(
    engine: EngineId, config: Config, *, runtime_dir: Path, fork_server: ForksChildren | None = None
) -> QueueGroup:
    """Start the workers of `engine`, if possible as forks of `fork_server`, and wait until each is attached to the
    queue.

    Raises `WorkerLost` or `DeadlineExceeded`.
    """
    topology = _topology(config)
    labels = worker_labels(engine, topology)
    first = first_device(config, engine.rank)
    with ExitStack() as stack:
        hub = MessageQueueHub.open(num_peers=topology.world_size, runtime_dir=runtime_dir)
        stack.callback(hub.close)
        failures = FailureMonitor(hub.wake)
        heartbeats = open_heartbeat_monitor(labels, failures, config=config, runtime_dir=runtime_dir, host=None)
        stack.callback(heartbeats.close)
        children: list[Child] = []
        stack.callback(_stop, children, hub.close, failures)
        stack.callback(failures.expect_exits)
        specs = encode_worker_specs(
            engine,
            config,
            topology,
            devices=range(first, first + topology.world_size),
            is_local=[True] * topology.world_size,
            queue=hub.handle,
            heartbeats=heartbeats,
        )
        for rank, payload in enumerate(specs):
            children.append(_spawn(payload, topology.worker_id(engine, rank), config, failures, fork_server))
        hub.wait_for_peers(config.execution.startup_timeout, failures.check)
        return QueueGroup(topology=topology, hub=hub, failures=failures, exit_stack=stack.pop_all())


def _topology(config: Config) -> Topology:
    return Topology(
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
        nodes=["localhost"] * config.parallel.world_size,
        addresses=["127.0.0.1"] * config.parallel.world_size,
    )


def _spawn(
    payload: bytes, worker: WorkerId, config: Config, failures: FailureMonitor, fork_server: ForksChildren | None
) -> Child:
    def on_message(message: ChildToParent) -> None:
        if isinstance(message, Ended):
            failures.report(worker.label, message.cause)

    return Child(
        target="eagleray.worker.entry:run",
        member=worker,
        payload=payload,
        log=log_settings(config),
        runtime_dir="",  # only the engine may remove the instance's directory
        on_message=on_message,
        on_exit=lambda cause: failures.report(worker.label, cause),
        fork_server=fork_server,
    )


def _stop(children: list[Child], close_queue: Callable[[], None], failures: FailureMonitor) -> None:
    """Stop the workers: they exit when the queue closes; late ones get SIGTERM, then SIGKILL.

    If one is lost, all are killed at once: its peers wait for it and would not notice that the queue closes.
    """
    close_queue()
    if failures.is_broken:
        for child in children:
            child.kill()
    for stronger in (Child.terminate, Child.kill):
        deadline = time.monotonic() + PROCESS_STOP_SECONDS
        late = [child for child in children if not child.wait(max(0.0, deadline - time.monotonic()))]
        for child in late:
            logger.warning("%s has not exited within %.0f s: %s", child.label, PROCESS_STOP_SECONDS, stronger.__name__)
            stronger(child)
    for child in children:
        child.wait(PROCESS_STOP_SECONDS)
