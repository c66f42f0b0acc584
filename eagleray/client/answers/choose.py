"""Chooses the formats of a model's answers by the options, or by its chat template."""

from __future__ import annotations

from eagleray.client.answers.formats import ToolFormat
from eagleray.client.answers.plan import AnswerFormats
from eagleray.client.answers.plugins import load_plugin
from eagleray.client.answers.reasoning_formats import choose_reasoning_format
from eagleray.client.answers.tool_formats import find_tool_format, get_tool_format
from eagleray.client.answers.tools import Tool, ToolChoice
from eagleray.config.sections import ModelConfig
from eagleray.errors import ConfigError


def choose_formats(model: ModelConfig, chat_template: str | None) -> AnswerFormats:
    """Return the formats for a model with this chat template; before it is read, it is None, and only formats that
    options name are found. Raises `ConfigError` for an unknown name, and a plugin that cannot be used."""
    if model.tool_parser_plugin is not None:
        load_plugin("tool_parser_plugin", model.tool_parser_plugin)
    if model.reasoning_parser_plugin is not None:
        load_plugin("reasoning_parser_plugin", model.reasoning_parser_plugin)
    tools = _tool_format(model.tool_call_parser, chat_template or "")
    if tools is not None and model.tool_strict_level != "auto":
        _check_strict_level(model.tool_strict_level, tools)
    return AnswerFormats(
        tools,
        choose_reasoning_format(model, chat_template),
        model.tool_strict_level,
        model.structured_outputs_disable_additional_properties,
    )


def _check_strict_level(level: str, tools: ToolFormat) -> None:
    """Raise `ConfigError` if calls in this format cannot be constrained as the option demands."""
    if tools.constraint([Tool(name="f", parameters={"type": "object"}, strict=True)], ToolChoice("auto")) is None:
        raise ConfigError(
            f"option `tool_strict_level`: {level} constrains every call, but the format {tools.name} of "
            "`tool_parser_plugin` has no constraints: implement its method `constraint`, or leave the option at auto"
        )


def _tool_format(name: str, chat_template: str) -> ToolFormat | None:
    match name:
        case "auto":
            return find_tool_format(chat_template)
        case "none":
            return None
        case _:
            return get_tool_format(name)
