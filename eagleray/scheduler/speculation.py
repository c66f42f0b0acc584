"""Drafts of the next tokens of requests, and the decision how many of them a step checks. Owned by the scheduler.

A request follows a place at which its last tokens occurred before: as long as its tokens equal those behind that place,
these are predicted to continue, and when one differs, another place is looked up. Predictions are compared with the
tokens that come whether a step checks them or not, so how often a request's predictions are right is known also while
its drafts are off. A draft ends before the first token whose probability is lower than its share of a step's time. None
of this changes a token.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagleray.config.speculation import Speculation
from eagleray.scheduler.follower import Follower, Predictions
from eagleray.scheduler.request import Request
from eagleray.scheduler.step_costs import StepCosts
from eagleray.scheduler.token_index import MAX_MATCH, TokenIndex

MAX_INDEXED_AT_ONCE = 1024
"""Tokens of a request that are indexed after one step, so that a long prompt delays none."""

NUM_CLASSES = MAX_MATCH.bit_length() + 1
"""Number of classes of matches, by the number of bits of their length."""

FORGET = 0.9
"""Weight of a prediction relative to the next one of the request."""

CLASS_WEIGHT = 3.0
"""Number of predictions of a request that weigh as much as all predictions of the engine from matches so long."""

FORGET_CLASS = 0.998
PRIOR_RIGHT, PRIOR_PREDICTIONS = 3.0, 4.0
"""Predictions that each class begins with."""

MARGIN = 1.1
"""A token is drafted if its probability is this many times its share of a step's time."""

LEAST_PROBABILITY = 0.05
"""No token is drafted below this probability, however cheap it seems."""


class Drafter:
    """Drafts for all requests of an engine."""

    def __init__(self, options: Speculation) -> None:
        self.num_accepted = [0] * options.num_speculative_tokens
        """Number of accepted tokens by their position in the draft."""
        self.costs = StepCosts()
        self._max_tokens = options.num_speculative_tokens
        self._index = TokenIndex(_lengths(options.prompt_lookup_min, options.prompt_lookup_max))
        self._classes = [Predictions(PRIOR_RIGHT, PRIOR_PREDICTIONS) for _ in range(NUM_CLASSES)]
        self._num_sequences = 0

    def begin(self, request: Request) -> Follower:
        """Begin to predict the tokens of a request."""
        self._num_sequences += 1
        self._index.add(self._num_sequences, request.token_ids, domain=self._num_sequences)
        return Follower(self._num_sequences)

    def end(self, follower: Follower) -> None:
        """Forget a request that has finished."""
        self._index.discard(follower.number)

    def on_token(self, follower: Follower, token_ids: Sequence[int]) -> None:
        """Compare the last of a request's tokens with the prediction, and predict the next one."""
        if follower.source is not None:
            is_right = follower.source[follower.place] == token_ids[-1]
            follower.seen.add(is_right, FORGET)
            self._classes[follower.match_length.bit_length()].add(is_right, FORGET_CLASS)
            if is_right:
                follower.place += 1
                follower.match_length = min(follower.match_length + 1, MAX_MATCH)
            else:
                follower.source = None
        if follower.source is not None and follower.place == len(follower.source):
            follower.source = None
        if follower.source is None and (match := self._index.find(follower.number)) is not None:
            follower.source, follower.place, follower.match_length = match
        self.index_tokens(follower, token_ids)

    def index_tokens(self, follower: Follower, token_ids: Sequence[int]) -> None:
        """Index tokens of a request that are not in the index yet, up to a number."""
        first = follower.num_indexed
        follower.num_indexed = min(len(token_ids), first + MAX_INDEXED_AT_ONCE)
        for end in range(first + 1, follower.num_indexed + 1):
            self._index.insert(follower.number, end)

    def draft(self, follower: Follower, token_ids: Sequence[int], *, limit: int, num_rows: int) -> list[int]:
        """Return the tokens to check behind a request's tokens in a step of `num_rows` rows, at most `limit`; empty if
        none is worth its time."""
        source, place = follower.source, follower.place
        if source is None:
            return []
        limit = min(limit, self._max_tokens)
        threshold = self._threshold(num_rows)
        drafted: list[int] = []
        for probability in self._probabilities(follower, limit):
            index = place + len(drafted)
            if probability < threshold or (index >= len(source) and source is not token_ids):
                break
            # A request that repeats its own last tokens is predicted to go on with the draft itself.
            drafted.append(source[index] if index < len(source) else drafted[index - len(source)])
        return drafted

    def expected_gain(self, follower: Follower, num_rows: int) -> float:
        """Return the expected number of accepted tokens, if a draft waits for a token that is being computed."""
        if follower.source is None:
            return 0.0
        threshold = self._threshold(num_rows)
        probabilities = self._probabilities(follower, self._max_tokens + 1)
        return sum(probability for probability in probabilities[1:] if probability >= threshold)

    def on_checked(self, num_accepted: int) -> None:
        """Count the accepted tokens of a draft."""
        for position in range(num_accepted):
            self.num_accepted[position] += 1

    def _threshold(self, num_rows: int) -> float:
        """Return the least probability of a token that is worth its time in a step of `num_rows` rows."""
        return max(LEAST_PROBABILITY, MARGIN * self.costs.share_of_token(num_rows))

    def _probabilities(self, follower: Follower, count: int) -> list[float]:
        """Return the probabilities that the first 1, 2, ... `count` predicted tokens are all right."""
        probabilities, all_right = [], 1.0
        seen, length = follower.seen, follower.match_length
        for _ in range(count):
            of_class = self._classes[min(length, MAX_MATCH).bit_length()]
            all_right *= (seen.right + CLASS_WEIGHT * of_class.right / of_class.total) / (seen.total + CLASS_WEIGHT)
            probabilities.append(all_right)
            length += 1
        return probabilities


def _lengths(least: int, most: int) -> list[int]:
    """Return the lengths of n-grams that are indexed: both limits, and up to two between."""
    return sorted({least + (most - least) * part // 3 for part in range(4)})
