"""Reads config.json: typed fields, and errors that name the file, the field, what was found and what is expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from eagleray.config.json_files import read_json_object, shown
from eagleray.errors import CheckpointError

MAX_SIZE = 2**24
"""Largest size, of a hidden state or anything else, that is believed: a hundred times that of published models."""

MAX_LAYERS = 2**13
MAX_EXPERTS = 2**15
MAX_VOCAB_SIZE = 2**23
"""More than ten times those of published models. What is made for each layer, expert or token, before a weight is
read, stays small."""

MAX_POSITIONS = 2**31 - 1
"""Positions are counted in 32 bits."""

MAX_NUMBER = 1e30
"""Finite in float32, and so are its products with what a model computes."""


class ConfigFile:
    """The fields of one config.json. A field that is null counts as absent."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self.path = path
        self.fields = fields

    @classmethod
    def read(cls, directory: Path) -> ConfigFile:
        """The config.json of a checkpoint. Raises `CheckpointError` if there is none or it is not a JSON object."""
        path = directory / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: not found; a checkpoint in Hugging Face format has one")
        return cls(path, read_json_object(path))

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {problem}")

    def get(self, name: str) -> Any:
        return self.fields.get(name)

    def integer(self, name: str, default: int | None, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """A field that must be an integer; without a default it must be there."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.fail(f"`{name}` must be an integer of at least {minimum}, but it is {shown(value)}")
        if value > maximum:
            self.fail(f"`{name}` must be at most {maximum}, but it is {shown(value)}")
        return value

    def optional_integer(self, name: str, default: int | None = None, *, maximum: int = MAX_SIZE) -> int | None:
        """As `integer`, but null in the file means None."""
        if name in self.fields and self.fields[name] is None:
            return None
        return None if self._value(name, default) is None else self.integer(name, default, maximum=maximum)

    def number(self, name: str, default: float | None) -> float:
        """A field that must be a positive number."""
        return self.positive(name, self._value(name, default))

    def boolean(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.fail(f"`{name}` must be true or false, but it is {shown(value)}")
        return value

    def positive(self, name: str, value: Any, *, above: float = 0.0, maximum: float = MAX_NUMBER) -> float:
        """`value`, which the file calls `name`, as a number above `above`, which is not negative."""
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:  # not a number is not
            self.fail(f"`{name}` must be a positive number, but it is {shown(value)}")
        if not above < value <= maximum:
            self.fail(f"`{name}` must be above {above:g} and at most {maximum:g}, but it is {shown(value)}")
        return float(value)

    def _value(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        return default if value is None else value
