"""Reads config.json: typed fields, and errors that name the file, the field, what was found and what is expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from eagleray.errors import CheckpointError

__all__ = ["ConfigFile"]


class ConfigFile:
    """The fields of one config.json. A field that is null counts as absent."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self.path = path
        self.fields = fields

    @classmethod
    def read(cls, directory: Path) -> ConfigFile:
        """The config.json of a checkpoint. Raises `CheckpointError` if there is none or it is not a JSON object."""
        path = directory / "config.json"
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: not found; a checkpoint in Hugging Face format has one") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(fields, dict):
            raise CheckpointError(f"{path}: must hold a JSON object, but holds a {type(fields).__name__}")
        return cls(path, fields)

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {problem}")

    def get(self, name: str) -> Any:
        return self.fields.get(name)

    def integer(self, name: str, default: int | None, *, minimum: int = 1, maximum: int | None = None) -> int:
        """A field that must be an integer; without a default it must be there."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.fail(f"`{name}` must be an integer of at least {minimum}, but it is {value!r}")
        if maximum is not None and value > maximum:
            self.fail(f"`{name}` must be at most {maximum}, but it is {value}")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """As `integer`, but null in the file means None."""
        if name in self.fields and self.fields[name] is None:
            return None
        return None if self._value(name, default) is None else self.integer(name, default)

    def number(self, name: str, default: float | None) -> float:
        """A field that must be a positive number."""
        return self.positive(name, self._value(name, default))

    def boolean(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.fail(f"`{name}` must be true or false, but it is {value!r}")
        return value

    def positive(self, name: str, value: Any) -> float:
        """`value`, which the file calls `name`, as a positive number."""
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            self.fail(f"`{name}` must be a positive number, but it is {value!r}")
        return float(value)

    def _value(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        return default if value is None else value
