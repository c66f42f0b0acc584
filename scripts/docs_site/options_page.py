"""Reference of the options: a field of the configuration gives its flag, its variable, its type and its text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from docs_site.markdown import code, directive, plain
from eagleray.cli import serve
from eagleray.config.environment import PREFIX
from eagleray.config.sections import Config

HEAD = """# Options

Every option is a flag of `eagleray serve`, a key of a file for `--config`, and an environment variable, by the same
name. Except for those of the HTTP server ([serving](#serving)) it is a keyword argument of `LLM` too. A flag or keyword
argument wins over the file, the file over the environment. The names of vLLM are known too: see
[Coming from vLLM](../docs/from_vllm.md).

"""

WORDS = {bool: "true or false", int: "integer", float: "number", str: "text", list: "list", dict: "JSON object"}
BOUNDS = (("ge", "at least {}"), ("gt", "more than {}"), ("le", "at most {}"), ("lt", "less than {}"))


def page() -> str:
    flags = _flags()
    return HEAD + "".join(_section(section, flags) for section in msgspec.structs.fields(Config))


def _flags() -> dict[str, str]:
    """Return the flags of each option, with the place of the value, as in the help of `eagleray serve`."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return {action.dest: flags_of(action) for action in parser._actions if action.option_strings}


def flags_of(action: argparse.Action) -> str:
    """Return the spellings of a flag, each with the place of its value."""
    value = f" {value_of(action)}" if action.nargs != 0 else ""
    return ", ".join(f"{spelling}{value}" for spelling in action.option_strings)


def value_of(action: argparse.Action) -> str:
    """Return the place of an argument's value: in brackets if it may be left out, with dots if there may be several."""
    choices = "{" + ",".join(action.choices) + "}" if action.choices else action.dest.upper()
    value = str(action.metavar or choices)
    return {"?": f"[{value}]", "+": f"{value} …", "*": f"[{value} …]"}.get(str(action.nargs), value)


def _section(section: msgspec.structs.FieldInfo, flags: dict[str, str]) -> str:
    hints = get_type_hints(section.type, include_extras=True)
    entries = (_option(field, hints[field.name], flags) for field in msgspec.structs.fields(section.type))
    return f"## {section.name}\n\n{plain(section.type.__doc__ or '')}\n\n{''.join(entries)}"


def _option(field: msgspec.structs.FieldInfo, hint: Any, flags: dict[str, str]) -> str:
    meta = next(meta for meta in hint.__metadata__ if isinstance(meta, Meta) and meta.description)
    facts = "; ".join([_kind(hint), *_default(field), code(field.name), code(PREFIX + field.name.upper())])
    spelled = "MODEL" if field.name == "model" else flags[field.name]
    return directive("option", spelled, f"{plain(meta.description or '')}\n\n{facts}")


def _default(field: msgspec.structs.FieldInfo) -> Iterator[str]:
    if field.default is not msgspec.NODEFAULT and field.default not in (None, ""):
        yield f"default {code(str(field.default))}"


def _kind(hint: Any) -> str:
    """Return the type of an option in words, with its bounds."""
    if get_origin(hint) is Annotated:
        meta = next(meta for meta in hint.__metadata__ if isinstance(meta, Meta))
        bounds = [text.format(value) for name, text in BOUNDS if (value := getattr(meta, name)) is not None]
        return ", ".join([_kind(get_args(hint)[0]), *bounds])
    if get_origin(hint) is Literal:
        return ", ".join(code(str(value)) for value in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_kind(kind) for kind in get_args(hint) if kind is not NoneType)
    return WORDS[get_origin(hint) or hint]
