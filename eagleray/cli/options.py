"""Flags derived from the fields of the configuration: a field gives its flag, its help and its type."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from eagleray.config.build import build_config
from eagleray.config.sections import Config
from eagleray.errors import ConfigError


def add_config_flags(parser: argparse.ArgumentParser, *, sections: Sequence[str]) -> None:
    """Add the positional model, `--config FILE`, and a flag for every field of the named sections of `Config`."""
    parser.add_argument("model", nargs="?", help="directory of a checkpoint; without it, the embedded demo model")
    parser.add_argument("--config", metavar="FILE", help="YAML file with options by their names; flags win over it")
    for section in msgspec.structs.fields(Config):
        if section.name in sections:
            group = parser.add_argument_group(f"{section.name} options")
            hints = get_type_hints(section.type, include_extras=True)
            for field in msgspec.structs.fields(section.type):
                if field.name != "model":
                    _add_flag(group, field, hints[field.name])


def config_from(arguments: argparse.Namespace, *, sections: Sequence[str]) -> Config:
    """Return the configuration of the parsed flags, over that of the file after `--config`."""
    return build_config(**config_options(arguments, sections=sections))


def config_options(arguments: argparse.Namespace, *, sections: Sequence[str]) -> dict[str, Any]:
    """Return the options that were given, by name."""
    names = [
        field.name
        for section in msgspec.structs.fields(Config)
        if section.name in sections
        for field in msgspec.structs.fields(section.type)
    ]
    options = _read_file(arguments.config) if arguments.config else {}
    return options | {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _add_flag(group: argparse._ArgumentGroup, field: msgspec.structs.FieldInfo, hint: Any) -> None:
    description = _description(hint)
    default = field.default if field.default is not msgspec.NODEFAULT else None
    if default not in (None, ""):
        description += f" (default: {default})"
    keywords: dict[str, Any] = {"dest": field.name, "default": None, "help": description.replace("%", "%%")}
    kind = _plain(hint)
    if kind is bool:
        keywords["action"] = argparse.BooleanOptionalAction
    elif get_origin(kind) is list:
        keywords |= {"nargs": "+", "metavar": field.name.rpartition("_")[2].upper()}
    elif get_origin(kind) is dict:
        keywords["metavar"] = "JSON"
    elif get_origin(kind) is Literal:
        keywords["choices"] = get_args(kind)
    else:
        keywords["metavar"] = {int: "N", float: "X"}.get(kind, "VALUE")
    group.add_argument("--" + field.name.replace("_", "-"), **keywords)


def _description(hint: Any) -> str:
    return next(meta.description for meta in hint.__metadata__ if isinstance(meta, Meta) and meta.description)


def _plain(hint: Any) -> Any:
    """Return the type without its annotations and without None."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    kinds = [_plain(kind) for kind in get_args(hint) if kind is not type(None)]
    return kinds[0] if kinds and type(None) in get_args(hint) else hint


def _read_file(path: str) -> dict[str, Any]:
    import yaml  # here, because most runs have no --config

    try:
        options = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--config {path}: expected a mapping of options to values")
    return {str(name).replace("-", "_"): value for name, value in options.items()}
