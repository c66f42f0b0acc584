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

import msgspec

from eagleray.cluster.graph import Frames, Graph, GraphHost, call_hosts, end_hosts, explain, lend, wait_until_alive
from eagleray.cluster.team import Team, open_team
from eagleray.cluster.waiting import Wait
from eagleray.cluster.watch import Watch
from eagleray.config import Config
from eagleray.executor.losses import Losses
from eagleray.identity import EngineId
from eagleray.messages.codec import Codec
from eagleray.messages.steps import Call, Reply, StepPlan
from eagleray.messages.workers import RayContext, WorkerSpec
from eagleray.transport import PulseMonitor

__all__ = ["RayGraphGroup", "start_ray_graph"]

WORKER = "eagleray.worker.edge:open_edge"

SPARE_STEPS = 2
"""Steps that the graph takes beyond those that the engine has in flight."""

END_SECONDS = 3.0

WATCH_SECONDS = 0.5
"""When the graph breaks because a worker died, the watch knows which one, and why, a little later."""


def start_ray_graph(
    engine: EngineId, config: Config, *, runtime_dir: Path, context: RayContext | None, worker: str = WORKER
) -> RayGraphGroup:
    """The workers of `engine`, every one alive and in the graph. Arguments and errors as `start_ray_actors`."""
    wait = Wait(config.execution.startup_timeout, "startup_timeout")
    with ExitStack() as stack:
        team = open_team(engine, config, context=context, wait=wait, kind=GraphHost, max_concurrency=2)
        stack.callback(team.close)
        labels, topology = team.labels, team.topology
        replies: Replies = queue.SimpleQueue()
        losses = Losses(lambda: replies.put(None))
        pulse = PulseMonitor.open(
            num_peers=topology.world_size,
            runtime_dir=runtime_dir,
            host=team.host,
            limit=config.execution.heartbeat_timeout,
            on_silent=lambda rank, seconds: losses.report(labels[rank], f"it was silent for {seconds:.0f} s"),
        )
        stack.callback(pulse.close)
        payloads = [msgspec.msgpack.encode(_spec(rank, engine, config, team, pulse)) for rank in range(len(labels))]
        sentinels = team.actors.run(worker, payloads)
        watch = Watch(sentinels, topology.nodes, lambda rank, reason: losses.report(labels[rank], reason))
        stack.callback(watch.close)
        hosts = [actor.handle for actor in team.actors.actors]
        wait_until_alive(hosts, wait, losses.check)
        graph = Graph(
            hosts,
            max_steps=config.parallel.pipeline_parallel_size + SPARE_STEPS,
            timeout=config.ray.ray_graph_timeout,
        )
        return RayGraphGroup(team=team, graph=graph, replies=replies, losses=losses, ends=stack.pop_all())


def _spec(rank: int, engine: EngineId, config: Config, team: Team, pulse: PulseMonitor) -> WorkerSpec:
    return WorkerSpec(
        worker=team.topology.worker_id(engine, rank),
        rank=rank,
        config=config,
        topology=team.topology,
        device_index=team.devices[rank],
        is_near=team.topology.nodes[rank] == team.engine_node,
        queue=b"",
        pulse=pulse.ticket(rank),
    )


class _Step(NamedTuple):
    """A step that was sent into the graph."""

    reference: Any


class _Call(NamedTuple):
    """Another call, to be made when the steps before it have come out of the graph."""

    frames: Frames


Replies = queue.SimpleQueue[Reply | None]
"""None: look whether a worker was lost."""


class RayGraphGroup:
    """See `group.WorkerGroup`."""

    def __init__(self, *, team: Team, graph: Graph, replies: Replies, losses: Losses, ends: ExitStack) -> None:
        self.topology = team.topology
        self._team = team
        self._hosts = [actor.handle for actor in team.actors.actors]
        self._graph = graph
        self._replies = replies
        self._losses = losses
        self._ends = ends
        self._is_closed = False
        self._calls: Codec[Call] = Codec(Call)
        self._answers: Codec[Reply] = Codec(Reply)
        self._sent: queue.SimpleQueue[_Step | _Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._take_answers, name="ray-graph-answers", daemon=True)
        self._thread.start()

    def send(self, call: Call) -> None:
        self._losses.check()
        frames = lend(self._calls.encode(call))
        is_step = isinstance(call.body, StepPlan)
        self._sent.put(_Step(self._graph.execute(frames)) if is_step else _Call(frames))

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
        self._losses.expect()
        self._sent.put(None)
        is_lost = self._losses.wait(0)
        self._thread.join(0 if is_lost else END_SECONDS)
        if is_lost or self._thread.is_alive():  # what waits for a worker that hangs would hang too
            self._team.kill()
            self._thread.join(END_SECONDS)
            self._graph.close()
        else:
            self._graph.close()
            end_hosts(self._hosts)
            self._team.actors.wait_until_ended(END_SECONDS)
        self._ends.close()

    def _take_answers(self) -> None:
        """Ends with the group, or with the graph: what breaks that is a loss."""
        try:
            while (sent := self._sent.get()) is not None:
                for answer in self._answers_to(sent):
                    if answer:
                        self._replies.put(self._answers.decode(answer))
        except Exception as error:
            if not self._losses.wait(WATCH_SECONDS):
                self._losses.report("in the compiled graph", explain(error))

    def _answers_to(self, sent: _Step | _Call) -> Iterable[Frames]:
        match sent:
            case _Step(reference):
                return self._graph.results(reference)
            case _Call(frames):
                return call_hosts(self._hosts, frames)
