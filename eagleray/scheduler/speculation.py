"""Drafts of the next tokens of requests, and the decision how many of them a step checks. Owned by the scheduler.

A request follows a place at which its last tokens occurred before: as long as its tokens equal those behind that place,
these are predicted to continue, and when one differs, another place is looked up. Predictions are compared with the
tokens that come whether a step checks them or not, so how often a request's predictions are right is known also while
its drafts are off. The drafts of a step are those with which it is expected to make most tokens in a second, by the
measured times of steps. None of this changes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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

LEAST_GAIN = 0.03
"""Expected gain in speed below which nothing is drafted."""

LEAST_PROBABILITY = 0.1
"""No token is drafted below this probability, however cheap it seems."""


class Candidate(NamedTuple):
    """A request for which tokens may be drafted."""

    follower: Follower
    token_ids: Sequence[int]
    limit: int
    """Most tokens of its draft."""


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

    def choose(self, candidates: Sequence[Candidate], *, num_tokens: int, num_rows: int, room: int) -> list[list[int]]:
        """Return the tokens to check behind those of each candidate, in a step with `num_tokens` other tokens and
        `num_rows` rows. `room`: most drafted tokens of the step."""
        probabilities = [self._probabilities(one.follower, min(one.limit, self._max_tokens)) for one in candidates]
        counts, _ = self._best_counts(probabilities, num_tokens=num_tokens, num_rows=num_rows, room=room)
        return [_predicted(one, count) for one, count in zip(candidates, counts, strict=True)]

    def gain_of_waiting(self, followers: Sequence[Follower], *, num_rows: int) -> float:
        """Return the expected gain in speed if drafts are checked behind the tokens that are being computed, instead of
        planning a step of `num_rows` rows ahead: 0.1 means a tenth more tokens in a second."""
        # The first predicted token is being computed without a draft.
        probabilities = [self._probabilities(follower, self._max_tokens + 1)[1:] for follower in followers]
        room = self.costs.most_tokens
        return self._best_counts(probabilities, num_tokens=num_rows, num_rows=num_rows, room=room)[1]

    def on_checked(self, num_accepted: int) -> None:
        """Count the accepted tokens of a draft."""
        for position in range(num_accepted):
            self.num_accepted[position] += 1

    def _best_counts(
        self, probabilities: Sequence[Sequence[float]], *, num_tokens: int, num_rows: int, room: int
    ) -> tuple[list[int], float]:
        """Return how many tokens of each draft make a step fastest, in tokens per second, and the gain in speed; none
        if the gain is too small. `probabilities`: that each token of a draft is accepted."""
        counts = [0] * len(probabilities)
        in_order = sorted(
            ((-one, index) for index, each in enumerate(probabilities) for one in each if one >= LEAST_PROBABILITY)
        )
        room = min(room, self.costs.most_tokens - num_tokens)
        expected, without = float(num_rows), num_rows / self.costs.seconds(num_tokens)
        best_speed, best = without * (1 + LEAST_GAIN), 0
        for number, (probability, _) in enumerate(in_order[: max(0, room)], 1):
            expected -= probability
            if (speed := expected / self.costs.seconds(num_tokens + number)) > best_speed:
                best_speed, best = speed, number
        for _, index in in_order[:best]:
            counts[index] += 1
        return counts, best_speed / without - 1 if best else 0.0

    def _probabilities(self, follower: Follower, count: int) -> list[float]:
        """Return the probabilities that the first 1, 2, ... `count` predicted tokens are all right."""
        probabilities: list[float] = []
        if follower.source is None:
            return probabilities
        all_right = 1.0
        seen, length = follower.seen, follower.match_length
        for _ in range(count):
            of_class = self._classes[min(length, MAX_MATCH).bit_length()]
            all_right *= (seen.right + CLASS_WEIGHT * of_class.right / of_class.total) / (seen.total + CLASS_WEIGHT)
            probabilities.append(all_right)
            length += 1
        return probabilities


def _predicted(candidate: Candidate, count: int) -> list[int]:
    """Return the predicted next `count` tokens of a request, or fewer if the tokens that it follows end."""
    source, place = candidate.follower.source, candidate.follower.place
    drafted: list[int] = []
    while source is not None and len(drafted) < count:
        index = place + len(drafted)
        if index < len(source):
            drafted.append(source[index])
        elif source is candidate.token_ids:  # it repeats its own last tokens: the draft goes on with itself
            drafted.append(drafted[index - len(source)])
        else:
            break
    return drafted


def _lengths(least: int, most: int) -> list[int]:
    """Return the lengths of n-grams that are indexed: both limits, and up to two between."""
    return sorted({least + (most - least) * part // 3 for part in range(4)})
