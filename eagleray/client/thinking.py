"""Thinking before answers: what the worker needs to follow it, for each request of one model."""

from __future__ import annotations

from eagleray.client.answers.formats import ReasoningFormat
from eagleray.client.answers.reasoning_formats import ReasoningConfig
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.errors import InvalidRequest
from eagleray.messages.grammars import Grammar
from eagleray.messages.thinking import Thinking

SPACES_BEFORE_START = ("", "\n", "\n\n")
"""White space that models write before the marker with which they begin to think."""


class ThinkingBuilder:
    """Thinking in one format, whose markers the texts of `config` have. `eos_token_ids`: the model's."""

    def __init__(
        self, format: ReasoningFormat, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], config: ReasoningConfig
    ) -> None:
        end = config.reasoning_end_str
        self._format = format
        self._tokenizer = tokenizer
        self._end = self._ids(format.end)
        self._before_end = self._ids(end.removesuffix(format.end) if end else format.end_prefix)
        self._header = self._ids(format.answer_header)
        start_ids = self._ids(format.start)
        self._starts = tuple(ids + start_ids for ids in map(self._ids, SPACES_BEFORE_START) if len(ids) <= 1)
        interrupts = map(self._ids, format.interrupts)
        self._interrupts = tuple(ids[0] for ids in interrupts if len(ids) == 1)
        self._not_thought = (*self._interrupts, *eos_token_ids)

    def build(self, prompt: str, *, budget: int | None, grammar: Grammar | None, vocab_size: int) -> Thinking | None:
        """Return what the worker needs for the answer to a prompt; None if that is nothing, because the answer begins
        at once, or has neither a budget nor a grammar. `vocab_size`: the model's.

        Raises `InvalidRequest` if the end of the thinking would not be found.
        """
        is_open = self._format.begins_reasoning(prompt)
        may_begin = self._format.may_begin_reasoning(prompt)
        if not (is_open or may_begin) or (grammar is None and budget is None):
            return None
        if len(self._end) != 1 or self._end[0] >= vocab_size:
            if not is_open and budget is None:
                return None  # the grammar begins at once, and allows no thinking
            raise InvalidRequest(
                f"the end of the thinking, {self._format.end}, is not a token of this model, so it is not found: leave "
                "out `thinking_token_budget` and constraints, or turn the thinking off in the prompt",
                param="structured_outputs" if budget is None else "thinking_token_budget",
            )
        before_end = self._before_end if budget is not None and len(self._before_end) <= budget else ()
        return Thinking(
            end=self._end,
            starts=tuple(start for start in self._starts if max(start) < vocab_size) if may_begin else (),
            is_open=is_open,
            is_required=bool(self._header),
            budget=None if budget is None else budget - len(before_end),
            forced_end=before_end + self._end,
            interrupts=self._interrupts if grammar is None else (),
            forbidden=() if grammar is None else tuple(token for token in self._not_thought if token < vocab_size),
            answer_header=() if grammar is None or grammar.kind == "structural_tag" else self._header,
        )

    def _ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text within an answer."""
        token_id = self._tokenizer.token_id(text)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if token_id is None else (token_id,)
