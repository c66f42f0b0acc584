"""Drafts of the next tokens of requests, and the decision how many of them a step checks. Owned by the scheduler.

A request follows the places at which its last tokens occurred before, in its own tokens or, with `suffix`, also in the
tokens that other requests generated. As long as its tokens equal the tokens behind such a place, the tokens that follow
there are predicted; when no place agrees any longer, other places are looked up. Predictions are compared with the
tokens that come whether a step checks them or not, so how often a request's predictions are right is known also while
its drafts are off. A step gets the drafts with which its requests are expected to be fastest, by the measured times of
steps, as long as drafts have gained time so far. None of this changes a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from eagleray.config.speculation import Speculation
from eagleray.scheduler.acceptance import Acceptance
from eagleray.scheduler.follower import FIRST_ACCEPTED, FORGET_ACCEPTED, Follower, Prediction, most_frequent
from eagleray.scheduler.request import Request
from eagleray.scheduler.step_costs import NEWEST, StepCosts
from eagleray.scheduler.token_history import OwnTokens, SharedTokens, TokenHistory
from eagleray.scheduler.token_index import Place

LEAST_PROBABILITY = 0.1
"""No token is drafted below this probability, however cheap it seems."""


LEAST_PROMPT_TOKENS = 64
"""Number of tokens from which the time of a step that computes a prompt is in proportion to it."""

MARGIN_BESIDE_PROMPT = 1.25
"""Time that a drafted token has to save in such a step, in units of the time that it takes."""

SECONDS_OF_TOKEN = 20e-6
"""Time that the predictions after a token of a request take the scheduler, in a process that computes a model too. A
request becomes cold when its drafts save less."""

MOST_LEAST_ACCEPTED = 2.0
"""No request becomes cold with more accepted tokens, see `Follower.num_accepted`."""

COLD_TOKENS = 8
"""Number of tokens between two lookups of the last tokens of a cold request."""

WARM_MATCH = 6
"""Number of its last tokens that a cold request must repeat until its tokens are predicted again."""


class Candidate(NamedTuple):
    """A request for which tokens may be drafted."""

    follower: Follower
    limit: int
    """Most tokens of its draft."""


class Draft(NamedTuple):
    """Predicted next tokens of a request."""

    token_ids: list[int]
    probabilities: list[float]
    """Probability of each that it and all before it are right."""


NO_DRAFT = Draft([], [])


class Drafter:
    """Drafts for all requests of an engine."""

    def __init__(self, options: Speculation) -> None:
        self.num_accepted = [0] * options.num_speculative_tokens
        """Number of accepted tokens by their position in the draft."""
        self._max_tokens = options.num_speculative_tokens
        self._history: TokenHistory = SharedTokens(options) if options.method == "suffix" else OwnTokens(options)
        self._least_share = options.suffix_decoding_min_token_prob
        self._tokens_per_match = options.suffix_decoding_max_spec_factor
        self.acceptance = Acceptance()
        self._costs: dict[int, StepCosts] = {}
        """Times of steps by the number of bits of their number of rows."""
        self._least_accepted = 0.0
        self._prompt_token_seconds = 0.0

    def begin(self, request: Request) -> Follower:
        """Begin to predict the tokens of a request."""
        return self._history.begin(request)

    def end(self, follower: Follower) -> None:
        """Note that a request has finished."""
        self._history.end(follower)

    def on_token(self, follower: Follower) -> None:
        """Compare the last of a request's tokens with the prediction, and predict the next one."""
        if follower.is_cold:
            if len(follower.token_ids) % COLD_TOKENS == 0:
                self._warm_up(follower)
            return
        if follower.prediction is not None:
            predicted, _, cell = follower.prediction
            token_id = follower.token_ids[-1]
            is_right = predicted == token_id
            follower.calibration.add(is_right, cell)
            cell.add(is_right)
            follower.advance(token_id, max_match=self._history.max_match)
        self._history.index_tokens(follower)
        if not follower.places:
            self._history.look_up(follower)
        follower.num_accepted *= FORGET_ACCEPTED
        if follower.num_accepted < self._least_accepted:
            follower.cool_down()
        else:
            follower.prediction = self._prediction(follower.places, follower.match_length)

    def index_tokens(self, follower: Follower) -> None:
        """Index tokens of a request that are not in the index yet, up to a number."""
        self._history.index_tokens(follower)

    def is_predicted(self, follower: Follower) -> bool:
        """Whether tokens of the request may be drafted."""
        return follower.prediction is not None

    def choose(self, candidates: Sequence[Candidate], *, num_tokens: int, num_rows: int, room: int) -> list[list[int]]:
        """Return the tokens to check behind those of each candidate, in a step with `num_tokens` other tokens and
        `num_rows` rows. `room`: most drafted tokens of the step."""
        has_prompt = num_tokens > num_rows
        costs = self.costs(len(candidates) if has_prompt else num_rows)
        if math.isinf(costs.least_gain):
            return [[] for _ in candidates]
        drafts = [self.draft(one, min(one.limit, self._max_tokens)) for one in candidates]
        if has_prompt:
            counts = self._counts_beside_prompt(drafts, costs, room)
        else:
            counts, _ = _best_counts(drafts, costs, num_rows=num_rows, room=room)
        return [draft.token_ids[:count] for draft, count in zip(drafts, counts, strict=True)]

    def gain_of_waiting(self, candidates: Sequence[Candidate], *, num_rows: int) -> float:
        """Return the expected gain in speed if drafts are checked behind the tokens that are being computed, instead of
        planning a step of `num_rows` rows ahead: 0.1 means a tenth more tokens in a second."""
        costs = self.costs(num_rows)
        if math.isinf(costs.least_gain):
            return 0.0
        # The first predicted token is being computed without a draft.
        drafts = [self.draft(one, min(one.limit, self._max_tokens + 1)) for one in candidates]
        later = [Draft(draft.token_ids[1:], draft.probabilities[1:]) for draft in drafts]
        return _best_counts(later, costs, num_rows=num_rows, room=costs.most_tokens)[1]

    def on_step(self, *, num_rows: int, num_drafts: int, num_accepted: int, seconds: float, num_steps: int = 1) -> None:
        """Count a step that computed one token of each of its rows, and drafts. It stands for `num_steps` like it."""
        costs = self.costs(num_rows)
        costs.add(num_rows + num_drafts, seconds)
        least_rate = SECONDS_OF_TOKEN * num_rows / costs.seconds(num_rows)
        self._least_accepted = min(MOST_LEAST_ACCEPTED, least_rate / (1 - FORGET_ACCEPTED))
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

    def on_checked(self, follower: Follower, num_accepted: int) -> None:
        """Count the accepted tokens of a draft."""
        follower.num_accepted += num_accepted
        for position in range(num_accepted):
            self.num_accepted[position] += 1

    def costs(self, num_rows: int) -> StepCosts:
        """Return the measured times of steps with about `num_rows` rows."""
        costs = self._costs.get((num_rows - 1).bit_length())
        if costs is None:
            costs = self._costs[(num_rows - 1).bit_length()] = StepCosts()
        return costs

    def draft(self, candidate: Candidate, limit: int) -> Draft:
        """Return the predicted next tokens of a request, at most `limit`."""
        follower = candidate.follower
        prediction, places, length = follower.prediction, follower.places, follower.match_length
        limit = min(limit, int(self._tokens_per_match * length))
        token_ids: list[int] = []
        probabilities: list[float] = []
        all_right = share = 1.0
        while prediction is not None and len(token_ids) < limit:
            all_right *= follower.calibration.probability(prediction.cell)
            share *= prediction.share
            if all_right < LEAST_PROBABILITY or share < self._least_share:
                break
            token_ids.append(prediction.token_id)
            probabilities.append(all_right)
            length += 1
            places = _continued(places, follower, token_ids)
            prediction = self._prediction(places, length)
        return Draft(token_ids, probabilities)

    def _warm_up(self, follower: Follower) -> None:
        """Predict tokens of a cold request again if it has begun to repeat some."""
        self._history.index_tokens(follower)
        self._history.look_up(follower)
        if follower.match_length < min(WARM_MATCH, self._history.max_match):
            follower.cool_down()
            return
        follower.is_cold = False
        follower.num_accepted = FIRST_ACCEPTED
        follower.prediction = self._prediction(follower.places, follower.match_length)

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

    def _prediction(self, places: Sequence[Place], match_length: int) -> Prediction | None:
        if not places:
            return None
        token_id, count = most_frequent(places)
        cell = self.acceptance.cell(match_length, count=count, total=len(places))
        return Prediction(token_id, count / len(places), cell)


def _continued(places: Sequence[Place], follower: Follower, drafted: list[int]) -> list[Place]:
    """Return the places behind the last drafted token, among those whose next token it is."""
    following = []
    for token_ids, index in places:
        if token_ids[index] != drafted[-1]:
            continue
        if index + 1 < len(token_ids):
            following.append(Place(token_ids, index + 1))
        elif token_ids is follower.sequence.token_ids:  # its own last tokens: the draft goes on with itself
            following.append(Place(drafted, 0))
    return following


def _best_counts(drafts: Sequence[Draft], costs: StepCosts, *, num_rows: int, room: int) -> tuple[list[int], float]:
    """Return how many tokens of each draft make the requests of a step fastest, and the gain in speed; none if the gain
    is too small. It is the geometric mean of the rows, so that requests without drafts pay little for others."""
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
    best_gain, best = costs.least_gain, 0
    for number, (further, _) in enumerate(in_order[: max(0, room)], 1):
        sum_of_logs -= further
        gain = sum_of_logs / num_rows - math.log(costs.seconds(num_rows + number) / without)
        if gain > best_gain:
            best_gain, best = gain, number
    for _, index in in_order[:best]:
        counts[index] += 1
    return counts, math.expm1(best_gain) if best else 0.0
