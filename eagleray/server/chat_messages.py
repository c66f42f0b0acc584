"""The messages of a conversation, and the prompt that the model's chat template makes of them.

Holds no state; used by the routes of chat and /tokenize.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from eagleray.errors import InvalidRequest
from eagleray.server.body import Empty, Null
from eagleray.server.service import Service

MAX_TEMPLATE_VARIABLES = 256
"""Most entries of `chat_template_kwargs`, because each rendering copies them several times."""


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message's content. Text is the only kind."""

    text: str


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        Meta(description="`developer` is OpenAI's newer name of `system`."),
    ]
    content: str | list[TextPart]
    name: Annotated[str | None, Meta(description="Given to the chat template.")] = None
    # Fields of an answer's message, which may be sent back as part of the conversation:
    refusal: Null = None
    audio: Null = None
    function_call: Null = None
    tool_calls: Empty = None
    annotations: Empty = None

    def for_template(self) -> dict[str, str]:
        """Return the message for a chat template, which expects the role `system`, and texts instead of parts."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return message if self.name is None else message | {"name": self.name}


class TemplateFields(Protocol):
    """The fields of a request that determine how messages become a prompt."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


async def render_chat(service: Service, messages: list[Message], fields: TemplateFields) -> str:
    """Return the prompt. Raises `InvalidRequest` for contradicting fields, or if the template refuses the messages."""
    continues = bool(fields.continue_final_message)
    num_variables = len(fields.chat_template_kwargs or ())
    if num_variables > MAX_TEMPLATE_VARIABLES:
        raise InvalidRequest(
            f"`chat_template_kwargs` may have at most {MAX_TEMPLATE_VARIABLES} entries, but it has {num_variables}",
            param="chat_template_kwargs",
        )
    service.text.check_messages(len(messages))
    return await service.text.render(
        [message.for_template() for message in messages],
        add_generation_prompt=not continues if fields.add_generation_prompt is None else fields.add_generation_prompt,
        continue_final_message=continues,
        chat_template_kwargs=fields.chat_template_kwargs,
    )
