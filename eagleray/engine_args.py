"""Options of an instance as an object, which programs pass around before they start the instance."""

from __future__ import annotations

import argparse
from typing import Any, Self, Unpack

import msgspec

from eagleray.config.build import build_config, field_owners, unknown_option
from eagleray.config.flags import add_program_flags, given_options
from eagleray.config.keywords import LLMKeywords
from eagleray.config.log_config import set_up_log
from eagleray.config.option_variables import with_variables
from eagleray.config.sections import Config
from eagleray.config.serving import ServingConfig
from eagleray.config.vllm_options import option_fate, translate
from eagleray.errors import ConfigError
from eagleray.log import get_logger
from eagleray.preflight import checked_config

logger = get_logger(__name__)

SECTIONS = tuple(field.name for field in msgspec.structs.fields(Config) if field.type is not ServingConfig)
"""Sections of the configuration whose options programs take."""


class EngineArgs:
    """The options of `eagleray serve` by their names, except those of the HTTP server, as attributes that may be
    assigned. Options that are not given have their defaults.

    Options of vLLM are accepted too, see "Options" in docs/compatibility.md.

    Raises `ConfigError` for an option that does not exist; values are checked by `config`.
    """

    def __init__(self, model: str | None = None, **options: Unpack[LLMKeywords]) -> None:
        defaults = _defaults()
        for name in options:
            if name not in defaults and option_fate(name, defaults) is None:
                raise _unknown(name)
        self.__dict__.update(options | ({} if model is None else {"model": model}))

    def __getattr__(self, name: str) -> Any:
        """Return the default of an option that was not given; None for one of vLLM."""
        defaults = {} if name.startswith("_") else _defaults()
        if name in defaults:
            return defaults[name]
        if defaults and option_fate(name, defaults) is not None:
            return None
        raise AttributeError(f"there is no option `{name}`")

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each option to a program's own parser, and return the parser. `vars` of the parsed arguments
        are options, where None means that an option was not given."""
        add_program_flags(parser, sections=SECTIONS)
        return parser

    @classmethod
    def from_cli_args(cls, arguments: argparse.Namespace) -> Self:
        """Return the options that were given to a parser with the flags of `add_cli_args`."""
        return cls(**given_options(arguments, sections=SECTIONS))

    def config(self) -> Config:
        """Check the values, and return the configuration with the model found or downloaded. Raises `ConfigError` or
        `CheckpointError`.

        Options that were not given come from the environment.
        """
        return checked_config(self.parse())

    def parse(self) -> Config:
        """Check the values, and return the configuration for another process, which looks for the model. Otherwise as
        `config`."""
        defaults = _defaults()
        given = vars(self) | {"placement_group": _placement_group_id(self.placement_group)}
        known = with_variables(translate(given, defaults), defaults)
        for name in known.options:
            if name not in defaults:
                raise _unknown(name)
        config = build_config(**known.options)
        set_up_log("llm", config)
        for note in known.notes:
            logger.info("%s", note)
        return config


class AsyncEngineArgs(EngineArgs):
    """The same options, under the name that programs written for `AsyncLLM` of vLLM use."""


def _unknown(name: str) -> ConfigError:
    if field_owners().get(name) == "serving":
        return ConfigError(f"option `{name}` is for the HTTP server: programs do not take it")
    return unknown_option(name)


def _defaults() -> dict[str, Any]:
    """Return the options and their defaults."""
    sections = [field.type for field in msgspec.structs.fields(Config) if field.name in SECTIONS]
    return {name: value for section in sections for name, value in msgspec.structs.asdict(section()).items()}


def _placement_group_id(given: Any) -> Any:
    """Return the id of a placement group if `given` is Ray's own object, else `given`.

    The object is recognized by its attributes, because programs without Ray must not import it.
    """
    return given.id.hex() if hasattr(given, "bundle_specs") else given
