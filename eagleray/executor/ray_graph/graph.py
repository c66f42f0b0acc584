"""Workers as the nodes of a Ray compiled graph: every step goes to all of them, and all of their replies come back.

The graph is flat. Stages and tensor-parallel ranks exchange tensors by themselves; the graph carries a plan, and the
sampler's result. A message travels as a list of its header, bytes, and its large arrays: Ray moves those through shared
memory without copying. Results are detached from that memory before any other code uses them.

Between nodes a channel has room for one message, and the raylet that receives another waits in its main thread, where
nothing wakes it: it handles nothing else meanwhile, not even the message that its reader waits for. If the channel is
closed then, the raylet aborts. So nothing may be sent to another node before all ranks have answered the step ahead of
it, and the graph must not be torn down while a message is on its way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.dag import InputNode, MultiOutputNode
from ray.exceptions import RayChannelTimeoutError, RayTaskError

from eagleray.cluster.actor_process import ActorProcess, load_target
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.ray_errors import summarize
from eagleray.cluster.timeouts import WAIT_SECONDS
from eagleray.executor.ray_graph.detach import detach

if TYPE_CHECKING:
    from eagleray.executor.ray_graph.frame_handler import WorkerFrameHandler

Frames = list[Any]
"""The first is bytes, the others are uint8 arrays."""

MAX_START_SECONDS = 600.0
"""Bound of an actor's wait for its worker, in case the engine, whose own deadline is shorter, is gone."""

DRAIN_SECONDS = 0.3
"""Time for the messages that a dead actor had sent to arrive."""

BUFFER_BYTES = 1 << 20
"""Size of a channel's buffer; Ray allocates another one for larger messages."""


class GraphActor(ActorProcess):
    """Actor of two threads: `run` creates the worker and is its sentinel, and meanwhile `handle` is called by the
    graph's thread, or by an actor call while no step is in flight."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._handler: WorkerFrameHandler | None = None
        self._is_ready = threading.Event()
        self._is_stopping = threading.Event()

    def run(self, target: str, payload: bytes) -> None:
        """Create the worker by `target`, `module:function`, which returns a `WorkerFrameHandler`; wait for `stop`."""
        self._handler = load_target(target)(payload)
        self._is_ready.set()
        self._is_stopping.wait()
        self._handler.close()

    def wait_until_ready(self) -> None:
        """Return once the worker exists; if its creation raises, `run` reports that."""
        self._is_ready.wait(MAX_START_SECONDS)

    def handle(self, frames: Frames) -> Frames:
        assert self._handler is not None, "a call before the worker was created"
        return to_ray_frames(self._handler.handle(detach(frames)))

    def stop(self) -> None:
        """Let `run` return."""
        self._is_stopping.set()


class Graph:
    """The compiled graph over `GraphActor`s. Its results are in the order of the actors.

    If an actor is on another node, a step may be sent only after the reply to the one before it.
    """

    def __init__(self, actors: Sequence[Any], *, max_steps: int, timeout: float) -> None:
        logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)  # our own errors name the cause
        with InputNode() as frames:
            graph = MultiOutputNode([actor.handle.bind(frames) for actor in actors])
        self._timeout = timeout
        self._compiled: Any = graph.experimental_compile(
            _submit_timeout=timeout, _buffer_size_bytes=BUFFER_BYTES, _max_inflight_executions=max_steps
        )
        # When an actor dies, Ray would tear the graph down at once, while the others are sending. `close` does it.
        self._compiled._monitor._teardown_done = True
        # Closing registers what was not read yet, which aborts this process if the memory was lost with a dead actor.
        for channel in self._compiled.dag_output_channels:
            channel.ensure_registered_as_reader()

    def execute(self, frames: Frames) -> Any:
        """Send a message to every actor; return a reference for `results`."""
        return self._compiled.execute(frames)

    def results(self, reference: Any, copy: Callable[[Any], Any] = detach) -> list[Frames]:
        """Return the reply of each actor, in memory of this process. Called once, in the order of `execute`.

        Raises the exception of an actor as soon as one raises, `ray.exceptions.RayChannelTimeoutError` after the
        timeout, also when an actor is dead, and `RayChannelError` when the graph is closed meanwhile.
        """
        try:
            replies: list[Frames] = copy(ray.get(reference, timeout=self._timeout))
        except RayTaskError as error:
            raise error.cause from None
        return replies

    def close(self, *, are_actors_dead: bool = False) -> None:
        """Tear the graph down. The actors must be idle, with a reply to every step, or dead."""
        if are_actors_dead:
            time.sleep(DRAIN_SECONDS)
        self._compiled._monitor._teardown_done = False
        self._compiled.teardown()
        # Ray's own helper actor of the graph: after a failure, remaining references to the graph would keep it alive
        ray.kill(self._compiled._proxy_actor)


def wait_until_ready(actors: Sequence[Any], deadline: Deadline, check: Callable[[], None]) -> None:
    """Wait until every actor that was told to `run` has created its worker. `check` is called repeatedly and may
    raise."""
    waiting = [actor.wait_until_ready.remote() for actor in actors]
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=WAIT_SECONDS)
        check()
        ray.get(ready)
        if waiting:
            deadline.check(partial(str.format, "{} of {} workers are not made yet", len(waiting), len(actors)))


def call_actors(actors: Sequence[Any], frames: Frames) -> Iterator[Frames]:
    """Call every actor beside the graph, which must be idle. Yields replies as they arrive, in memory of this process.

    Raises the exception of an actor, and Ray's own when one of them dies.
    """
    waiting = [actor.handle.remote(frames) for actor in actors]
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        for reference in ready:
            try:
                yield detach(ray.get(reference))
            except RayTaskError as error:
                raise error.cause from None


def stop_actors(actors: Sequence[Any]) -> None:
    """Let every actor's `run` return."""
    for actor in actors:
        actor.stop.remote()


def explain_failure(error: Exception) -> str:
    """Return in one line why the graph failed."""
    if isinstance(error, RayChannelTimeoutError):
        return "no result within the time that `ray_graph_timeout` allows: a worker hangs, or the step takes longer"
    return f"{type(error).__name__}: {summarize(str(error))}"


def to_ray_frames(frames: Sequence[Any]) -> Frames:
    """Return frames in the form that Ray moves without copying: the header as bytes, the others as arrays over their
    memory."""
    return [bytes(frame) if index == 0 else np.frombuffer(frame, np.uint8) for index, frame in enumerate(frames)]
