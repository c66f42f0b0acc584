"""Conversations in a column: their prompts, and the form of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eagleray.client.answers.plan import AnswerPlan
from eagleray.client.answers.requested_tools import CHAT_TOOLS, OfferedTools, RequestedTools, choose_tools, read_tools
from eagleray.instance import LocalInstance
from eagleray.prompts import Conversation, PromptLike, chat_prompts


class ConversationPrompt(NamedTuple):
    """The prompt of a conversation, and the plan of its answer."""

    prompt: PromptLike
    plan: AnswerPlan


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """The conversations of a dataset, and the tools that their answers may call."""

    column: str
    offered: OfferedTools
    """Tools of all rows."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools_column: str | None = None
    """Column of rows with tools of their own."""
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True

    @property
    def inputs(self) -> dict[str, str]:
        """Names of the columns that are read, by the parameters that set them."""
        tools = {} if self.tools_column is None else {"tools_column": self.tools_column}
        return {"messages_column": self.column, **tools}

    def check(self, instance: LocalInstance | None = None) -> None:
        """Raise `InvalidRequest` for tools or a choice that is wrong in every row, or that the instance does not
        support."""
        if self.tools_column is None:
            requested = self._requested(self.offered)
            if instance is not None:
                instance.client.answer_formats.plan(requested)

    def prompt(
        self, conversation: Conversation, own_tools: Sequence[Any] | None, instance: LocalInstance
    ) -> ConversationPrompt:
        """Return the prompt of a conversation. `own_tools`: those of its row, if it has some. Raises
        `InvalidRequest`."""
        requested = self._requested(self.offered if own_tools is None else read_tools(own_tools, CHAT_TOOLS))
        (prompt,) = chat_prompts(
            conversation,
            instance.tokenizer,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=requested.offered.shown,
        )
        return ConversationPrompt(prompt, instance.client.answer_formats.plan(requested))

    def _requested(self, offered: OfferedTools) -> RequestedTools:
        return choose_tools(offered, self.tool_choice, is_parallel=self.parallel_tool_calls)
