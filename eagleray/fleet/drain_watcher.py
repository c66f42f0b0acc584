"""Watches for nodes that drain: that are about to go, because a cloud provider or an autoscaler has given notice.

Owned by the process that drives Ray, in a thread of its own.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from eagleray.cluster.nodes import list_nodes
from eagleray.cluster.placement import DrainingEngine, EnginePlacer
from eagleray.fleet import timeouts
from eagleray.identity import EngineId
from eagleray.log import get_logger
from eagleray.messages.lifecycle import DriverToLauncher, NodeDraining
from eagleray.transport.inbox import Outbox

logger = get_logger(__name__)

LauncherOutbox = Outbox[str, DriverToLauncher]


class DrainWatcher:
    """Reports the engines that are to leave their nodes. Make one with `start`. `open_outbox` opens an outbox to the
    launcher."""

    def __init__(self, placer: EnginePlacer, open_outbox: Callable[[], LauncherOutbox]) -> None:
        self._placer = placer
        self._open_outbox = open_outbox
        self._is_closed = threading.Event()
        self._stuck: set[EngineId] = set()
        """Engines without room elsewhere, which the log has named."""
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="drain-watcher", daemon=True)

    @classmethod
    def start(cls, placer: EnginePlacer, open_outbox: Callable[[], LauncherOutbox]) -> DrainWatcher:
        watcher = cls(placer, open_outbox)
        watcher._thread.start()
        return watcher

    def close(self) -> None:
        """Stop the thread, which must not use Ray when the connection is closed."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        outbox = self._open_outbox()
        while not self._is_closed.wait(timeouts.DRAIN_POLL_SECONDS):
            try:
                for notice in self.notices(self._placer.draining_engines(list_nodes())):
                    outbox.send("launcher", notice)
                self._has_failed = False
            except Exception as error:  # the next look may succeed; a lost control store ends this process anyway
                if not self._has_failed:
                    logger.warning("nodes that drain cannot be listed at present: %s", error)
                self._has_failed = True
        outbox.close()

    def notices(self, engines: Sequence[DrainingEngine]) -> list[NodeDraining]:
        """Return the notices of the engines that have room elsewhere, and log the others once."""
        found = []
        for one in engines:
            due = one.node.drain_deadline
            seconds = None if due is None or due == math.inf else due - time.time()
            if one.has_room:
                found.append(NodeDraining(one.engine, one.node.label, seconds))
            elif one.engine not in self._stuck:
                logger.warning(
                    "%s is on node %s, which drains%s; no other node has room, so it stays there",
                    one.engine.label,
                    one.node.label,
                    "" if seconds is None else f" and goes in {seconds:.0f} s",
                )
        self._stuck = {one.engine for one in engines if not one.has_room}
        return found
