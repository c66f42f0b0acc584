"""Fates of options of vLLM: what becomes of an option that programs and scripts give to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Renamed:
    """Fate of an option that has another name here."""

    option: str
    convert: Callable[[Any], Any] = lambda value: value
    """Conversion of the value. Raises `ValueError` for a value that is not supported."""


@dataclass(frozen=True)
class Expansion:
    """Fate of an option whose value says several things."""

    expand: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
    """Returns options by name, for the value and all options that were given with it. Raises `ValueError`."""
    options: tuple[str, ...]
    """Names of the options that may come out."""


@dataclass(frozen=True)
class NoEffect:
    """Fate of an option that is accepted with any value, because it changes no answer."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """Fate of an option that is accepted only with a value that means "off"."""

    reason: str
    off: tuple[Any, ...] = ()
    """Values that mean "off", besides those of `is_off`."""


Fate = Renamed | Expansion | NoEffect | Refused


def is_off(value: Any, off: Collection[Any] = ()) -> bool:
    """Whether a value, possibly as text, means "off": one of `off`, false, zero, empty, or a mapping to such values."""
    known = parsed(value) if isinstance(value, str) else value
    if isinstance(known, dict):
        return known in off or all(is_off(entry) for entry in known.values())
    return not known or value in off or known in off


def parsed(text: str) -> Any:
    """Return the value that a text has as JSON, or else the text itself. True, False and None may be capitalized."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if (word := text.strip().lower()) in words:
        return words[word]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
