"""Workers as Ray actors that a compiled graph calls: a step goes through the graph, any other call to each actor.

Compiled graphs are being removed from Ray, so this group stays small and apart. A thread receives the replies, in the
order of the calls: the result of a compiled graph can be requested only once, so no deadline that is retried is
possible.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from eagleray.cluster.actor_monitor import ActorMonitor
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.local_cluster import OnLost
from eagleray.cluster.worker_actors import WorkerActors, open_worker_actors
from eagleray.config.sections import Config
from eagleray.errors import FailedCall
from eagleray.executor.failure_monitor import FailureMonitor
from eagleray.executor.ray_graph.graph import (
    Frames,
    Graph,
    GraphActor,
    call_actors,
    explain_failure,
    stop_actors,
    to_ray_frames,
    wait_until_ready,
)
from eagleray.executor.timeouts import PEER_EXIT_SECONDS
from eagleray.executor.worker_specs import encode_worker_specs, open_heartbeat_monitor
from eagleray.identity import EngineId
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Failure
from eagleray.messages.steps import Call, Reply, StepPlan
from eagleray.messages.workers import RayContext

WORKER = "eagleray.executor.ray_graph.frame_handler:open_frame_handler"

SPARE_STEPS = 2
"""Steps that the graph buffers beyond the engine's steps in flight."""

STOP_TIMEOUT_SECONDS = 3.0
"""Time for workers to exit after they were told to, before they are killed."""


def start_ray_graph(
    engine: EngineId,
    config: Config,
    *,
    runtime_dir: Path,
    context: RayContext | None,
    on_lost: OnLost | None = None,
    worker: str = WORKER,
) -> RayGraphGroup:
    """Start the workers of `engine` in a graph. Arguments and errors are those of `start_ray_actors`."""
    deadline = Deadline(config.execution.startup_timeout, "startup_timeout")
    with ExitStack() as stack:
        workers = open_worker_actors(
            engine, config, context=context, deadline=deadline, kind=GraphActor, max_concurrency=2, on_lost=on_lost
        )
        stack.callback(workers.close)
        labels, topology = workers.labels, workers.topology
        replies: Replies = queue.SimpleQueue()
        failures = FailureMonitor(lambda: replies.put(None))
        heartbeats = open_heartbeat_monitor(labels, failures, config=config, runtime_dir=runtime_dir, host=workers.host)
        stack.callback(heartbeats.close)
        specs = encode_worker_specs(
            engine,
            config,
            topology,
            devices=workers.devices,
            is_local=workers.is_local,
            queue=lambda rank: b"",
            heartbeats=heartbeats,
        )
        sentinels = workers.actors.run(worker, specs)
        monitor = ActorMonitor(sentinels, topology.nodes, lambda rank, cause: failures.report(labels[rank], cause))
        stack.callback(monitor.close)
        wait_until_ready(workers.actors.handles, deadline, failures.check)
        graph = Graph(
            workers.actors.handles,
            max_steps=config.parallel.pipeline_parallel_size + SPARE_STEPS,
            timeout=config.ray.ray_graph_timeout,
        )
        return RayGraphGroup(
            workers=workers, graph=graph, replies=replies, failures=failures, exit_stack=stack.pop_all()
        )


class _SentStep(NamedTuple):
    """A step that was sent into the graph."""

    reference: Any


class _DeferredCall(NamedTuple):
    """A call that the thread makes when everything before it is answered.

    A step is deferred behind another call, so that all ranks keep the order, and between nodes, as `graph` explains.
    """

    frames: Frames
    is_step: bool


Replies = queue.SimpleQueue[Reply | None]
"""None makes `receive` check for a failed worker."""


class RayGraphGroup:
    """See `group.WorkerGroup`."""

    def __init__(
        self,
        *,
        workers: WorkerActors,
        graph: Graph,
        replies: Replies,
        failures: FailureMonitor,
        exit_stack: ExitStack,
    ) -> None:
        self.topology = workers.topology
        self._workers = workers
        self._actors = workers.actors.handles
        self._graph = graph
        self._replies = replies
        self._failures = failures
        self._exit_stack = exit_stack
        self._are_all_local = all(workers.is_local)
        self._is_closed = False
        self._call_codec: Codec[Call] = Codec(Call)
        self._reply_codec: Codec[Reply] = Codec(Reply)
        self._sent: queue.SimpleQueue[_SentStep | _DeferredCall | None] = queue.SimpleQueue()
        self._num_deferred = 0  # written by the sender
        self._num_done = 0  # deferred calls that were answered, written by the thread
        self._thread = threading.Thread(target=self._receive_replies, name="ray-graph-answers", daemon=True)
        self._thread.start()

    def send(self, call: Call) -> None:
        self._failures.check()
        frames = to_ray_frames(self._call_codec.encode(call))
        is_step = isinstance(call.body, StepPlan)
        if is_step and self._are_all_local and self._num_deferred == self._num_done:
            self._sent.put(_SentStep(self._graph.execute(frames)))
            return
        self._num_deferred += 1
        self._sent.put(_DeferredCall(frames, is_step))

    def receive(self, timeout: float) -> Reply | None:
        try:
            reply = self._replies.get(timeout=timeout) if timeout > 0 else self._replies.get_nowait()
        except queue.Empty:
            reply = None
        if reply is None:
            self._failures.check()
        return reply

    def check(self) -> None:
        self._failures.check()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._failures.expect_exits()
        self._sent.put(None)
        is_broken = self._failures.is_broken
        self._thread.join(0 if is_broken else STOP_TIMEOUT_SECONDS)
        with self._exit_stack:
            if is_broken or self._thread.is_alive():  # a graceful stop would hang with the worker that hangs
                self._workers.kill()
                self._graph.close(are_actors_dead=True)  # ends the thread's wait
                self._thread.join(STOP_TIMEOUT_SECONDS)
            else:
                self._graph.close()
                stop_actors(self._actors)
                self._workers.actors.wait_for_exit(STOP_TIMEOUT_SECONDS)

    def _receive_replies(self) -> None:
        """Run until the group is closed or the graph fails, which is reported."""
        try:
            while (sent := self._sent.get()) is not None:
                try:
                    for frames in self._replies_to(sent):
                        if frames:
                            self._replies.put(self._reply_codec.decode(frames))
                except FailedCall as failed:
                    self._failures.mark_failed()
                    self._replies.put(self._reply_codec.decode([failed.reply]))
                if isinstance(sent, _DeferredCall):
                    self._num_done += 1
        except Exception as error:
            # If the graph failed because a worker died, the monitor reports that worker and the cause a little later.
            if not self._failures.wait(PEER_EXIT_SECONDS):
                self._failures.report("in the compiled graph", Failure.noticed(explain_failure(error)))

    def _replies_to(self, sent: _SentStep | _DeferredCall) -> Iterable[Frames]:
        match sent:
            case _SentStep(reference):
                return self._graph.results(reference)
            case _DeferredCall(frames, is_step=True):
                return self._graph.results(self._graph.execute(frames))
            case _DeferredCall(frames):
                return call_actors(self._actors, frames)
