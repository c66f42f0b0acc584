"""Workers as Ray actors that a compiled graph calls: a step goes through the graph, any other call to each actor.

Compiled graphs are on their way out of Ray, so this group stays small and apart. A thread takes the answers, in the
order of the calls: a compiled graph's result can be asked for once, and not with a deadline that is to be tried again.
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
from eagleray.executor.failure_monitor import PEER_EXIT_SECONDS, FailureMonitor
from eagleray.executor.ray_graph.frame_handler import FailedCall
from eagleray.executor.ray_graph.graph import (
    Frames,
    Graph,
    GraphActor,
    call_actors,
    explain,
    lend,
    stop_actors,
    wait_until_alive,
)
from eagleray.executor.worker_specs import encode_worker_specs, open_heartbeat_monitor
from eagleray.identity import EngineId
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Failure
from eagleray.messages.steps import Call, Reply, StepPlan
from eagleray.messages.workers import RayContext

WORKER = "eagleray.executor.ray_graph.frame_handler:open_frame_handler"

SPARE_STEPS = 2
"""Steps that the graph takes beyond those that the engine has in flight."""

END_SECONDS = 3.0


def start_ray_graph(
    engine: EngineId,
    config: Config,
    *,
    runtime_dir: Path,
    context: RayContext | None,
    on_lost: OnLost | None = None,
    worker: str = WORKER,
) -> RayGraphGroup:
    """The workers of `engine`, every one alive and in the graph. Arguments and errors as `start_ray_actors`."""
    wait = Deadline(config.execution.startup_timeout, "startup_timeout")
    with ExitStack() as stack:
        team = open_worker_actors(
            engine, config, context=context, wait=wait, kind=GraphActor, max_concurrency=2, on_lost=on_lost
        )
        stack.callback(team.close)
        labels, topology = team.labels, team.topology
        replies: Replies = queue.SimpleQueue()
        losses = FailureMonitor(lambda: replies.put(None))
        pulse = open_heartbeat_monitor(labels, losses, config=config, runtime_dir=runtime_dir, host=team.host)
        stack.callback(pulse.close)
        specs = encode_worker_specs(
            engine, config, topology, devices=team.devices, is_local=team.near, queue=lambda rank: b"", heartbeats=pulse
        )
        sentinels = team.actors.run(worker, specs)
        watch = ActorMonitor(sentinels, topology.nodes, lambda rank, cause: losses.report(labels[rank], cause))
        stack.callback(watch.close)
        hosts = [actor.handle for actor in team.actors.actors]
        wait_until_alive(hosts, wait, losses.check)
        graph = Graph(
            hosts,
            max_steps=config.parallel.pipeline_parallel_size + SPARE_STEPS,
            timeout=config.ray.ray_graph_timeout,
        )
        return RayGraphGroup(team=team, graph=graph, replies=replies, losses=losses, ends=stack.pop_all())


class _Step(NamedTuple):
    """A step that was sent into the graph."""

    reference: Any


class _Call(NamedTuple):
    """Another call, to be made when the steps before it have come out of the graph."""

    frames: Frames


class _LateStep(NamedTuple):
    """A step that is sent when everything before it is answered: behind a call, so that all ranks keep the order, and
    between nodes, as `cluster.graph` explains."""

    frames: Frames


Replies = queue.SimpleQueue[Reply | None]
"""None: look whether a worker was lost."""


class RayGraphGroup:
    """See `group.WorkerGroup`."""

    def __init__(
        self, *, team: WorkerActors, graph: Graph, replies: Replies, losses: FailureMonitor, ends: ExitStack
    ) -> None:
        self.topology = team.topology
        self._team = team
        self._hosts = [actor.handle for actor in team.actors.actors]
        self._graph = graph
        self._replies = replies
        self._losses = losses
        self._ends = ends
        self._is_one_by_one = not all(team.near)
        self._is_closed = False
        self._calls: Codec[Call] = Codec(Call)
        self._answers: Codec[Reply] = Codec(Reply)
        self._sent: queue.SimpleQueue[_Step | _Call | _LateStep | None] = queue.SimpleQueue()
        self._num_kept = 0  # calls and late steps, counted by who sends
        self._num_done = 0  # and by the thread that makes them
        self._thread = threading.Thread(target=self._take_answers, name="ray-graph-answers", daemon=True)
        self._thread.start()

    def send(self, call: Call) -> None:
        self._losses.check()
        frames = lend(self._calls.encode(call))
        is_step = isinstance(call.body, StepPlan)
        if is_step and not self._is_one_by_one and self._num_kept == self._num_done:
            self._sent.put(_Step(self._graph.execute(frames)))
            return
        self._num_kept += 1
        self._sent.put(_LateStep(frames) if is_step else _Call(frames))

    def receive(self, timeout: float) -> Reply | None:
        try:
            reply = self._replies.get(timeout=timeout) if timeout > 0 else self._replies.get_nowait()
        except queue.Empty:
            reply = None
        if reply is None:
            self._losses.check()
        return reply

    def check(self) -> None:
        self._losses.check()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._losses.expect_exits()
        self._sent.put(None)
        is_lost = self._losses.is_broken
        self._thread.join(0 if is_lost else END_SECONDS)
        with self._ends:
            if is_lost or self._thread.is_alive():  # what waits for a worker that hangs would hang too
                self._team.kill()
                self._graph.close(are_hosts_dead=True)  # ends the thread's wait
                self._thread.join(END_SECONDS)
            else:
                self._graph.close()
                stop_actors(self._hosts)
                self._team.actors.wait_until_ended(END_SECONDS)

    def _take_answers(self) -> None:
        """Ends with the group, or with the graph: what breaks that is a loss."""
        try:
            while (sent := self._sent.get()) is not None:
                try:
                    for answer in self._answers_to(sent):
                        if answer:
                            self._replies.put(self._answers.decode(answer))
                except FailedCall as failed:
                    self._losses.mark_failed()
                    self._replies.put(self._answers.decode([failed.reply]))
                if not isinstance(sent, _Step):
                    self._num_done += 1
        except Exception as error:
            # When it broke because a worker died, the watch knows which one, and why, a little later.
            if not self._losses.wait(PEER_EXIT_SECONDS):
                self._losses.report("in the compiled graph", Failure.noticed(explain(error)))

    def _answers_to(self, sent: _Step | _Call | _LateStep) -> Iterable[Frames]:
        match sent:
            case _Step(reference):
                return self._graph.results(reference)
            case _LateStep(frames):
                return self._graph.results(self._graph.execute(frames))
            case _Call(frames):
                return call_actors(self._hosts, frames)
