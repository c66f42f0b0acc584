"""The messages of a conversation, and the prompt that the model's chat template makes of them.

Holds no state; used by the routes of chat and /tokenize.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from msgspec import Meta

from eagleray.errors import InvalidRequest
from eagleray.server.service import Service

MAX_TEMPLATE_VARIABLES = 256
"""Most entries of `chat_template_kwargs`, because each rendering copies them several times."""
MAX_TEMPLATE_CHARS = 2**18
"""Length of a template in a request. The longest published ones have some 2**15 characters."""

EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking")
"""Variables of chat templates that `reasoning_effort` sets."""

TEXT_PART_SCHEMA = {
    "type": "object",
    "description": "A part of a message's content. Text is the only kind.",
    "properties": {"type": {"enum": ["text"], "default": "text"}, "text": {"type": "string"}},
    "required": ["text"],
}
CALL_SCHEMA = {
    "type": "object",
    "properties": {
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["function"],
}
MESSAGE_SCHEMA = {
    "properties": {
        "role": {
            "type": "string",
            "minLength": 1,
            "maxLength": 64,
            "description": "Such as system, developer, user, assistant or tool.",
        },
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"anyOf": [{"type": "string"}, TEXT_PART_SCHEMA]}},
                {"type": "null"},
            ],
            "description": "May be left out by an assistant that calls tools, and in other roles than those named.",
        },
        "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tool_calls": {
            "anyOf": [{"type": "array", "items": CALL_SCHEMA}, {"type": "null"}],
            "description": "Calls of tools in an assistant's message.",
        },
    },
    "required": ["role"],
    "if": {"properties": {"role": {"enum": ["system", "developer", "user", "tool"]}}, "required": ["role"]},
    "then": {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
}

Messages = Annotated[
    list[
        Annotated[
            dict[str, Any],
            Meta(
                description="A message. All its keys are given to the chat template.", extra_json_schema=MESSAGE_SCHEMA
            ),
        ]
    ],
    Meta(min_length=1),
]
"""Type of a conversation. The messages are checked by `check_messages` of `client/text/conversation.py`."""

Conversations = Annotated[list[Messages], Meta(min_length=1, description="Independent conversations.")]

TemplateVariables = Annotated[dict[str, Any] | None, Meta(description="More variables for the chat template.")]
ReasoningEffort = Annotated[
    str | None, Meta(description="Given to the chat template, whose variable `enable_thinking` it sets too.")
]
Tools = Annotated[
    list[dict[str, Any]] | None, Meta(description="Functions that the model may call. Given to the chat template.")
]
ToolChoiceField = Annotated[
    Any,
    Meta(description="none, auto (the default with `tools`), required, one function, or allowed_tools with a list."),
]


class TemplateFields(Protocol):
    """The fields of a request that determine how messages become a prompt."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    chat_template: str | None
    documents: list[dict[str, Any]] | None
    reasoning_effort: str | None


def check_template_fields(service: Service, fields: TemplateFields) -> None:
    """Raise `InvalidRequest` for template variables or a template that the request may not have."""
    num_variables = len(fields.chat_template_kwargs or ())
    if num_variables > MAX_TEMPLATE_VARIABLES:
        raise InvalidRequest(
            f"`chat_template_kwargs` may have at most {MAX_TEMPLATE_VARIABLES} entries, but it has {num_variables}",
            param="chat_template_kwargs",
        )
    own_template = fields.chat_template or (fields.chat_template_kwargs or {}).get("chat_template")
    if not own_template:  # an empty one means "not given", as in vLLM
        return
    if not service.trusts_templates:
        raise InvalidRequest(
            "`chat_template`: this server takes no templates from requests; start it with the option "
            "`--trust-request-chat-template`, or leave it out",
            param="chat_template",
        )
    if not isinstance(own_template, str) or len(own_template) > MAX_TEMPLATE_CHARS:
        raise InvalidRequest(
            f"`chat_template` must be a text of at most {MAX_TEMPLATE_CHARS} characters", param="chat_template"
        )


async def render_chat(
    service: Service,
    messages: list[dict[str, Any]],
    fields: TemplateFields,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Return the prompt for checked messages and template fields. `tools`: shown to the model.

    Raises `InvalidRequest` for contradicting fields, or if the template refuses the messages.
    """
    continues = bool(fields.continue_final_message)
    variables = template_variables(service.default_template_variables, fields)
    return await service.text.render(
        messages,
        add_generation_prompt=not continues if fields.add_generation_prompt is None else fields.add_generation_prompt,
        continue_final_message=continues,
        chat_template_kwargs=variables,
        chat_template=variables.pop("chat_template", None) or fields.chat_template or None,
        tools=tools or None,
        documents=fields.documents or None,
    )


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a checked message, whose parts are joined by line breaks."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part if isinstance(part, str) else part["text"] for part in content)


def template_variables(defaults: Mapping[str, Any], fields: TemplateFields) -> dict[str, Any]:
    """Return the variables for the template: the server's, those of the request, and what its effort stands for.

    As in vLLM, an effort other than `none` also turns on the thinking of templates that ask for it.
    """
    given = fields.chat_template_kwargs or {}
    effort = fields.reasoning_effort
    of_effort = {} if effort is None else dict(zip(EFFORT_VARIABLES, (effort, effort != "none"), strict=True))
    return {**defaults, **of_effort, **given}
