"""The log format of every process: time, level, label, message.

Messages go to standard error: standard output belongs to results. On a terminal, warnings and errors have colours
unless the variable NO_COLOR is set.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[1;31m"}
"""Escape sequences before lines of these levels: yellow, red and bold red."""

PLAIN = "\x1b[0m"

LEVELS = ("debug", "info", "warning", "error")


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; call as `get_logger(__name__)`."""
    return logging.getLogger(name)


def setup_logging(label: str, level: str = "info") -> None:
    """Install this process's only log handler. `label` is the identity that prefixes every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(label, has_colours=has_colours(sys.stderr)))
    for name, least in (("eagleray", level), ("uvicorn", "warning")):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least.upper())
        logger.propagate = False


class LineFormatter(logging.Formatter):
    """Formatter of the lines of the process `label`."""

    def __init__(self, label: str, *, has_colours: bool) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {label:<10} %(message)s", "%H:%M:%S")
        self._colours = COLOURS if has_colours else {}

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        colour = self._colours.get(record.levelno)
        return line if colour is None else f"{colour}{line}{PLAIN}"


def has_colours(stream: TextIO) -> bool:
    """Return whether lines on `stream` may have colours: it is a terminal that has them, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
