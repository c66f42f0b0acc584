"""Lines of the log, and their colours on a terminal."""

from __future__ import annotations

import io
import logging

import pytest

from eagleray.log import LineFormatter, has_colours


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
