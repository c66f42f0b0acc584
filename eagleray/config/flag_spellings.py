"""Spellings of flags that vLLM accepts: underscores for dashes, `--compilation-config.mode 3` as a part of a JSON
object, `-O3` with its value beside it, and `--help=GROUP`. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from eagleray.config.fates import parsed
from eagleray.config.vllm_options import flag, option_name
from eagleray.config.vllm_table import SPELLINGS

LEVEL = re.compile(r"-O=?(\d+)")
DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([A-Za-z_][\w.+-]*)(?:=(.*))?", re.DOTALL)
"""A flag with a key: the flag, the key with further dots, and the value if it is in the same argument."""


def plain_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments with flags as they are declared. Dotted keys are gathered into one JSON object for each flag,
    at the end."""
    gathered: dict[str, dict[str, Any]] = {}
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            rest = iter([argument, *rest])
            break
        if match := LEVEL.fullmatch(argument):
            yield from ("-O", match[1])
        elif argument.startswith("--help="):  # of a group or a flag; the whole help has it
            yield "--help"
        elif match := DOTTED.fullmatch(argument):
            value = match[3] if match[3] is not None else next(rest, "")
            name = SPELLINGS.get(match[1]) or option_name(match[1].lstrip("-"))
            _insert(gathered.setdefault(flag(name), {}), match[2].split("."), parsed(value))
        elif argument.startswith("--"):
            name, equals, value = argument.partition("=")
            yield name.replace("_", "-") + equals + value
        else:
            yield argument
    for name, entries in gathered.items():
        yield from (name, json.dumps(entries))
    yield from rest


def _insert(entries: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set an entry of nested objects. A key that ends with + adds the value to a list."""
    for key in keys[:-1]:
        inner = entries.setdefault(key, {})
        entries = inner if isinstance(inner, dict) else {}
    last = keys[-1]
    if last.endswith("+"):
        entries.setdefault(last[:-1], []).append(value)
    else:
        entries[last] = value
