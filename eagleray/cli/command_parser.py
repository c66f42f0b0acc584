"""A parser of command lines with errors of one line, and with the spellings of flags that vLLM accepts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NoReturn

from eagleray.config.flag_spellings import plain_arguments
from eagleray.config.suggestions import suggest
from eagleray.config.vllm_options import option_name
from eagleray.config.vllm_table import MEANINGS
from eagleray.errors import UserError


class CommandParser(argparse.ArgumentParser):
    """Parser whose errors are `UserError`s of one line."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Raise `UserError` for a value that is no choice, with the one that is spelled much like it."""
        if action.choices is not None and value not in action.choices:
            name = action.metavar or "/".join(action.option_strings)
            close = suggest(str(value), [str(choice) for choice in action.choices], {}, cutoff=0.6)
            known = f"did you mean {close}?" if close else f"there are {', '.join(map(str, action.choices))}"
            raise UserError(f"{name}: there is no {value!r}; {known}")

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
