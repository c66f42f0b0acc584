"""Drafts from tokens that occurred before: the methods `ngram` and `suffix`. Owned by the scheduler.

A request follows the places at which its last tokens occurred before, in its own tokens or, with `suffix`, also in the
tokens that other requests generated. As long as its tokens equal the tokens behind such a place, the tokens that follow
there are predicted; when no place agrees any longer, other places are looked up. Predictions are compared with the
tokens that come whether a step checks them or not, so how often a request's predictions are right is known also while
its drafts are off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from eagleray.config.speculation import Speculation
from eagleray.scheduler.acceptance import Acceptance
from eagleray.scheduler.follower import FIRST_ACCEPTED, FORGET_ACCEPTED, Follower, Prediction, most_frequent
from eagleray.scheduler.request import Request
from eagleray.scheduler.speculation import LEAST_PROBABILITY, Candidate, Draft, Drafter, best_counts
from eagleray.scheduler.token_history import OwnTokens, SharedTokens, TokenHistory
from eagleray.scheduler.token_index import Place

SECONDS_OF_TOKEN = 20e-6
"""Time that the predictions after a token of a request take the scheduler, in a process that computes a model too. A
request becomes cold when its drafts save less."""

MOST_LEAST_ACCEPTED = 2.0
"""No request becomes cold with more accepted tokens, see `Follower.num_accepted`."""

COLD_TOKENS = 8
"""Number of tokens between two lookups of the last tokens of a cold request."""

WARM_MATCH = 6
"""Number of its last tokens that a cold request must repeat until its tokens are predicted again."""


class HistoryDrafter(Drafter[Follower]):
    """Drafts what followed when the last tokens of a request occurred before."""

    def __init__(self, options: Speculation) -> None:
        super().__init__(options)
        self._history: TokenHistory = SharedTokens(options) if options.method == "suffix" else OwnTokens(options)
        self._least_share = options.suffix_decoding_min_token_prob
        self._tokens_per_match = options.suffix_decoding_max_spec_factor
        self.acceptance = Acceptance()
        self._least_accepted = 0.0

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

    def gain_of_waiting(self, candidates: Sequence[Candidate], *, num_rows: int) -> float:
        """Return the expected gain in speed if drafts are checked behind the tokens that are being computed, instead of
        planning a step of `num_rows` rows ahead: 0.1 means a tenth more tokens in a second."""
        costs = self.costs(num_rows)
        if math.isinf(costs.least_gain):
            return 0.0
        # The first predicted token is being computed without a draft.
        drafts = [self.draft(one, min(one.limit, self._max_tokens + 1)) for one in candidates]
        later = [Draft(draft.token_ids[1:], draft.probabilities[1:]) for draft in drafts]
        least_gain = costs.least_gain
        return best_counts(later, costs, num_rows=num_rows, room=costs.most_tokens, least_gain=least_gain)[1]

    def on_step(self, *, num_rows: int, num_drafts: int, num_accepted: int, seconds: float, num_steps: int = 1) -> None:
        """Count a step, see `Drafter.on_step`, by which the work for predictions is bounded, too."""
        super().on_step(
            num_rows=num_rows, num_drafts=num_drafts, num_accepted=num_accepted, seconds=seconds, num_steps=num_steps
        )
        least_rate = SECONDS_OF_TOKEN * num_rows / self.costs(num_rows).seconds(num_rows)
        self._least_accepted = min(MOST_LEAST_ACCEPTED, least_rate / (1 - FORGET_ACCEPTED))

    def on_checked(self, follower: Follower, num_accepted: int) -> None:
        """Count the accepted tokens of a draft."""
        super().on_checked(follower, num_accepted)
        follower.num_accepted += num_accepted

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
