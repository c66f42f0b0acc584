"""The option `log_config_file`: what the file may hold, and what reaches the processes."""

from __future__ import annotations

import json

import pytest

from eagleray.config.build import build_config
from eagleray.config.log_config import log_settings, set_up_log
from eagleray.errors import ConfigError


def sent(file, **options):
    """Return the configuration that processes get."""
    return json.loads(log_settings(build_config(log_config_file=file, **options)).config)


@pytest.mark.parametrize("is_path", [True, False])
def test_log_config_file_content_is_sent_to_processes(tmp_path, is_path):
    text = '{"version": 1, "loggers": {"eagleray": {"level": "DEBUG"}}}'
    (tmp_path / "log.json").write_text(text)
    assert sent(str(tmp_path / "log.json") if is_path else f" {text}") == json.loads(text)


def test_log_config_file_of_vllm_is_for_our_loggers():
    line = "%(levelname)s (%(vllm_process_name)s) %(fileinfo)s:%(lineno)d %(message)s"
    given = {
        "version": 1,
        "formatters": {
            "theirs": {"class": "vllm.logging_utils.ColoredFormatter", "format": line, "log_level": "INFO"},
            "made": {"()": "vllm.logging_utils.NewLineFormatter", "datefmt": "%H"},
            "own": {"class": "logging.Formatter", "format": line},
        },
        "loggers": {"vllm": {"level": "DEBUG"}, "other": {}},
    }
    config = sent(json.dumps(given))
    assert config["formatters"] == {
        "theirs": {"format": "%(levelname)s (%(processName)s) %(filename)s:%(lineno)d %(message)s"},
        "made": {"datefmt": "%H"},
        "own": given["formatters"]["own"],
    }
    assert config["loggers"] == given["loggers"] | {"eagleray": {"level": "DEBUG"}}
    both = {"version": 1, "loggers": {"vllm": {"level": "DEBUG"}, "eagleray": {"level": "INFO"}}}
    assert sent(json.dumps(both)) == both


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "log.json: must hold a JSON object .* but holds a list"),
        ('{"version": 1,', "log.json: not valid JSON: Expecting"),
        ("[" * 100_000, "log.json: not valid JSON: maximum recursion"),
        (" " * (2**20 + 1), "log.json: is larger than 1 MiB"),
        (None, "log.json: cannot be read: .*No such file"),
    ],
)
def test_log_config_file_that_is_no_object_is_refused(tmp_path, text, message):
    path = tmp_path / "log.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"option `log_config_file`: .*{message}"):
        build_config(log_config_file=str(path))


@pytest.mark.parametrize("form", ["json", "none"])
def test_log_config_file_beside_log_format_is_refused_unless_incremental(form):
    with pytest.raises(ConfigError, match=f"option `log_format` is {form}, but the file"):
        build_config(log_config_file='{"version": 1}', log_format=form)
    assert sent('{"version": 1, "incremental": true}', log_format=form)["incremental"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "dictionary doesn't specify a version"),
        ({"version": 1, "loggers": {"eagleray": {"level": "LOUD"}}}, "logger 'eagleray': Unknown level: 'LOUD'"),
        ({"version": 1, "formatters": {"f": {"class": "nobody.Formatter"}}}, "formatter 'f': No module named 'nobody'"),
        (
            {"version": 1, "handlers": {"h": {"class": "logging.FileHandler", "filename": "/nowhere/x"}}},
            "handler 'h': .* No such file or directory: '/nowhere/x'",
        ),
    ],
)
def test_set_up_log_configuration_that_python_refuses_is_one_sentence(config, message):
    with pytest.raises(ConfigError, match=f"option `log_config_file`: Python's logging does not take it: .*{message}"):
        set_up_log("llm", build_config(log_config_file=json.dumps(config)))


def test_log_of_outputs_without_log_of_requests_is_refused():
    with pytest.raises(ConfigError, match="option `enable_log_outputs` is for the log of requests: add"):
        build_config(enable_log_outputs=True)
