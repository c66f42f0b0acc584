"""A parser of command lines with errors of one line, and with the spellings of flags that vLLM accepts.

Underscores may stand for dashes, `--compilation-config.mode 3` is a part of a JSON object, and `-O3` has its value
beside it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from eagleray.config.fates import parsed
from eagleray.config.suggestions import suggest
from eagleray.config.vllm_options import flag, option_name
from eagleray.config.vllm_table import MEANINGS, SPELLINGS
from eagleray.errors import UserError

LEVEL = re.compile(r"-O=?(\d+)")
DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([A-Za-z_][\w.+-]*)(?:=(.*))?", re.DOTALL)
"""A flag with a key: the flag, the key with further dots, and the value if it is in the same argument."""


class CommandParser(argparse.ArgumentParser):
    """Parser whose errors are `UserError`s of one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; `{self.prog} --help` lists the options")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse a command line that begins with a command. Raises `UserError`."""
        known, unknown = self.parse_known_args(list(plain_arguments(arguments)))
        if unknown:
            raise UserError(self._unknown(known.command, unknown))
        return known

    def _unknown(self, command: str, unknown: Sequence[str]) -> str:
        first = next((argument for argument in unknown if argument.startswith("-")), unknown[0])
        if not first.startswith("-"):
            return f"`{self.prog} {command}` has no place for the argument {first!r}"
        word = first.partition("=")[0]
        flags = {option_name(other.lstrip("-")): other for other in self._flags_of(command)}
        meant = suggest(option_name(word.lstrip("-")), flags, MEANINGS)
        advice = f"did you mean {flags[meant]}?" if meant else f"`{self.prog} {command} --help` lists the options"
        return f"there is no option {word}; {advice}"

    def _flags_of(self, command: str) -> Iterator[str]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from (name for name in action.choices[command]._option_string_actions if name.startswith("--"))


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
