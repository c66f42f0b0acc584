"""Lines of the log, and their colours on a terminal."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import sys
from datetime import UTC, datetime

import pytest

from eagleray.log import (
    ERASE_REST,
    LineFormatter,
    LogSettings,
    has_bars,
    has_colours,
    open_bar,
    report_failure,
    setup_logging,
    setup_process_logging,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def line(level, *, colours):
    record = logging.LogRecord("eagleray.x", level, __file__, 1, "5 of %d", (7,), None)
    return LineFormatter("engine-0", has_colours=colours).format(record)


def test_line_formatter_levels_look_different_with_colours():
    levels = (logging.INFO, logging.WARNING, logging.ERROR)
    starts = [line(level, colours=True).split("m", 1)[0] for level in levels[1:]]
    assert starts == ["\x1b[33", "\x1b[31"]
    assert "\x1b" not in line(logging.INFO, colours=True)
    assert all(line(level, colours=True).endswith("5 of 7\x1b[0m") for level in levels[1:])


def test_line_formatter_without_colours_is_plain():
    for level in (logging.INFO, logging.ERROR):
        assert line(level, colours=False).split()[1:] == [logging.getLevelName(level), "engine-0", "5", "of", "7"]


def test_line_formatter_line_on_a_terminal_replaces_a_bar(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(os, "environ", {"TERM": "xterm", "NO_COLOR": "1"})
    setup_logging("engine-0", LogSettings())
    bar = open_bar(total=2, desc="compiling kernels", is_shown=has_bars())
    bar.update()
    logging.getLogger("eagleray.x").info("joined")
    bar.close()
    before, after = stream.getvalue().split("joined")
    *_, bar_text, log_line = before.split("\r")
    assert bar_text.startswith("compiling kernels:")
    assert log_line.startswith(ERASE_REST)
    assert after.endswith("\n")


@pytest.mark.parametrize(
    ("stream", "variables", "expected"),
    [
        (Terminal(), {}, True),
        (io.StringIO(), {}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
    ],
)
def test_has_colours_follows_stream_and_variables(monkeypatch, stream, variables, expected):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert has_colours(stream) is expected


def logged(monkeypatch, settings, log, setup=setup_logging):
    """Return the lines on a terminal of what `log` logs."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(os, "environ", {"TERM": "xterm"})
    setup("engine-0", settings)
    log(logging.getLogger("eagleray.x"))
    return stream.getvalue().splitlines()


def test_json_log_line_is_an_object_without_colours(monkeypatch):
    before = datetime.now(UTC)
    [line] = logged(monkeypatch, LogSettings(format="json"), lambda log: log.warning("5 of %d\nä", 7))
    assert line.isascii() and line.isprintable()
    entry = json.loads(line)
    assert before.replace(microsecond=0) <= datetime.fromisoformat(entry.pop("time")) <= datetime.now(UTC)
    assert isinstance(entry.pop("pid"), int)
    assert entry == {"level": "warning", "process": "engine-0", "logger": "eagleray.x", "message": "5 of 7\nä"}


def test_json_log_line_has_attributes_of_the_record_and_the_exception(monkeypatch):
    def fail(log):
        try:
            raise ValueError("no\nluck")
        except ValueError:
            log.exception("failed", extra={"request_id": "r1", "odd": {1}, "level": 5})

    [line] = logged(monkeypatch, LogSettings(format="json", instance="blue"), fail)
    entry = json.loads(line)
    assert (entry["request_id"], entry["odd"], entry["level"]) == ("r1", "{1}", "error")
    assert (entry["instance"], entry["exception"].splitlines()[-2:]) == ("blue", ["ValueError: no", "luck"])


def test_log_format_none_leaves_messages_to_the_root_logger(monkeypatch, caplog):
    assert logged(monkeypatch, LogSettings(format="none"), lambda log: log.info("for the root")) == []
    assert caplog.messages == ["for the root"]


def test_log_level_hides_what_is_less_severe(monkeypatch):
    def log_two(log):
        log.info("hidden")
        log.warning("shown")

    [line] = logged(monkeypatch, LogSettings(level="warning"), log_two)
    assert "shown" in line


def test_log_config_file_handlers_take_the_place_of_ours(monkeypatch, tmp_path):
    path = tmp_path / "log"
    config = {
        "version": 1,
        "formatters": {
            "json": {"()": "eagleray.log.JsonFormatter"},
            "plain": {"format": "%(processName)s %(message)s"},
        },
        "handlers": {
            "file": {"class": "logging.FileHandler", "filename": str(path), "formatter": "json"},
            "terminal": {"class": "logging.StreamHandler", "formatter": "plain", "level": "ERROR"},
        },
        "loggers": {"eagleray": {"handlers": ["file", "terminal"], "propagate": False}},
    }
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "MainProcess")

    def log_three(log):
        for level in (logging.DEBUG, logging.INFO, logging.ERROR):
            log.log(level, "a message", extra={"request_id": level})

    settings = LogSettings(config=json.dumps(config))
    assert logged(monkeypatch, settings, log_three, setup_process_logging) == ["engine-0 a message"]
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(entry["process"], entry["request_id"]) for entry in entries] == [("engine-0", 20), ("engine-0", 40)]


def test_log_config_file_without_our_logger_leaves_messages_to_the_root_logger(monkeypatch, caplog):
    settings = LogSettings(config='{"version": 1}')
    assert logged(monkeypatch, settings, lambda log: log.info("for the root")) == []
    assert caplog.messages == ["for the root"]


def test_log_config_file_that_is_incremental_sets_levels_alone(monkeypatch):
    config = {"version": 1, "incremental": True, "loggers": {"eagleray.x": {"level": "DEBUG"}}}
    settings = LogSettings(config=json.dumps(config), format="json")
    try:
        [line] = logged(monkeypatch, settings, lambda log: log.debug("fine"))
    finally:
        logging.getLogger("eagleray.x").setLevel(logging.NOTSET)
    assert json.loads(line)["level"] == "debug"


def test_setup_process_logging_configuration_that_fails_is_a_warning(monkeypatch):
    handler = {"class": "logging.FileHandler", "filename": "/nowhere/x"}
    config = {"version": 1, "handlers": {"h": handler}, "loggers": {"eagleray": {"handlers": ["h"], "level": "ERROR"}}}
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "MainProcess")
    settings = LogSettings(config=json.dumps(config))
    warning, line = logged(monkeypatch, settings, lambda log: log.info("goes on"), setup_process_logging)
    assert "not configured by `log_config_file`: Unable to configure handler 'h'" in warning
    assert line.endswith("goes on")


@pytest.mark.parametrize(("form", "has_objects"), [("text", False), ("json", True), ("none", False)])
def test_terminal_with_json_objects_has_no_bars_and_no_plain_errors(monkeypatch, form, has_objects):
    bars = []

    def fail(log):
        bars.append(has_bars())
        report_failure("out of luck")

    lines = logged(monkeypatch, LogSettings(format=form), fail)
    assert bars == [not has_objects]
    assert [json.loads(line)["message"] if has_objects else line for line in lines] == [
        "out of luck" if has_objects else "eagleray: out of luck"
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LogSettings(), {}),
        (LogSettings(format="json"), {"RAY_DISABLE_WORKER_LOG_PREFIX": "1", "RAY_DEDUP_LOGS": "0"}),
        (LogSettings(config='{"version": 1}'), {"RAY_DISABLE_WORKER_LOG_PREFIX": "1", "RAY_DEDUP_LOGS": "0"}),
    ],
)
def test_setup_process_logging_has_ray_print_lines_as_they_are(monkeypatch, settings, expected):
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "MainProcess")
    logged(monkeypatch, settings, lambda log: None, setup_process_logging)
    assert os.environ == {"TERM": "xterm"} | expected


def test_setup_process_logging_has_ray_print_no_colours_outside_of_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(os, "environ", {})
    setup_process_logging("engine-0", LogSettings())
    assert os.environ == {"RAY_COLOR_PREFIX": "0"}
