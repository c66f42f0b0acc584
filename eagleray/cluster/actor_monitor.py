"""Monitor that notices the exit of an engine's workers, whatever ended them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import RayError, RayTaskError

from eagleray.cluster.nodes import list_nodes
from eagleray.cluster.ray_errors import summarize
from eagleray.cluster.spawn import Sentinel
from eagleray.cluster.timeouts import MONITOR_STOP_SECONDS, WAIT_SECONDS
from eagleray.errors import EagleRayError, UserError
from eagleray.messages.failure import Failure


class ActorMonitor:
    """A thread that waits for the sentinels of an engine's workers.

    It calls `on_exit(rank, cause)` for each worker that exits. If the monitor itself fails, every remaining worker is
    reported, because nothing would notice its exit.
    Must be closed before Ray is disconnected.
    """

    def __init__(
        self,
        sentinels: Sequence[Sentinel],
        nodes: Sequence[str],
        on_exit: Callable[[int, Failure], None],
    ) -> None:
        """`sentinels`, `nodes`: of the workers, by rank; `on_exit` is called from the thread."""
        self._ranks = {sentinel: rank for rank, sentinel in enumerate(sentinels)}
        self._nodes = nodes
        self._on_exit = on_exit
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch-ray-actors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop monitoring; later exits are not reported."""
        self._is_closing.set()
        self._thread.join(MONITOR_STOP_SECONDS)

    def _run(self) -> None:
        try:
            while self._ranks and not self._is_closing.is_set():
                ready, _ = ray.wait(list(self._ranks), num_returns=1, timeout=WAIT_SECONDS)
                for sentinel in ready:
                    rank = self._ranks[sentinel]
                    self._on_exit(rank, exit_reason(sentinel, self._nodes[rank]))
                    del self._ranks[sentinel]
        except Exception as error:
            for rank in self._ranks.values():
                self._on_exit(rank, Failure.noticed(f"it can no longer be watched: {type(error).__name__}: {error}"))


def exit_reason(sentinel: Sentinel, node_id: str) -> Failure:
    """Return why the actor of a sentinel that is ready has exited; the actor ran on that node."""
    try:
        ray.get(sentinel)
    except RayTaskError as error:
        return _failure(error)
    except RayError as error:
        return Failure.noticed(f"{summarize(str(error))}{_describe_node(node_id)}")
    return Failure.noticed("it has ended")


def _describe_node(node_id: str) -> str:
    try:
        nodes = list_nodes()
    except Exception:  # the control store may be gone too: the exit must be reported all the same
        return ""
    node = next((node for node in nodes if node.node_id == node_id), None)
    if node is None:
        return ""
    return f", on node {node.label}" + ("" if node.is_alive else f", which is dead: {node.death or 'no reason given'}")


def _failure(error: RayTaskError) -> Failure:
    """Convert the exception that the actor raised; the traceback is the one that Ray has brought from there."""
    cause = error.cause if isinstance(error.cause, Exception) else error
    return Failure(
        kind=type(cause).__name__,
        message=str(cause),
        traceback="" if isinstance(cause, EagleRayError) else str(error),  # as in `Failure.of`
        is_user_error=isinstance(cause, UserError),
    )
