"""Settings of the log from the options: level and format, or the file of the option `log_config_file`.

The file is a configuration for `logging.config.dictConfig`. It is read once, and its content is sent to every process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from eagleray.config.json_files import read_bounded
from eagleray.config.observability import ObservabilityConfig
from eagleray.config.sections import Config
from eagleray.errors import CheckpointError, ConfigError
from eagleray.log import LogSettings, setup_logging

MAX_FILE_BYTES = 2**20

VLLM_FORMATTERS = ("vllm.logging_utils.", "vllm.logging.")
"""Prefixes of the class names of vLLM's formatters."""

VLLM_ATTRIBUTES = {"%(fileinfo)s": "%(filename)s", "%(vllm_process_name)s": "%(processName)s"}
"""Attributes that vLLM adds to records, and Python's equivalents."""


def log_settings(config: Config) -> LogSettings:
    """Return the settings of the log of all processes."""
    options = config.observability
    return LogSettings(
        level=options.log_level,
        format=options.log_format,
        instance=config.execution.instance_name or "",
        config=options.log_config_file or "",
    )


def set_up_log(label: str, config: Config) -> None:
    """Set up the log of this process, a command or a program. Raises `ConfigError` for a file that Python's logging
    does not take."""
    try:
        setup_logging(label, log_settings(config))
    except ValueError as error:
        raise ConfigError(f"option `log_config_file`: Python's logging does not take it: {error}") from None


def with_log_config(options: ObservabilityConfig) -> ObservabilityConfig:
    """Return the options with the content of `log_config_file` in place of its path. Raises `ConfigError`, also for
    options that contradict each other."""
    if options.enable_log_outputs and not options.enable_log_requests:
        raise ConfigError("option `enable_log_outputs` is for the log of requests: add `enable_log_requests`")
    if options.log_config_file is None:
        return options
    config = _read(options.log_config_file)
    if options.log_format != "text" and not config.get("incremental"):
        raise ConfigError(
            f"option `log_format` is {options.log_format}, but the file of `log_config_file` says how lines look: drop "
            "one of the two"
        )
    return msgspec.structs.replace(options, log_config_file=json.dumps(_for_our_loggers(config)))


def _read(given: str) -> dict[str, Any]:
    """Return the JSON object that is `given`, or is in the file of this path."""
    try:
        is_object = given.lstrip().startswith("{")
        text = given if is_object else read_bounded(Path(given).expanduser(), max_bytes=MAX_FILE_BYTES)
        config = json.loads(text)
    except (CheckpointError, ValueError, RecursionError) as error:
        source = "" if isinstance(error, CheckpointError) else f"{given[:200]}: not valid JSON: "
        raise ConfigError(f"option `log_config_file`: {source}{error}") from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"option `log_config_file`: {given[:200]}: must hold a JSON object for Python's logging.config.dictConfig, "
            f"but holds a {type(config).__name__}"
        )
    return config


def _for_our_loggers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the settings of vLLM's logger for ours too, unless the file names ours, and with
    Python's formatters in place of vLLM's."""
    changed = dict(config)
    if isinstance(loggers := config.get("loggers"), dict) and "vllm" in loggers:
        changed["loggers"] = {"eagleray": loggers["vllm"]} | loggers
    if isinstance(formatters := config.get("formatters"), dict):
        changed["formatters"] = {name: _formatter(entry) for name, entry in formatters.items()}
    return changed


def _formatter(entry: Any) -> Any:
    if not isinstance(entry, dict) or not str(entry.get("class", entry.get("()"))).startswith(VLLM_FORMATTERS):
        return entry
    kept = {name: value for name, value in entry.items() if name in ("format", "datefmt", "style")}
    for theirs, ours in VLLM_ATTRIBUTES.items():
        if isinstance(kept.get("format"), str):
            kept["format"] = kept["format"].replace(theirs, ours)
    return kept
