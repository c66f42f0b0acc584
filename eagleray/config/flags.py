"""Flags derived from the fields of the configuration: a field gives its flag, its help and its type.

The flags of vLLM are there too, without help: `vllm_options` says what becomes of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from eagleray.config.build import list_options, option_types
from eagleray.config.sections import Config
from eagleray.config.serving import JSON_LISTS, REPEATED
from eagleray.config.vllm_options import flag
from eagleray.config.vllm_table import LISTS, SPELLINGS, SWITCHES, TABLE
from eagleray.errors import ConfigError

MODEL_FLAG = "model_of_flag"
"""Attribute of the parsed arguments with the value of `--model`, which may be given in place of the position."""


MODEL_HELP = "directory, id or URL of a checkpoint; without it, the embedded demo model"


def add_config_flags(parser: argparse.ArgumentParser, *, sections: Sequence[str]) -> None:
    """Add the positional model, `--config FILE`, and a flag for every other field of the named sections of `Config`."""
    parser.add_argument("model", nargs="?", help=MODEL_HELP)
    parser.add_argument("--model", dest=MODEL_FLAG, help=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="YAML file with options by their names; flags win over it")
    _add_flags(parser, sections)


def add_program_flags(parser: argparse.ArgumentParser, *, sections: Sequence[str]) -> None:
    """Add a flag for every field of the named sections of `Config` to the parser of a program. The attributes of the
    parsed arguments are options by name."""
    parser.add_argument("--model", help=MODEL_HELP)
    _add_flags(parser, sections)


def add_option_flags(parser: argparse.ArgumentParser, names: Collection[str], title: str, *, model_help: str) -> None:
    """Add a flag for each of these options to the parser of a command, in a group of this title."""
    group = parser.add_argument_group(title)
    for section in msgspec.structs.fields(Config):
        hints = get_type_hints(section.type, include_extras=True)
        for field in msgspec.structs.fields(section.type):
            if field.name == "model" and "model" in names:
                group.add_argument("--model", help=model_help)
            elif field.name in names:
                _add_flag(parser, group, field, hints[field.name], shows_default=False)


def _add_flags(parser: argparse.ArgumentParser, sections: Sequence[str]) -> None:
    for section in msgspec.structs.fields(Config):
        if section.name in sections:
            group = parser.add_argument_group(f"{section.name} options")
            hints = get_type_hints(section.type, include_extras=True)
            for field in msgspec.structs.fields(section.type):
                if field.name != "model":
                    _add_flag(parser, group, field, hints[field.name])
    own = _names(sections)
    for name in sorted(TABLE.keys() - set(own)):
        _add_vllm_flag(parser, name)


def given_options(arguments: argparse.Namespace, *, sections: Sequence[str]) -> dict[str, Any]:
    """Return the options that were given as flags, by name, those of vLLM too. Raises `ConfigError` for two models."""
    names = sorted({*_names(sections), *TABLE})
    given = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    model = getattr(arguments, MODEL_FLAG, None)
    if model is not None and given.setdefault("model", model) != model:
        raise ConfigError(f"the model is given twice: {given['model']!r}, and {model!r} by --model")
    return given


def _names(sections: Sequence[str]) -> list[str]:
    return [
        field.name
        for section in msgspec.structs.fields(Config)
        if section.name in sections
        for field in msgspec.structs.fields(section.type)
    ]


def _add_flag(
    parser: argparse.ArgumentParser,
    group: argparse._ArgumentGroup,
    field: msgspec.structs.FieldInfo,
    hint: Any,
    *,
    shows_default: bool = True,
) -> None:
    description = next(meta.description for meta in hint.__metadata__ if isinstance(meta, Meta) and meta.description)
    default = field.default if field.default is not msgspec.NODEFAULT else None
    if shows_default and default not in (None, ""):
        description += f" (default: {default})"
    keywords: dict[str, Any] = {"dest": field.name, "default": None, "help": description.replace("%", "%%")}
    kind = option_types()[field.name]
    if kind is bool:
        keywords["action"] = argparse.BooleanOptionalAction
    elif field.name in list_options():
        keywords |= {"nargs": "+", "metavar": field.name.rpartition("_")[2].upper()}
    elif field.name in REPEATED:
        keywords |= {"action": "append", "metavar": "NAME"}
    elif get_origin(kind) is dict or field.name in JSON_LISTS:
        keywords["metavar"] = "JSON"
    elif get_origin(kind) is Literal:
        keywords["metavar"] = "{" + ",".join(get_args(kind)) + "}"
    else:
        keywords["metavar"] = {int: "N", float: "X"}.get(kind, "VALUE")
    if field.name == "hf_token":  # without a value, as in vLLM: the token of a login
        keywords |= {"nargs": "?", "const": ""}
    group.add_argument(*_spellings(parser, field.name), **keywords)


def _add_vllm_flag(parser: argparse.ArgumentParser, name: str) -> None:
    keywords: dict[str, Any] = {"dest": name, "default": None, "help": argparse.SUPPRESS}
    if name in SWITCHES:
        keywords["action"] = argparse.BooleanOptionalAction
    elif name in LISTS:
        keywords["nargs"] = "+"
    parser.add_argument(*_spellings(parser, name), **keywords)


def _spellings(parser: argparse.ArgumentParser, name: str) -> list[str]:
    """Return the flags of an option, except short ones that the command uses otherwise."""
    known = parser._option_string_actions
    others = [other for other, option in SPELLINGS.items() if option == name and other not in known]
    return sorted([*others, flag(name)], key=lambda other: (other.startswith("--"), other != flag(name)))
