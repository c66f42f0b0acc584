"""The formats of reasoning by name, and the one that fits a chat template."""

from __future__ import annotations

import msgspec

from eagleray.client.answers.formats import ReasoningFormat
from eagleray.client.answers.harmony import HarmonyReasoning
from eagleray.client.answers.marked_reasoning import MarkedReasoning
from eagleray.config.sections import ModelConfig
from eagleray.errors import ConfigError

_FORMATS: dict[str, ReasoningFormat] = {
    format.name: format
    for format in (
        HarmonyReasoning(),
        MarkedReasoning(
            name="mistral", start="[THINK]", end="[/THINK]", template_markers=("[THINK]",), strips_end=True
        ),
        MarkedReasoning(
            name="seed_oss",
            start="<seed:think>",
            end="</seed:think>",
            template_markers=("<seed:think>",),
            interrupts=("<seed:tool_call>",),
        ),
        MarkedReasoning(
            name="kimi_k2",
            template_markers=("<|im_middle|>", "</think>"),
            strips_end=True,
            interrupts=("<|tool_calls_section_begin|>",),
        ),
        MarkedReasoning(
            name="glm45",
            template_markers=("<|observation|>", "</think>"),
            strips_end=True,
            interrupts=("<tool_call>",),
        ),
        MarkedReasoning(name="deepseek_v3", template_markers=("<｜Assistant｜>", "</think>", "thinking")),
        MarkedReasoning(
            name="deepseek_r1",
            template_markers=("<｜Assistant｜>", "<think>", "</think>"),
            is_implied=True,
            end_prefix="\n",
        ),
        MarkedReasoning(
            name="qwen3",
            template_markers=("<|im_start|>", "</think>"),
            end_prefix="\n",
            interrupts=("<tool_call>",),
        ),
        MarkedReasoning(name="think", template_markers=("</think>",)),
    )
}
"""Formats by the names of their parsers in vLLM, in the order in which they are tried for a template.

`think` is for further models that write <think>. DeepSeek-R1-0528 is one of them: its template only removes reasoning
from the history, and so the model writes the start marker itself. Such a template does not tell it from DeepSeek-V3,
which does not reason, so its answers begin with reasoning only where the marker comes.
"""


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The option `reasoning_config`, whose keys are those of vLLM."""

    reasoning_parser: str = ""
    """Value of the option `reasoning_parser`, if that is auto."""
    reasoning_start_str: str = ""
    """The start marker of the format, if given."""
    reasoning_end_str: str = ""
    """Text with which reasoning ends when its budget is used."""


SAME_FORMATS = {
    "glm47": "glm45",
    "holo2": "deepseek_v3",
    "ling3": "glm45",
    "mimo": "qwen3",
    "nemotron_v3": "glm45",
    "step3": "deepseek_r1",
    "step3p5": "glm45",
}
"""Further names of formats."""


def register_reasoning_format(format: ReasoningFormat) -> None:
    """Register a format under its name, in place of a format that had this name. It is tried for templates before the
    other formats. Raises `ConfigError` for something else than a format."""
    if not isinstance(format, ReasoningFormat):
        raise ConfigError(f"expected a MarkedReasoning or another ReasoningFormat, but got {format!r:.100}")
    others = {name: other for name, other in _FORMATS.items() if name != format.name}
    _FORMATS.clear()
    _FORMATS.update({format.name: format, **others})


def registered_reasoning_formats() -> list[ReasoningFormat]:
    """Return all formats, in the order in which they are tried for a template."""
    return [*_FORMATS.values()]


def reasoning_format(name: str) -> ReasoningFormat:
    """Return the format by one of its names. Raises `ConfigError`."""
    found = _FORMATS.get(name) or _FORMATS.get(SAME_FORMATS.get(name, name))
    if found is None:
        known = ", ".join(sorted([*_FORMATS, *SAME_FORMATS]))
        raise ConfigError(f"option `reasoning_parser`: there is no format {name!r}; use auto, none or one of {known}")
    return found


def reasoning_config(model: ModelConfig) -> ReasoningConfig:
    """Return the option `reasoning_config`. Raises `ConfigError` for keys and values that it cannot have."""
    try:
        return msgspec.convert(model.reasoning_config, ReasoningConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"option `reasoning_config`: {error}; it may have {', '.join(ReasoningConfig.__struct_fields__)}"
        ) from None


def choose_reasoning_format(model: ModelConfig, template: str | None) -> ReasoningFormat | None:
    """Return the format that the options name, or else that of the chat template, which is None before it is read.
    Raises `ConfigError`, also for markers in `reasoning_config` without a format that has them."""
    config = reasoning_config(model)
    name = model.reasoning_parser
    if name == "auto":
        name = config.reasoning_parser or name
    match name:
        case "auto":
            if template is None:
                return None
            found = find_reasoning_format(template)
        case "none" | "":
            found = None
        case _:
            found = reasoning_format(name)
    if found is None and (config.reasoning_start_str or config.reasoning_end_str):
        reason = (
            "the chat template shows no reasoning of a known format" if name == "auto" else "reasoning is not split"
        )
        raise ConfigError(
            f"option `reasoning_config`: its markers have no effect, because {reason}: name a format by the option "
            "`reasoning_parser`, or leave them out"
        )
    if found is not None:
        _check_markers(config, found)
    return found


def _check_markers(config: ReasoningConfig, format: ReasoningFormat) -> None:
    """Raise `ConfigError` if the texts of the option do not have the markers of the format."""
    start, end = config.reasoning_start_str, config.reasoning_end_str
    if start not in ("", format.start) or (end and not end.endswith(format.end)):
        raise ConfigError(
            f"option `reasoning_config`: `reasoning_start_str` must be {format.start} and `reasoning_end_str` must end "
            f"with {format.end}, which are the markers of the format {format.name}"
        )


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the format that a chat template shows; None if it shows no reasoning."""
    return next((format for format in _FORMATS.values() if format.fits_template(template)), None)
