"""Workers as processes of this host."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from eagleray.config.resolve import first_device
from eagleray.config.sections import Config
from eagleray.executor.failure_monitor import FailureMonitor
from eagleray.executor.queue_group import QueueGroup
from eagleray.executor.worker_specs import encode_worker_specs, open_heartbeat_monitor, worker_labels
from eagleray.identity import EngineId
from eagleray.log import get_logger
from eagleray.messages.lifecycle import ChildToParent, Failed
from eagleray.messages.workers import Topology
from eagleray.process.spawn import Child
from eagleray.transport.message_queue_hub import MessageQueueHub

logger = get_logger(__name__)

END_SECONDS = 3.0
"""How long workers may take to end after the queue was closed, and again after SIGTERM."""


def start_processes(engine: EngineId, config: Config, *, runtime_dir: Path) -> QueueGroup:
    """The workers of `engine`, every one attached to the queue. Raises `WorkerLost` or `DeadlineExceeded`."""
    topology = _topology(config)
    labels = worker_labels(engine, topology)
    first = first_device(config, engine.rank)
    with ExitStack() as stack:
        broadcaster = MessageQueueHub.open(num_peers=topology.world_size, runtime_dir=runtime_dir)
        stack.callback(broadcaster.close)
        losses = FailureMonitor(broadcaster.wake)
        pulse = open_heartbeat_monitor(labels, losses, config=config, runtime_dir=runtime_dir, host=None)
        stack.callback(pulse.close)
        children: list[Child] = []
        stack.callback(_end, children, broadcaster.close, losses)
        stack.callback(losses.expect)
        specs = encode_worker_specs(
            engine,
            config,
            topology,
            devices=range(first, first + topology.world_size),
            near=[True] * topology.world_size,
            queue=broadcaster.ticket,
            pulse=pulse,
        )
        for label, payload in zip(labels, specs, strict=True):
            children.append(_spawn(payload, label, config, losses))
        broadcaster.wait_for_peers(config.execution.startup_timeout, losses.check)
        return QueueGroup(topology=topology, broadcaster=broadcaster, losses=losses, ends=stack.pop_all())


def _topology(config: Config) -> Topology:
    return Topology(
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
        nodes=["localhost"] * config.parallel.world_size,
        addresses=["127.0.0.1"] * config.parallel.world_size,
    )


def _spawn(payload: bytes, label: str, config: Config, losses: FailureMonitor) -> Child:
    def heard(message: ChildToParent) -> None:
        if isinstance(message, Failed):
            losses.report(label, message.cause)

    return Child(
        target="eagleray.worker.entry:run",
        label=label,
        payload=payload,
        log_level=config.execution.log_level,
        runtime_dir="",  # the instance's directory is not the workers' to remove
        on_message=heard,
        on_exit=lambda reason: losses.report(label, reason),
    )


def _end(children: list[Child], close_queue: Callable[[], None], losses: FailureMonitor) -> None:
    """Workers end when the queue closes; those that do not are told by SIGTERM, then killed. When one is lost all are
    killed at once: the others wait for it, and would not hear."""
    close_queue()
    if losses.is_broken:
        for child in children:
            child.kill()
    for stronger in (Child.terminate, Child.kill):
        deadline = time.monotonic() + END_SECONDS
        late = [child for child in children if not child.wait(max(0.0, deadline - time.monotonic()))]
        for child in late:
            logger.warning("%s did not end within %.0f s: %s", child.label, END_SECONDS, stronger.__name__)
            stronger(child)
    for child in children:
        child.wait(END_SECONDS)
