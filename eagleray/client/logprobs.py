"""Log-probabilities as users get them: by token id, with the token's text."""

from __future__ import annotations

from collections.abc import Sequence

from eagleray.client.outputs import Logprob
from eagleray.client.tokenizer import Tokenizer
from eagleray.messages.outputs import PromptLogprobs, TokenLogprobs

__all__ = ["PromptLogprobsBuilder", "position_logprobs"]

Position = dict[int, Logprob]


def position_logprobs(reported: TokenLogprobs, *, num_asked: int, tokenizer: Tokenizer | None) -> Position:
    """One position of the output. The last `num_asked` of the reported tokens were asked for by id."""
    return _position(reported.token_ids, reported.logprobs, reported.rank, num_asked, tokenizer)


class PromptLogprobsBuilder:
    """The log-probabilities of one prompt, which come in parts while it is computed."""

    def __init__(self, num_prompt_tokens: int, tokenizer: Tokenizer | None) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._tokenizer = tokenizer
        self.positions: list[Position | None] = [None]
        """Of the prompt's first tokens; nothing precedes the first one."""

    @property
    def is_complete(self) -> bool:
        return len(self.positions) == self._num_prompt_tokens

    def add(self, part: PromptLogprobs) -> None:
        """The next positions. What is known already is not replaced."""
        known = len(self.positions) - part.start
        assert known >= 0, f"prompt logprobs from position {part.start} on, after {len(self.positions)} positions"
        columns = part.token_ids.tolist(), part.logprobs.tolist(), part.ranks.tolist()
        for token_ids, logprobs, rank in list(zip(*columns, strict=True))[known:]:
            self.positions.append(_position(token_ids, logprobs, rank, 0, self._tokenizer))


def _position(
    token_ids: Sequence[int], logprobs: Sequence[float], rank: int, num_asked: int, tokenizer: Tokenizer | None
) -> Position:
    """Columns: the chosen token, the likeliest in order, those that were asked for. A token is listed once."""
    num_top = len(token_ids) - 1 - num_asked
    ranks = [rank, *range(1, num_top + 1), *[None] * num_asked]
    position: Position = {}
    for token_id, logprob, its_rank in zip(token_ids, logprobs, ranks, strict=True):
        if token_id not in position:
            text = None if tokenizer is None else tokenizer.token_to_text(token_id)
            position[token_id] = Logprob(logprob, its_rank, text)
    return position
