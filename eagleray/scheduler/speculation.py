"""The decision how many drafted tokens a step checks, whoever drafts them. Owned by the scheduler.

A drafter predicts the next tokens of requests, and tells how likely they are. A step gets the drafts with which its
requests are expected to be fastest, by the measured times of steps, as long as drafts have gained time so far. None of
this changes a token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from eagleray.config.speculation import Speculation
from eagleray.scheduler.request import Request
from eagleray.scheduler.step_costs import NEWEST, StepCosts

LEAST_PROBABILITY = 0.1
"""No token is drafted below this probability, however cheap it seems."""


LEAST_PROMPT_TOKENS = 64
"""Number of tokens from which the time of a step that computes a prompt is in proportion to it."""

MARGIN_BESIDE_PROMPT = 1.25
"""Time that a drafted token has to save in such a step, in units of the time that it takes."""

FollowerT = TypeVar("FollowerT")
"""The state that a drafter keeps of a request."""


class Candidate(NamedTuple):
    """A request for which tokens may be drafted."""

    follower: Any
    """The drafter's state of the request."""
    limit: int
    """Most tokens of its draft."""


class Draft(NamedTuple):
    """Predicted next tokens of a request."""

    token_ids: list[int]
    probabilities: list[float]
    """Probability of each that it and all before it are right."""


class Drafter(ABC, Generic[FollowerT]):
    """Drafts for all requests of an engine."""

    def __init__(self, options: Speculation) -> None:
        self.num_accepted = [0] * options.num_speculative_tokens
        """Number of accepted tokens by their position in the draft."""
        self._max_tokens = options.num_speculative_tokens
        self._costs: dict[int, StepCosts] = {}
        """Times of steps by the number of bits of their number of rows."""
        self._prompt_token_seconds = 0.0

    @abstractmethod
    def begin(self, request: Request) -> FollowerT:
        """Begin to predict the tokens of a request."""

    @abstractmethod
    def end(self, follower: FollowerT) -> None:
        """Note that a request has finished."""

    @abstractmethod
    def on_token(self, follower: FollowerT) -> None:
        """Compare the last of a request's tokens with the prediction, and predict the next one."""

    @abstractmethod
    def index_tokens(self, follower: FollowerT) -> None:
        """Get ready for predictions while a prompt is being computed."""

    @abstractmethod
    def is_predicted(self, follower: FollowerT) -> bool:
        """Whether tokens of the request may be drafted."""

    @abstractmethod
    def draft(self, candidate: Candidate, limit: int) -> Draft:
        """Return the predicted next tokens of a request, at most `limit`."""

    @abstractmethod
    def gain_of_waiting(self, candidates: Sequence[Candidate], *, num_rows: int) -> float:
        """Return the expected gain in speed if drafts are checked behind the tokens that are being computed, instead of
        planning a step of `num_rows` rows ahead: 0.1 means a tenth more tokens in a second."""

    def choose(self, candidates: Sequence[Candidate], *, num_tokens: int, num_rows: int, room: int) -> list[list[int]]:
        """Return the tokens to check behind those of each candidate, in a step with `num_tokens` other tokens and
        `num_rows` rows. `room`: most drafted tokens of the step."""
        has_prompt = num_tokens > num_rows
        costs = self.costs(len(candidates) if has_prompt else num_rows)
        least_gain = self.least_gain(costs)
        if math.isinf(least_gain):
            return [[] for _ in candidates]
        drafts = [self.draft(one, min(one.limit, self._max_tokens)) for one in candidates]
        if has_prompt:
            counts = self._counts_beside_prompt(drafts, costs, room)
        else:
            counts, _ = best_counts(drafts, costs, num_rows=num_rows, room=room, least_gain=least_gain)
        return [draft.token_ids[:count] for draft, count in zip(drafts, counts, strict=True)]

    def least_gain(self, costs: StepCosts) -> float:
        """Return the expected gain in speed that drafts must have to be checked."""
        return costs.least_gain

    def on_step(self, *, num_rows: int, num_drafts: int, num_accepted: int, seconds: float, num_steps: int = 1) -> None:
        """Count a step that computed one token of each of its rows, and drafts. It stands for `num_steps` like it."""
        costs = self.costs(num_rows)
        costs.add(num_rows + num_drafts, seconds)
        costs.settle(
            num_rows=num_rows,
            num_drafts=num_drafts,
            num_accepted=num_accepted,
            seconds=seconds,
            num_steps=num_steps,
        )

    def on_prompt_step(self, *, num_tokens: int, seconds: float) -> None:
        """Count a step that computed a part of a prompt."""
        if num_tokens >= LEAST_PROMPT_TOKENS:
            each = seconds / num_tokens
            self._prompt_token_seconds += NEWEST * (each - self._prompt_token_seconds)

    def on_checked(self, follower: FollowerT, num_accepted: int) -> None:
        """Count the accepted tokens of a draft."""
        for position in range(num_accepted):
            self.num_accepted[position] += 1

    def costs(self, num_rows: int) -> StepCosts:
        """Return the measured times of steps with about `num_rows` rows."""
        costs = self._costs.get((num_rows - 1).bit_length())
        if costs is None:
            costs = self._costs[(num_rows - 1).bit_length()] = StepCosts()
        return costs

    def _counts_beside_prompt(self, drafts: Sequence[Draft], costs: StepCosts, room: int) -> list[int]:
        """Return how many tokens of each draft save more time than they take in a step that computes a prompt. Such a
        step is so long that they delay nobody else."""
        if not costs.is_measured or not self._prompt_token_seconds:
            return [0] * len(drafts)
        least = MARGIN_BESIDE_PROMPT * self._prompt_token_seconds * len(drafts) / costs.seconds(len(drafts))
        counts = []
        for draft in drafts:
            counts.append(min(room, sum(one > least for one in draft.probabilities)))
            room -= counts[-1]
        return counts


def best_counts(
    drafts: Sequence[Draft], costs: StepCosts, *, num_rows: int, room: int, least_gain: float
) -> tuple[list[int], float]:
    """Return how many tokens of each draft make the requests of a step fastest, and the gain in speed; none if the gain
    is not above `least_gain`. It is the geometric mean of the rows, so that requests without drafts pay little for
    others."""
    counts = [0] * len(drafts)
    in_order: list[tuple[float, int]] = []
    for index, draft in enumerate(drafts):
        expected = 1.0
        for probability in draft.probabilities:
            in_order.append((-math.log1p(probability / expected), index))
            expected += probability
    if not in_order:
        return counts, 0.0
    in_order.sort()
    room = min(room, costs.most_tokens - num_rows)
    without, sum_of_logs = costs.seconds(num_rows), 0.0
    best_gain, best = least_gain, 0
    for number, (further, _) in enumerate(in_order[: max(0, room)], 1):
        sum_of_logs -= further
        gain = sum_of_logs / num_rows - math.log(costs.seconds(num_rows + number) / without)
        if gain > best_gain:
            best_gain, best = gain, number
    for _, index in in_order[:best]:
        counts[index] += 1
    return counts, math.expm1(best_gain) if best else 0.0
