"""Exits of a process that cannot end in an orderly way."""

from __future__ import annotations

import os

from eagleray.log import get_logger

logger = get_logger(__name__)


def exit_disconnected(seconds: float) -> None:
    """Exit a worker whose engine sends no heartbeats: the engine treats the worker as lost by now, and must not find
    it running."""
    logger.error("the engine was silent for %.0f s: exiting", seconds)
    os._exit(1)


def exit_broken_device() -> None:
    """Exit a worker that has reported a failure on its GPU: to leave groups and free memory there might wait forever,
    and the system does it when the process ends."""
    logger.error("exiting at once, since the GPU may not answer after a failure")
    os._exit(1)
