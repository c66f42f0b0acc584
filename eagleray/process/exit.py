"""Exit of a process that has lost the process it works for."""

from __future__ import annotations

import os

from eagleray.log import get_logger

logger = get_logger(__name__)


def exit_disconnected(seconds: float) -> None:
    """Exit a worker whose engine sends no heartbeats: the engine treats the worker as lost by now, and must not find
    it running."""
    logger.error("the engine was silent for %.0f s: exiting", seconds)
    os._exit(1)
