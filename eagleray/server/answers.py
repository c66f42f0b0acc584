"""The answers of routes for conversations, divided into their parts. Owned by a `ParsedRequest`."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from eagleray.client.answers.parts import AnswerPart, Reasoning, Splitter
from eagleray.client.answers.plan import AnswerPlan
from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.server.field_fates import REASONING
from eagleray.server.generation import CompletionTokensDetails, Generation, Usage
from eagleray.server.lenient_body import unsupported_feature
from eagleray.server.text_processor import TextProcessor


class CompletionKey(NamedTuple):
    """A completion of a request."""

    prompt: int
    number: int


def check_reasoning_field(include_reasoning: bool | None, plan: AnswerPlan) -> None:
    """Raise `UnsupportedParameter` if reasoning is to be left out, but is not told from the rest of the answer."""
    if include_reasoning is False and plan.reasoning is None:
        raise unsupported_feature(REASONING, ["include_reasoning"])


class AnswerReader:
    """Divides the answers to the prompts of one request. `shows_reasoning`: whether their parts include reasoning."""

    def __init__(self, plan: AnswerPlan, *, shows_reasoning: bool) -> None:
        self.prompts: list[str] = []
        """The rendered prompts, in order."""
        self._plan = plan
        self._shows_reasoning = shows_reasoning
        self._splitters: dict[CompletionKey, Splitter] = {}
        self._reasoning: defaultdict[CompletionKey, list[str]] = defaultdict(list)
        """Text of the reasoning so far."""

    def read(self, generation: Generation, part: CompletionDelta | CompletionOutput) -> list[AnswerPart]:
        """Return the parts that a delta completes, or those of a whole completion. Deltas come in order."""
        key = CompletionKey(generation.index, part.index)
        splitter = self._splitters.get(key)
        if splitter is None:
            splitter = self._splitters[key] = self._plan.splitter(self.prompts[generation.index])
        parts = splitter.push(part.text)
        if part.finish_reason is not None:
            parts = [*parts, *splitter.finish()]
        if self._plan.reasoning is None:
            return parts
        self._reasoning[key] += [found.text for found in parts if isinstance(found, Reasoning)]
        return parts if self._shows_reasoning else [found for found in parts if not isinstance(found, Reasoning)]

    async def count_reasoning(self, usage: Usage, processor: TextProcessor) -> None:
        """Put the number of tokens of all reasoning that was read into the usage, if reasoning is divided off."""
        if self._plan.reasoning is not None:
            counts = [await processor.count_tokens("".join(texts)) for texts in self._reasoning.values()]
            usage.completion_tokens_details = CompletionTokensDetails(sum(counts))
