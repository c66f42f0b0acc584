"""The typed fields of config.json. Errors name the file, the field, its value and the expected value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from eagleray.config.json_files import read_json_object, shown
from eagleray.errors import CheckpointError

MAX_SIZE = 2**24
"""Largest size, of a hidden state or anything else, that is accepted: a hundred times that of published models."""

MAX_LAYERS = 2**13
MAX_EXPERTS = 2**15
MAX_VOCAB_SIZE = 2**23
"""Bounds that are more than ten times the values of published models. They limit the memory that is allocated for each
layer, expert or token before a weight is read."""

MAX_POSITIONS = 2**31 - 1
"""Positions are counted in 32 bits."""

MAX_NUMBER = 1e30
"""Bound for numbers, so that they and their products with a model's values are finite in float32."""


class ConfigFile:
    """The fields of one config.json, or of an object in it, to which the names in `section` lead. A field that is null
    counts as absent. `is_changed`: some are the user's."""

    def __init__(
        self, path: Path, fields: dict[str, Any], *, is_changed: bool = False, section: Sequence[str] = ()
    ) -> None:
        self.path = path
        self.fields = fields
        self._is_changed = is_changed
        self._section = section

    @classmethod
    def read(cls, directory: Path) -> ConfigFile:
        """Read the config.json of a checkpoint. Raises `CheckpointError` if it is missing or not a JSON object."""
        path = directory / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: not found; a checkpoint in Hugging Face format has one")
        return cls(path, read_json_object(path))

    def fail(self, problem: str) -> NoReturn:
        note = " with `hf_overrides`" if self._is_changed else ""
        place = f"in `{'.'.join(self._section)}`, " if self._section else ""
        raise CheckpointError(f"{self.path}{note}: {place}{problem}")

    def get(self, name: str) -> Any:
        return self.fields.get(name)

    def section(self, name: str) -> ConfigFile | None:
        """Return the fields of a field that must be an object, or None if it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(f"`{name}` must be an object, but it is {shown(value)}")
        return ConfigFile(self.path, value, is_changed=self._is_changed, section=(*self._section, name))

    def integer(self, name: str, default: int | None, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """Return a field that must be an integer. Without a default the field is required."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.fail(f"`{name}` must be an integer of at least {minimum}, but it is {shown(value)}")
        if value > maximum:
            self.fail(f"`{name}` must be at most {maximum}, but it is {shown(value)}")
        return value

    def optional_integer(self, name: str, default: int | None = None, *, maximum: int = MAX_SIZE) -> int | None:
        """Return a field that must be an integer or null, which means None."""
        if name in self.fields and self.fields[name] is None:
            return None
        return None if self._value(name, default) is None else self.integer(name, default, maximum=maximum)

    def number(self, name: str, default: float | None) -> float:
        """Return a field that must be a positive number."""
        return self.positive(name, self._value(name, default))

    def boolean(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.fail(f"`{name}` must be true or false, but it is {shown(value)}")
        return value

    def positive(self, name: str, value: Any, *, above: float = 0.0, maximum: float = MAX_NUMBER) -> float:
        """Check that `value`, of the field `name`, is a number above `above` and at most `maximum`, and return it.
        `above` must not be negative."""
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:  # rejects NaN too
            self.fail(f"`{name}` must be a positive number, but it is {shown(value)}")
        if not above < value <= maximum:
            self.fail(f"`{name}` must be above {above:g} and at most {maximum:g}, but it is {shown(value)}")
        return float(value)

    def _value(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        return default if value is None else value
