"""Log-probabilities in the two forms of OpenAI's API, and as vLLM gives those of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagleray.client import Logprob, Tokenizer
from eagleray.server.openai.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobList,
    TokenLogprob,
)

__all__ = ["chat_logprobs", "completion_logprobs", "prompt_logprob_list"]

LEAST = -9999.0
"""JSON has no minus infinity, which is the log-probability of a token that was ruled out."""

Position = Mapping[int, Logprob]
"""By token id: the chosen token first, then the likeliest ones in order, then those that were asked for by id."""


def completion_logprobs(
    token_ids: Sequence[int], positions: Sequence[Position | None], k: int, offset: int, tokenizer: Tokenizer
) -> CompletionLogprobs:
    """The form of /v1/completions: parallel lists. `offset` is where the first token begins in the text."""
    logprobs = CompletionLogprobs([], [], [], [])
    for token_id, position in zip(token_ids, positions, strict=True):
        text = _text(token_id, position, tokenizer)
        logprobs.text_offset.append(offset)
        logprobs.tokens.append(text)
        logprobs.token_logprobs.append(None if position is None else _finite(position[token_id]))
        logprobs.top_logprobs.append(None if position is None else _top_by_text(token_id, position, k, tokenizer))
        offset += len(text)
    return logprobs


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[Position], k: int, tokenizer: Tokenizer
) -> ChatLogprobs:
    """The form of /v1/chat/completions: one object for each token, with its bytes."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        chosen = _entry(token_id, position, tokenizer)
        top = [_entry(other, position, tokenizer) for other in _top(token_id, position, k)]
        content.append(ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def prompt_logprob_list(positions: Sequence[Position | None], k: int) -> PromptLogprobList:
    """As vLLM gives them: an object by token id for each position, None for the first."""
    return [None if position is None else _by_token_id(position, k) for position in positions]


def _by_token_id(position: Position, k: int) -> dict[int, PromptLogprob]:
    chosen = next(iter(position))
    kept = dict.fromkeys([chosen, *_top(chosen, position, k)])
    return {
        token_id: PromptLogprob(_finite(position[token_id]), position[token_id].rank, position[token_id].decoded_token)
        for token_id in kept
    }


def _top(chosen: int, position: Position, k: int) -> list[int]:
    """The `k` likeliest, in order, then the ids that were asked for."""
    ranked = sorted((entry.rank, token_id) for token_id, entry in position.items() if entry.rank is not None)
    likeliest = [token_id for rank, token_id in ranked if rank <= k]
    asked = [token_id for token_id, entry in position.items() if entry.rank is None and token_id != chosen]
    return likeliest + asked


def _top_by_text(chosen: int, position: Position, k: int, tokenizer: Tokenizer) -> dict[str, float]:
    ids = dict.fromkeys([*_top(chosen, position, k), chosen])
    # Different ids may have the same text, as parts of characters do: the likelier one, which comes first, stays.
    entries = {}
    for token_id in ids:
        entries.setdefault(_text(token_id, position, tokenizer), _finite(position[token_id]))
    return entries


def _entry(token_id: int, position: Position, tokenizer: Tokenizer) -> TokenLogprob:
    return TokenLogprob(
        token=_text(token_id, position, tokenizer),
        logprob=_finite(position[token_id]),
        bytes=list(tokenizer.token_bytes(token_id)),
    )


def _text(token_id: int, position: Position | None, tokenizer: Tokenizer) -> str:
    decoded = None if position is None else position[token_id].decoded_token
    return tokenizer.token_to_text(token_id) if decoded is None else decoded


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LEAST)
