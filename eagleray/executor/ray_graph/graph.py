"""Workers as the nodes of a Ray compiled graph: every step goes to all of them, and all of their answers come back.

The graph is flat. Stages and tensor-parallel ranks exchange tensors by themselves; what travels here is a plan, and
what the sampler has to say. A message travels as a list of its header, bytes, and its large arrays: Ray moves those
through shared memory without copying. What comes out is detached from that memory before anybody else sees it.

Between nodes a channel has room for one message, and the raylet that receives another waits in its main thread, where
nothing wakes it: it hears of nothing else meanwhile, not even of the message that its reader is waiting for. If the
channel is closed then, it aborts. So nothing may be sent to another node before the step ahead of it is answered by
all, and nothing may be taken apart while a message is on its way.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import ray
from ray.dag import InputNode, MultiOutputNode
from ray.exceptions import RayChannelTimeoutError, RayTaskError

from eagleray.cluster.actor_process import ActorProcess
from eagleray.cluster.deadline import Deadline
from eagleray.cluster.ray_errors import summarize
from eagleray.executor.ray_graph.detach import detach

Frames = list[Any]
"""The first is bytes, the others are uint8 arrays."""

ALIVE_SECONDS = 600.0
LOOK_SECONDS = 0.2
BUFFER_BYTES = 1 << 20
"""Of a channel's slot; larger messages make Ray allocate another."""
QUIET_SECONDS = 0.3
"""After the death of a host, for what it had sent to arrive."""


class FrameHandler(Protocol):
    def handle(self, frames: list[Any]) -> list[Any]: ...

    def close(self) -> None: ...


class GraphActor(ActorProcess):
    """`run` makes the worker, and is its sentinel; meanwhile `handle` is called by the graph's thread, or by an actor
    call while no step is under way. An actor of two threads."""

    def __init__(self, label: str, log_level: str) -> None:
        super().__init__(label, log_level)
        self._edge: FrameHandler | None = None
        self._is_alive = threading.Event()
        self._is_ending = threading.Event()

    def run(self, target: str, payload: bytes) -> None:
        """`target`, `module:function`, makes an object with `handle(frames)` and `close()` of `payload`."""
        module, _, function = target.partition(":")
        self._edge = getattr(importlib.import_module(module), function)(payload)
        self._is_alive.set()
        self._is_ending.wait()
        self._edge.close()

    def wait_until_alive(self) -> None:
        """Returns once the worker is made; if that raises, `run` tells."""
        self._is_alive.wait(ALIVE_SECONDS)

    def handle(self, frames: Frames) -> Frames:
        assert self._edge is not None, "a call before the worker was made"
        return lend(self._edge.handle(detach(frames)))

    def end(self) -> None:
        """Let `run` return."""
        self._is_ending.set()


class Graph:
    """The compiled graph over some `GraphActor`s. Its results are in the order of the hosts.

    If any of them is on another node, a step may be sent only when the one before it has been answered.
    """

    def __init__(self, hosts: Sequence[Any], *, max_steps: int, timeout: float) -> None:
        logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)  # our own errors name the cause
        with InputNode() as frames:
            graph = MultiOutputNode([host.handle.bind(frames) for host in hosts])
        self._timeout = timeout
        self._compiled: Any = graph.experimental_compile(
            _submit_timeout=timeout, _buffer_size_bytes=BUFFER_BYTES, _max_inflight_executions=max_steps
        )
        # When a host dies, Ray would at once take the graph apart, while the others are sending. We do it, in `close`.
        self._compiled._monitor._teardown_done = True
        # Closing registers what was not read yet, and that aborts this process if the memory went with a dead host.
        for channel in self._compiled.dag_output_channels:
            channel.ensure_registered_as_reader()

    def execute(self, frames: Frames) -> Any:
        """Send a message to every host; a reference for `results`."""
        return self._compiled.execute(frames)

    def results(self, reference: Any, edge: Callable[[Any], Any] = detach) -> list[Frames]:
        """What each host has answered, in memory of our own. To be asked once, in the order of `execute`.

        Raises what a host raises, as soon as one does, and `ray.exceptions.RayChannelTimeoutError` after the timeout,
        also when a host is dead; `RayChannelError` when the graph is closed meanwhile.
        """
        try:
            answers: list[Frames] = edge(ray.get(reference, timeout=self._timeout))
        except RayTaskError as error:
            raise error.cause from None
        return answers

    def close(self, *, are_hosts_dead: bool = False) -> None:
        """Take the graph apart. The hosts are idle, all steps being answered, or else they are dead."""
        if are_hosts_dead:
            time.sleep(QUIET_SECONDS)
        self._compiled._monitor._teardown_done = False
        self._compiled.teardown()
        # Ray's own helper of the graph; after a failure, what still refers to the graph would keep it alive
        ray.kill(self._compiled._proxy_actor)


def wait_until_alive(hosts: Sequence[Any], wait: Deadline, check: Callable[[], None]) -> None:
    """Until every host, told to `run`, has made its worker. `check` is called again and again and may raise."""
    waiting = [host.wait_until_alive.remote() for host in hosts]
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK_SECONDS)
        check()
        ray.get(ready)
        if waiting:
            wait.note(partial(_not_made, len(waiting), len(hosts)))


def _not_made(count: int, of: int) -> str:
    return f"{count} of {of} workers are not made yet"


def call_actors(hosts: Sequence[Any], frames: Frames) -> Iterator[Frames]:
    """Call every host beside the graph, which must be idle: what they say, as they say it, in memory of our own.

    Raises what a host raises, and what Ray raises when one of them dies.
    """
    waiting = [host.handle.remote(frames) for host in hosts]
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        for reference in ready:
            try:
                yield detach(ray.get(reference))
            except RayTaskError as error:
                raise error.cause from None


def stop_actors(hosts: Sequence[Any]) -> None:
    """Let every host's `run` return."""
    for host in hosts:
        host.end.remote()


def explain(error: Exception) -> str:
    """What broke the graph, in a line."""
    if isinstance(error, RayChannelTimeoutError):
        return "no result within the time that `ray_graph_timeout` allows: a worker hangs, or the step takes longer"
    return f"{type(error).__name__}: {summarize(str(error))}"


def lend(frames: Sequence[Any]) -> Frames:
    """Frames as Ray takes them without copying: the header as bytes, the others as arrays over their memory."""
    return [bytes(frame) if index == 0 else np.frombuffer(frame, np.uint8) for index, frame in enumerate(frames)]
