"""The formats of tool calls by name, and the one that fits a chat template."""

from __future__ import annotations

from eagleray.client.answers.deepseek_v3 import DeepSeekV3Format
from eagleray.client.answers.deepseek_v31 import DeepSeekV31Format
from eagleray.client.answers.formats import ToolFormat
from eagleray.client.answers.glm45 import Glm45Format
from eagleray.client.answers.harmony import HarmonyFormat
from eagleray.client.answers.hermes import HermesFormat
from eagleray.client.answers.kimi_k2 import KimiK2Format
from eagleray.client.answers.llama3_json import Llama3JsonFormat
from eagleray.client.answers.mistral import MistralFormat
from eagleray.client.answers.qwen3_coder import Qwen3CoderFormat
from eagleray.errors import ConfigError

_FORMATS: dict[str, ToolFormat] = {
    tool_format.name: tool_format
    for tool_format in sorted(
        (
            DeepSeekV3Format(),
            DeepSeekV31Format(),
            Glm45Format(),
            HarmonyFormat(),
            HermesFormat(),
            KimiK2Format(),
            Llama3JsonFormat(),
            MistralFormat(),
            Qwen3CoderFormat(),
        ),
        key=lambda tool_format: len(tool_format.markers),
        reverse=True,
    )
}
"""Formats by the names of their parsers in vLLM, in the order in which they are tried for a template: of several that
fit, the one with the most markers is the most specific."""

SAME_FORMATS = {"glm47": "glm45", "llama4_json": "llama3_json", "qwen3_json": "hermes", "qwen3_xml": "qwen3_coder"}
"""Further names of formats, as vLLM has them."""


def register_tool_format(tool_format: ToolFormat) -> None:
    """Register a format under its name, in place of a format that had this name. It is tried for templates before the
    other formats. Raises `ConfigError` for something else than a format."""
    if not isinstance(tool_format, ToolFormat):
        raise ConfigError(f"expected an instance of a subclass of ToolFormat, but got {tool_format!r}")
    name, markers = getattr(tool_format, "name", None), getattr(tool_format, "markers", None)
    if not isinstance(name, str) or not isinstance(markers, tuple):
        kind = type(tool_format).__name__
        raise ConfigError(f"{kind} needs a `name`, which is a text, and `markers`, which are a tuple of texts")
    others = {other_name: other for other_name, other in _FORMATS.items() if other_name != name}
    _FORMATS.clear()
    _FORMATS.update({name: tool_format, **others})


def registered_formats() -> list[ToolFormat]:
    """Return all formats, in the order in which they are tried for a template."""
    return [*_FORMATS.values()]


def get_tool_format(name: str) -> ToolFormat:
    """Return the format by one of its names. Raises `ConfigError`."""
    found = _FORMATS.get(name) or _FORMATS.get(SAME_FORMATS.get(name, name))
    if found is None:
        known = ", ".join(sorted([*_FORMATS, *SAME_FORMATS]))
        raise ConfigError(f"option `tool_call_parser`: there is no format {name!r}; use auto, none or one of {known}")
    return found


def find_tool_format(template: str) -> ToolFormat | None:
    """Return the format in which the models of a chat template write calls; None if no format fits it."""
    return next((tool_format for tool_format in _FORMATS.values() if tool_format.fits_template(template)), None)
