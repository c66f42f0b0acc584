"""Notices that a worker has ended, whoever ended it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import RayError, RayTaskError

from eagleray.cluster.nodes import Node, snapshot
from eagleray.cluster.ray_errors import summarize
from eagleray.cluster.spawn import Sentinel
from eagleray.errors import UserError
from eagleray.messages.failure import Failure

CLOSE_SECONDS = 5.0
LOOK_SECONDS = 0.2
"""How often the thread looks whether it is to end. Ray wakes it at once when a worker does."""


class ActorMonitor:
    """A thread that waits on the sentinels of an engine's workers, by rank.

    From it `on_loss(rank, cause)` is called for each worker that exits. If the watch itself fails, every
    worker that is left counts as lost: nobody would notice.
    Must be closed before Ray is disconnected.
    """

    def __init__(
        self,
        sentinels: Sequence[Sentinel],
        nodes: Sequence[str],
        on_loss: Callable[[int, Failure], None],
    ) -> None:
        self._ranks = {sentinel: rank for rank, sentinel in enumerate(sentinels)}
        self._nodes = nodes
        self._on_loss = on_loss
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-ray-actors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; what happens from now on is not reported."""
        self._is_closing.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while self._ranks and not self._is_closing.is_set():
                ready, _ = ray.wait(list(self._ranks), num_returns=1, timeout=LOOK_SECONDS)
                for sentinel in ready:
                    self._report(self._ranks[sentinel], sentinel)
                    del self._ranks[sentinel]
        except Exception as error:
            for rank in self._ranks.values():
                self._on_loss(rank, Failure.noticed(f"it can no longer be watched: {type(error).__name__}: {error}"))

    def _report(self, rank: int, sentinel: Sentinel) -> None:
        self._on_loss(rank, exit_reason(sentinel, self._nodes[rank]))


def exit_reason(sentinel: Sentinel, node_id: str) -> Failure:
    """Return why the actor of a sentinel that is ready exited; the actor ran on that node."""
    try:
        ray.get(sentinel)
    except RayTaskError as error:
        return _failure(error)
    except RayError as error:
        return Failure.noticed(f"{summarize(str(error))}{_node_state(node_id)}")
    return Failure.noticed("it has ended")


def _node_state(node_id: str) -> str:
    try:
        nodes = snapshot()
    except Exception:  # the control store may be gone too: the loss is to be told all the same
        return ""
    node = next((node for node in nodes if node.node_id == node_id), None)
    return "" if node is None else f", on node {node.label}{_death(node)}"


def _failure(error: RayTaskError) -> Failure:
    """The exception that the worker raised, with the traceback that Ray has brought from there."""
    cause = error.cause if isinstance(error.cause, Exception) else error
    return Failure(
        kind=type(cause).__name__,
        message=str(cause),
        traceback=str(error),
        is_user_error=isinstance(cause, UserError),
    )


def _death(node: Node) -> str:
    return "" if node.is_alive else f", which is dead: {node.death or 'no reason given'}"
