"""Options of a command: its flags, over those of a file, over those of the environment."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagleray.config.build import build_config, field_owners, unknown_option
from eagleray.config.environment import prefixed_variables
from eagleray.config.flags import given_options
from eagleray.config.log_config import set_up_log
from eagleray.config.option_variables import CONFIG_VARIABLE, with_variables
from eagleray.config.sections import Config
from eagleray.config.vllm_options import TranslatedOptions, translate
from eagleray.errors import ConfigError
from eagleray.log import get_logger

logger = get_logger(__name__)


def server_config(arguments: argparse.Namespace, *, sections: Sequence[str]) -> Config:
    """Return the configuration of the flags, over the file, over the environment. Sets up the log."""
    known = with_variables(_flags_and_file(arguments, sections), field_owners())
    config = build_config(**known.options)
    set_up_log("serve", config)
    _log(known.notes)
    return config


def program_options(arguments: argparse.Namespace, *, sections: Sequence[str], **defaults: Any) -> dict[str, Any]:
    """Return the options of the flags, over the file, over `defaults`, for an `LLM`, which reads the environment."""
    known = TranslatedOptions(defaults).under(_flags_and_file(arguments, sections))
    if known.notes:
        set_up_log("llm", build_config(**known.options))
        _log(known.notes)
    return known.options


def _log(notes: Sequence[str]) -> None:
    for note in notes:
        logger.info("%s", note)


def _flags_and_file(arguments: argparse.Namespace, sections: Sequence[str]) -> TranslatedOptions:
    own = field_owners()
    flags = translate(given_options(arguments, sections=sections), own, as_flags=True)
    path = arguments.config or prefixed_variables(CONFIG_VARIABLE).get(CONFIG_VARIABLE)
    return _read_file(path).under(flags) if path else flags


def _read_file(path: str) -> TranslatedOptions:
    import yaml  # here, because most runs have no --config

    try:
        options = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--config {path}: expected a mapping of options to values")
    known = translate({str(name): value for name, value in options.items()}, field_owners())
    for name in known.options:
        if name not in field_owners():
            raise ConfigError(f"--config {path}: {unknown_option(name)}")
    return known
