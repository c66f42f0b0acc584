"""The log format of every process: time, level, label, message.

Messages go to standard error: standard output belongs to results.
"""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; call as `get_logger(__name__)`."""
    return logging.getLogger(name)


def setup_logging(label: str, level: str = "info") -> None:
    """Install this process's only log handler. `label` is the identity that prefixes every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {label:<10} %(message)s", "%H:%M:%S"))
    for name, least in (("eagleray", level), ("uvicorn", "warning")):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least.upper())
        logger.propagate = False
