"""Drafters for tests: drafts that are right or wrong at random, and proposals that are made whatever they cost."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from eagleray.config.speculation import Speculation, speculation
from eagleray.engine import startup
from eagleray.scheduler.follower import Follower
from eagleray.scheduler.history_drafter import HistoryDrafter
from eagleray.scheduler.model_drafter import Asking, ModelDrafter, ProposedTokens
from eagleray.scheduler.request import Request
from eagleray.scheduler.speculation import Candidate

MAX_DRAFT = 4


class RecordedDrafter(HistoryDrafter):
    """Drafts what an earlier run has generated. `outputs`: by request id."""

    def __init__(self, outputs: Mapping[str, Sequence[int]], *, vocab_size: int, seed: int = 0) -> None:
        options = speculation({"method": "ngram", "num_speculative_tokens": MAX_DRAFT})
        assert options is not None
        super().__init__(options)
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._requests: dict[Follower, Request] = {}

    def begin(self, request: Request) -> Follower:
        follower = super().begin(request)
        self._requests[follower] = request
        return follower

    def is_predicted(self, follower: Follower) -> bool:
        return True

    def choose(self, candidates: Sequence[Candidate], *, num_tokens: int, num_rows: int, room: int) -> list[list[int]]:
        chosen: list[list[int]] = []
        for candidate in candidates:
            chosen.append(self._draft(candidate, min(candidate.limit, room)))
            room -= len(chosen[-1])
        return chosen

    def _draft(self, candidate: Candidate, limit: int) -> list[int]:
        request, choose = self._requests[candidate.follower], self._random
        first = len(request.token_ids) - request.num_prompt_tokens
        count, num_right = max(0, min(limit, choose.randint(0, MAX_DRAFT))), choose.randint(0, MAX_DRAFT)
        recorded = self._outputs.get(request.request_id, ())
        drafted = list(recorded[first : first + min(count, num_right)])
        return drafted + [choose.randrange(self._vocab_size) for _ in range(count - len(drafted))]

    def gain_of_waiting(self, candidates: Sequence[Candidate], *, num_rows: int) -> float:
        return self._random.choice([0.0, 1.0])


class EagerModelDrafter(ModelDrafter):
    """Has the draft model propose any number of tokens, and steps check any number of these, whatever that costs."""

    def __init__(self, options: Speculation, *, seed: int = 0) -> None:
        super().__init__(options)
        self._random = random.Random(seed)

    def propose(self, asking: Sequence[Asking], *, num_rows: int) -> list[int]:
        return [min(one.limit, self._random.randint(0, self._max_tokens)) for one in asking]

    def choose(self, candidates: Sequence[Candidate], *, num_tokens: int, num_rows: int, room: int) -> list[list[int]]:
        chosen: list[list[int]] = []
        for candidate in candidates:
            most = min(candidate.limit, room, self._random.choice([0, self._max_tokens, self._max_tokens]))
            chosen.append(self.draft(candidate, most).token_ids)
            room -= len(chosen[-1])
        return chosen


class RecordingDrafter(EagerModelDrafter):
    """Keeps all proposals for greedy requests without grammars, with the tokens before them."""

    def __init__(self, options: Speculation) -> None:
        super().__init__(options)
        self.proposals: list[tuple[list[int], list[int]]] = []

    def on_proposal(self, follower: ProposedTokens, token_ids: list[int]) -> None:
        sampling = follower.request.sampling
        if token_ids and sampling.temperature == 0 and not sampling.is_masked:
            self.proposals.append((list(follower.request.token_ids), token_ids))
        super().on_proposal(follower, token_ids)


def record_drafters(monkeypatch: pytest.MonkeyPatch) -> list[RecordingDrafter]:
    """Return a list to which each engine that starts from now on adds its drafter."""
    made: list[RecordingDrafter] = []

    def make_drafter(options: Speculation) -> RecordingDrafter:
        made.append(RecordingDrafter(options))
        return made[-1]

    monkeypatch.setattr(startup, "make_drafter", make_drafter)
    return made
