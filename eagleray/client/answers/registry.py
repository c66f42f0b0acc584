"""The formats of tool calls by name, and by chat template."""

from __future__ import annotations

from eagleray.client.answers.formats import ToolFormat
from eagleray.client.answers.hermes import HermesFormat

_FORMATS: dict[str, ToolFormat] = {}


def register_tool_format(tool_format: ToolFormat) -> None:
    """Register a format under its name, in place of a format that had this name."""
    _FORMATS[tool_format.name] = tool_format


def tool_format_names() -> list[str]:
    """Return the names of all formats."""
    return sorted(_FORMATS)


def get_tool_format(name: str) -> ToolFormat:
    """Return the format of a name; KeyError if no format has it."""
    return _FORMATS[name]


def find_tool_format(template: str) -> ToolFormat | None:
    """Return the format in which the models of a chat template write calls; None if no format fits it.

    Of several formats that fit, the one with the most markers is the most specific.
    """
    fitting = [tool_format for tool_format in _FORMATS.values() if tool_format.fits_template(template)]
    return max(fitting, key=lambda tool_format: len(tool_format.markers), default=None)


for _format in (HermesFormat(),):
    register_tool_format(_format)
