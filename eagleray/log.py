"""The log of every process: lines of time, level, label and message, or JSON objects with these keys and others.

Messages go to standard error: standard output belongs to results. On a terminal, warnings and errors have colours
unless the variable NO_COLOR is set; JSON never has any.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import msgspec

if TYPE_CHECKING:
    from tqdm import tqdm

COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[1;31m"}
"""Escape sequences before lines of these levels: yellow, red and bold red."""

PLAIN = "\x1b[0m"

ERASE_REST = "\x1b[K"
"""Escape sequence that erases the line from the cursor on."""

STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
"""Attributes of a record that are not given by `extra`."""


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the log, the same for all processes of an instance."""

    level: str = "info"
    """Least severe message that is logged: debug, info, warning or error."""
    format: str = "text"
    """Form of the lines: text, json or none, which leaves the messages to handlers of the root logger."""
    instance: str = ""
    """Name that the user gave to the instance, for JSON objects; empty: none."""
    config: str = ""
    """JSON object for `logging.config.dictConfig`, which takes the place of `format` unless it is incremental; empty:
    none."""


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; call as `get_logger(__name__)`.

    A message about a request is logged with `extra={"request_id": …}`.
    """
    return logging.getLogger(name)


logger = get_logger(__name__)


def setup_process_logging(label: str, settings: LogSettings) -> None:
    """Set up the log of a process that eagleray has started, whose name in Python becomes `label` if the user has
    configured the log.

    A configuration that cannot be applied here, for example because this host lacks a directory, is a warning: the
    process can serve without it.
    """
    if settings.format == "json" or settings.config:  # Ray reads these when imported, and leaves lines unchanged
        os.environ.setdefault("RAY_DISABLE_WORKER_LOG_PREFIX", "1")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if not has_colours(sys.stderr):
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    if settings.config:
        from multiprocessing import current_process  # here, because most logs are not configured

        current_process().name = label  # formatters of users show it as %(processName)s
    try:
        setup_logging(label, settings)
    except ValueError as error:
        logger.warning("the log of this process is not configured by `log_config_file`: %s", error)


def setup_logging(label: str, settings: LogSettings) -> None:
    """Install this process's only log handler, or the handlers that the user has configured. `label` is the identity of
    the process, which every line has.

    Raises `ValueError` for a configuration that cannot be applied; then the handler is installed.
    """
    config = json.loads(settings.config) if settings.config else None
    _install_handler(label, settings, is_replaced=config is not None and not config.get("incremental"))
    if config is not None:
        from logging.config import dictConfig  # here, because most logs are not configured

        try:
            dictConfig({"disable_existing_loggers": False} | config)
        except Exception as error:  # raised by a class that the configuration names
            _install_handler(label, settings, is_replaced=False)
            raise ValueError(f"{error}: {error.__cause__}" if error.__cause__ else str(error)) from None


def _install_handler(label: str, settings: LogSettings, *, is_replaced: bool) -> None:
    handlers = [] if is_replaced or settings.format == "none" else [_handler(label, settings)]
    for name, least in (("eagleray", settings.level), ("uvicorn", "warning")):
        package = logging.getLogger(name)
        package.handlers[:] = handlers
        package.setLevel(least.upper())
        package.propagate = not handlers


def _handler(label: str, settings: LogSettings) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    if settings.format == "json":
        handler.setFormatter(JsonFormatter(label, settings.instance))
    else:
        handler.setFormatter(LineFormatter(label, has_colours=has_colours(sys.stderr), erases=has_escapes(sys.stderr)))
    return handler


class LineFormatter(logging.Formatter):
    """Formatter of the lines of the process `label`. `erases`: whether a line replaces the bar at the cursor, which may
    be another process's."""

    def __init__(self, label: str, *, has_colours: bool, erases: bool = False) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {label:<10} %(message)s", "%H:%M:%S")
        self._colours = COLOURS if has_colours else {}
        self._start = ERASE_REST if erases else ""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        colour = self._colours.get(record.levelno)
        return self._start + (line if colour is None else f"{colour}{line}{PLAIN}")


class JsonFormatter(logging.Formatter):
    """Formatter of a JSON object for each message of the process `label` (by default its name in Python), with the
    attributes that `extra` gives."""

    def __init__(self, label: str = "", instance: str = "") -> None:
        super().__init__()
        self._label = label
        self._instance = {"instance": instance} if instance else {}

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._instance,
            "process": self._label or record.processName,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in STANDARD_ATTRIBUTES and not name.startswith("_"):  # Ray adds one of its own
                entry.setdefault(name, value)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def report_failure(text: str) -> None:
    """Write the error that ends a command, in the form that the lines of the log have on standard error."""
    if _writes_json():
        logger.error("%s", text)
    else:
        print(f"eagleray: {text}", file=sys.stderr)


def has_bars() -> bool:
    """Return whether standard error may have bars of progress: it is a terminal, and its lines are not JSON."""
    return sys.stderr.isatty() and not _writes_json()


class BarStream:
    """Standard error for a bar of tqdm. The cursor waits at the beginning of the bar: the next line of any process
    begins there instead of behind the bar."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text if text.endswith("\n") else f"{text}\r")

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def open_bar(*, is_shown: bool, **options: Any) -> tqdm[NoReturn]:
    """Return a bar of tqdm on standard error, which lines of the log replace."""
    from tqdm import tqdm  # here, because most processes have no bars

    return tqdm(file=BarStream(), dynamic_ncols=True, disable=not is_shown, **options)


def _writes_json() -> bool:
    return any(
        isinstance(handler, logging.StreamHandler)
        and handler.stream is sys.stderr
        and isinstance(handler.formatter, JsonFormatter)
        for handler in logging.getLogger("eagleray").handlers
    )


def has_colours(stream: TextIO) -> bool:
    """Return whether lines on `stream` may have colours: it is a terminal that has them, and NO_COLOR is not set."""
    return has_escapes(stream) and not os.environ.get("NO_COLOR")


def has_escapes(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that follows escape sequences."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"
