"""Translation of options that programs and scripts give to vLLM into options of eagleray.

Each flag of vLLM has a fate: an option of the same name, another name, nothing to do, or a refusal with a sentence. The
facts are in `vllm_table`; this module applies them to flags, keyword arguments, files and variables alike. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from eagleray.config.fates import Expansion, Fate, NoEffect, Renamed, is_off, parsed
from eagleray.config.json_files import shown
from eagleray.config.option_values import VALUES
from eagleray.config.vllm_table import SWITCHES, TABLE
from eagleray.errors import ConfigError

FLAG_PREFIX = "--"


@dataclass(frozen=True)
class TranslatedOptions:
    """Options of eagleray, and a line for the log about each option that has nothing to do."""

    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def under(self, others: TranslatedOptions) -> TranslatedOptions:
        """Return both, where the other ones win."""
        return TranslatedOptions(self.options | others.options, self.notes + others.notes)


def option_name(text: str) -> str:
    """Return the name of an option that was written with dashes."""
    return text.replace("-", "_")


def flag(name: str) -> str:
    """Return the flag of an option."""
    return FLAG_PREFIX + name.replace("_", "-")


def option_fate(name: str, own: Collection[str]) -> Fate | None:
    """Return the fate of an option of vLLM; None for an option of eagleray and for an unknown one."""
    name = _positive(name, True, own)[0]
    return None if name in own else TABLE.get(name)


def translate(given: Mapping[str, Any], own: Collection[str], *, as_flags: bool = False) -> TranslatedOptions:
    """Translate options by name; None means that an option was not given.

    `own`: names of the options of eagleray that may come out. Names that are neither own nor of vLLM stay. A name of
    eagleray wins over its aliases. `as_flags`: whether notes show the options as flags.

    Raises `ConfigError` for an option or a value that is not supported.
    """
    translated = TranslatedOptions()
    aliased: dict[str, Any] = {}
    named = dict(_positive(option_name(name), value, own) for name, value in given.items() if value is not None)
    for name, value in named.items():
        label = flag(name) if as_flags else f"option `{name}`"
        fate = option_fate(name, own)
        try:
            if fate is None:
                known = VALUES[name](value) if name in VALUES and name in own else value
                if known is None:
                    translated.notes.append(_no_effect(label, value))
                else:
                    translated.options[name] = known
            elif isinstance(fate, Renamed):
                aliased[fate.option] = fate.convert(value)
            elif isinstance(fate, Expansion):
                expanded = fate.expand(value, named)
                aliased |= expanded
                if not expanded:
                    translated.notes.append(_no_effect(label, value))
            elif isinstance(fate, NoEffect):
                translated.notes.append(f"{label}: nothing to do here: {fate.reason}")
            elif not is_off(value, fate.off):
                raise ConfigError(f"option `{name}` is {fate.reason}")
        except ValueError as error:
            raise error if isinstance(error, ConfigError) else ConfigError(f"option `{name}`: {error}") from None
    return TranslatedOptions(aliased | translated.options, translated.notes)


def _no_effect(label: str, value: Any) -> str:
    return f"{label}: nothing to do here: {shown(value)} is the same as the default"


def _positive(name: str, value: Any, own: Collection[str]) -> tuple[str, Any]:
    """Return a switch that was given by its negative name, such as `no_enforce_eager`, by its positive one."""
    plain = name.removeprefix("no_")
    if plain == name or name in own or (plain not in own and plain not in SWITCHES):
        return name, value
    return plain, not (parsed(value) if isinstance(value, str) else value)
