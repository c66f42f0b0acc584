"""Drafts that a draft model proposes: the method `draft_model`. Owned by the scheduler.

The draft model runs in the worker, behind the step that sampled the tokens before (`worker/draft_model.py`). So there
are two decisions: for which requests it proposes how many tokens at the end of a step, and how many of them the next
step checks, which `Drafter` decides. The first one weighs the time of the passes of the draft model, too, which is
measured; it is charged to the account of drafts. A request whose prompt the draft model has not computed must be
expected to win that time back.

How often proposals are right is counted by their position, for all requests and for each. Without proposals nothing is
learnt, so some are made although no gain is expected, as long as the account has not used up what drafts may lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from eagleray.config.speculation import MAX_DRAFT_TOKENS, Speculation
from eagleray.scheduler.acceptance import Calibration, Cell
from eagleray.scheduler.request import Request
from eagleray.scheduler.speculation import LEAST_PROBABILITY, Candidate, Draft, Drafter
from eagleray.scheduler.step_costs import FIRST_BALANCE, INCOME, MAX_EXCESS, StepCosts

FIRST_PRIOR, LATER_PRIOR = 0.6, 0.7
"""Probability that a proposed token is right if all before it are, before anything was measured: of the first token of
a proposal, and of the others."""

TRIAL_TOKENS = 2
"""Most tokens that are proposed where no gain is expected, to find out how often they are right."""

DEEPER_STEPS = 8
"""Number of steps of which one proposes a token more than seems best, so that its gain is measured."""

MARGIN_OF_CATCH_UP = 1.25
"""Time that drafts must be expected to save, in units of the time in which the draft model computes the tokens that it
lacks."""

TRIAL_STEPS = 4
"""Time of a trial in which the draft model computes the tokens of several requests, in steps."""

MOST_SAVED_STEPS = 8
"""Limit of the time that drafts have saved and may lose by computing prompts in vain, in steps."""

NEWEST_PASS = 0.2
"""Weight of the newest pass in the mean time of a prompt's token."""

FIRST_MEAN_LENGTH, NEWEST_LENGTH = 128.0, 0.1
"""Expected number of generated tokens of a request before any has finished; weight of the last one that has."""


@dataclass(slots=True, eq=False)
class ProposedTokens:
    """Tokens that the draft model has proposed for a request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    """The proposed tokens that have not been generated yet; empty once one of them was wrong."""
    position: int = 0
    """Number of tokens of the proposal that have come."""
    is_trial: bool = False
    """Whether the tokens are proposed to find out how often they are right, and are checked without a gain."""
    calibration: Calibration = field(default_factory=Calibration)


class Asking(NamedTuple):
    """A request for which tokens may be proposed."""

    follower: ProposedTokens
    limit: int
    """Most tokens to propose."""
    num_uncached: int
    """Number of its tokens that the draft model has to compute before."""
    is_catching_up: bool
    """Whether the draft model has computed some of them, but not all."""


class ModelDrafter(Drafter[ProposedTokens]):
    """Drafts what a draft model has proposed."""

    def __init__(self, options: Speculation) -> None:
        super().__init__(options)
        self.pass_costs = StepCosts()
        """Times of the passes of the draft model by their number of tokens."""
        later = [Cell(LATER_PRIOR) for _ in range(options.num_speculative_tokens - 1)]
        self.cells = [Cell(FIRST_PRIOR), *later]
        """How often the tokens of proposals are right if all before them are, by position."""
        self._prompt_pass_token_seconds = 0.0
        """Time of a token in passes that compute prompts; 0 before any."""
        self._mean_length = FIRST_MEAN_LENGTH
        self.computes_prompts = options.method == "draft_model"
        """Whether prompts are computed for proposals, and not with every step."""
        self._num_trials = 0
        self.saved_seconds = 0.0
        """Time that drafts have saved without that of all passes of the draft model. While it is negative, the draft
        model computes no further prompt."""

    def begin(self, request: Request) -> ProposedTokens:
        """Begin to follow the proposals for a request."""
        return ProposedTokens(request)

    def end(self, follower: ProposedTokens) -> None:
        """Count the length of a request that has finished."""
        num_tokens = len(follower.request.token_ids) - follower.request.num_prompt_tokens
        self._mean_length += NEWEST_LENGTH * (num_tokens - self._mean_length)

    def index_tokens(self, follower: ProposedTokens) -> None:
        """Do nothing: the draft model computes a prompt when it is first asked for a proposal."""

    def on_token(self, follower: ProposedTokens) -> None:
        """Compare the last of a request's tokens with the proposed one."""
        if not follower.token_ids:
            return
        is_right = follower.token_ids[0] == follower.request.token_ids[-1]
        cell = self.cells[follower.position]
        follower.calibration.add(is_right, cell)
        cell.add(is_right)
        follower.token_ids = follower.token_ids[1:] if is_right else []
        follower.position += 1

    def on_proposal(self, follower: ProposedTokens, token_ids: list[int]) -> None:
        """Note the tokens that are proposed behind the last one of a request."""
        follower.token_ids, follower.position = token_ids, 0

    def is_predicted(self, follower: ProposedTokens) -> bool:
        """Whether tokens are proposed for the request."""
        return bool(follower.token_ids)

    def draft(self, candidate: Candidate, limit: int) -> Draft:
        """Return the proposed next tokens of a request, at most `limit`."""
        follower = candidate.follower
        token_ids = follower.token_ids[:limit]
        return Draft(token_ids, self._probabilities(follower, follower.position, len(token_ids)))

    def gain_of_waiting(self, candidates: Sequence[Candidate], *, num_rows: int) -> float:
        """Return 0: behind tokens that are being computed nothing is proposed."""
        return 0.0

    def propose(self, asking: Sequence[Asking], *, num_rows: int) -> list[int]:
        """Return how many tokens the draft model proposes for each request, at the end of a step with `num_rows` rows
        that sample."""
        counts = [0] * len(asking)
        costs = self.costs(num_rows)
        if not costs.is_measured or math.isinf(costs.least_gain):
            return counts
        usual = self._max_tokens + 1
        ready = [index for index, one in enumerate(asking) if one.num_uncached <= usual]
        others = [index for index, one in enumerate(asking) if one.num_uncached > usual]
        depth, gain = self._best_depth([asking[index] for index in ready], costs, num_rows)
        is_trial = depth == 0 and costs.balance > 0
        self._num_trials += costs.balance > 0
        if is_trial:
            depth = 1 + self._num_trials % TRIAL_TOKENS
        elif depth and costs.balance > FIRST_BALANCE and self._num_trials % DEEPER_STEPS == 0:
            depth, is_trial = depth + 1, True
        catching_up: list[int] = []
        if others:
            is_possible = is_trial and not ready
            catching_up = self._choose_catching_up(asking, others, costs, num_rows, gain, is_trial=is_possible)
        for index in (*ready, *catching_up):
            one = asking[index]
            one.follower.is_trial = is_trial and 2 * (len(ready) + len(catching_up)) >= num_rows
            counts[index] = min(one.limit, self._max_tokens, max(1, depth) if index in catching_up else depth)
        return counts

    def choose(self, candidates: Sequence[Candidate], *, num_tokens: int, num_rows: int, room: int) -> list[list[int]]:
        """Return the tokens to check, see `Drafter.choose`, with those of trials."""
        chosen = super().choose(candidates, num_tokens=num_tokens, num_rows=num_rows, room=room)
        room -= sum(map(len, chosen))
        if num_tokens == num_rows:
            for index, one in enumerate(candidates):
                if one.follower.is_trial:
                    most = min(one.limit, len(chosen[index]) + max(0, room))
                    room += len(chosen[index])
                    chosen[index] = one.follower.token_ids[:most]
                    room -= len(chosen[index])
        return chosen

    def least_gain(self, costs: StepCosts) -> float:
        """Return 0: the time for the proposals has been spent."""
        return 0.0

    def on_step(self, *, num_rows: int, num_drafts: int, num_accepted: int, seconds: float, num_steps: int = 1) -> None:
        """Count a step without the passes of the draft model, see `Drafter.on_step`."""
        super().on_step(
            num_rows=num_rows, num_drafts=num_drafts, num_accepted=num_accepted, seconds=seconds, num_steps=num_steps
        )
        saved = INCOME * num_steps * seconds
        if num_drafts:
            without = self.costs(num_rows).seconds(num_rows)
            saved += (1 + num_accepted / num_rows) * without - min(seconds, MAX_EXCESS * without)
        most = MOST_SAVED_STEPS * self.costs(num_rows).seconds(num_rows)
        self.saved_seconds = min(self.saved_seconds + saved, most)

    def on_prompt_step(self, *, num_tokens: int, seconds: float) -> None:
        """Count a step that computed a part of a prompt, without the passes of the draft model."""
        super().on_prompt_step(num_tokens=num_tokens, seconds=seconds)
        if self.saved_seconds < 0:
            self.saved_seconds += INCOME * seconds

    def on_passes(self, passes: Sequence[tuple[int, float]], *, num_rows: int) -> None:
        """Count the passes of the draft model in a step with `num_rows` rows: pairs of a number of tokens and seconds.
        The computation of prompts is not charged to the account of the steps, which would end drafts that have just
        been paid."""
        usual = num_rows * (self._max_tokens + 1)
        charged = 0.0
        for num_tokens, seconds in passes:
            if num_tokens <= usual:
                self.pass_costs.add(num_tokens, seconds)
                charged += seconds
                continue
            before, each = self._prompt_pass_token_seconds, seconds / num_tokens
            self._prompt_pass_token_seconds = before + NEWEST_PASS * (each - before) if before else each
            charged += usual * each
        self.costs(num_rows).charge(charged, num_rows=num_rows)
        self.saved_seconds -= sum(seconds for _, seconds in passes)

    def _probabilities(self, follower: ProposedTokens, position: int, count: int) -> list[float]:
        """Return the probability of each of the next tokens of a proposal that it and all before it are right."""
        probabilities: list[float] = []
        all_right = 1.0
        for cell in self.cells[position : position + count]:
            all_right *= follower.calibration.probability(cell)
            probabilities.append(all_right)
        return probabilities

    def _pass_seconds(self, num_tokens: int) -> float:
        return self.pass_costs.seconds(num_tokens) if self.pass_costs.is_measured else 0.0

    def _catch_up_seconds(self, num_tokens: int) -> float:
        """Return the expected time to compute tokens of a prompt."""
        return num_tokens * self._prompt_pass_token_seconds or self._pass_seconds(num_tokens)

    def _best_depth(self, asking: Sequence[Asking], costs: StepCosts, num_rows: int) -> tuple[int, float]:
        """Return how many proposed tokens for each request make the requests of a step fastest, and the logarithm of
        their speed then; 0 tokens if that is too little. See `best_counts`."""
        probabilities = [self._probabilities(one.follower, 0, min(one.limit, self._max_tokens)) for one in asking]
        drafting = [index for index, one in enumerate(probabilities) if one and one[0] >= LEAST_PROBABILITY]
        if not drafting:
            return 0, 0.0
        room = min(MAX_DRAFT_TOKENS, costs.most_tokens - num_rows) // len(drafting)
        without, num_tokens, seconds = costs.seconds(num_rows), num_rows, 0.0
        expected = dict.fromkeys(drafting, 1.0)
        best, best_gain = 0, 0.0
        for depth in range(min(self._max_tokens, room)):
            going = [index for index in drafting if depth < len(probabilities[index])]
            if not going:
                break
            seconds += self._pass_seconds(sum(asking[i].num_uncached for i in going) if depth == 0 else len(going))
            num_tokens += len(going)
            for index in going:
                expected[index] += probabilities[index][depth]
            gain = sum(map(math.log, expected.values())) / num_rows
            gain -= math.log((costs.seconds(num_tokens) + seconds) / without)
            if gain > max(best_gain, costs.least_gain):
                best, best_gain = depth + 1, gain
        return best, best_gain

    def _choose_catching_up(
        self,
        asking: Sequence[Asking],
        others: Sequence[int],
        costs: StepCosts,
        num_rows: int,
        gain: float,
        *,
        is_trial: bool,
    ) -> list[int]:
        """Choose the requests whose missing tokens the draft model computes now.

        Requests that it has begun come first, then requests whose drafts are expected to save more time than the
        computation takes. If neither exist, a few are chosen for a trial. `others`: indices in `asking` of the requests
        that lack many tokens. `gain`: logarithm of the step's speed-up without these requests.
        """
        begun = [index for index in others if asking[index].is_catching_up]
        if begun or self.saved_seconds < 0:
            return begun
        # All these requests are weighed together, because their drafts share the passes of the draft model and the step
        # that checks them.
        caught_up = [one._replace(num_uncached=min(one.num_uncached, self._max_tokens)) for one in asking]
        _, gain_of_all = self._best_depth(caught_up, costs, num_rows)
        saved = (math.exp(-gain) - math.exp(-gain_of_all)) * costs.seconds(num_rows) / len(others)
        seconds = {index: self._catch_up_seconds(asking[index].num_uncached) for index in others}
        worth = [
            index
            for index in others
            if saved * min(asking[index].limit, self._mean_length) > MARGIN_OF_CATCH_UP * seconds[index]
        ]
        if worth or gain_of_all or not is_trial:
            return worth
        shortest_first = sorted(others, key=lambda index: asking[index].num_uncached)
        if not self._prompt_pass_token_seconds:
            return shortest_first[:1]
        sums = accumulate(seconds[index] for index in shortest_first)
        num_short = sum(one <= TRIAL_STEPS * costs.seconds(num_rows) for one in sums)
        return shortest_first[: max(1, num_short)]
