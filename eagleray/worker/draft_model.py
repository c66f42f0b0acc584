"""The draft model: a smaller model that proposes the tokens which are likely to follow those that a step sampled.

Owned by the rank that samples, and driven by its runner. The draft model has a cache of its own with the blocks of the
model's: a row's tokens are in the same blocks of both, so requests that share blocks share them here, too. The draft
model computes nothing before it is asked for a proposal. Then it first computes the tokens of the row that are not in
its cache: the whole prompt at first, and a few tokens later on.

A proposed token is the one that the row would draw, with its own seed, if the logits of the draft model were those of
the model, under the masks of its grammar. So at any temperature a draft model that equals the model is always right.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eagleray.grammars.matcher import Matcher
from eagleray.kernels.kv_cache import KVCache
from eagleray.messages.steps import NewRow, Proposal
from eagleray.models.base import Model
from eagleray.worker.input_batch import InputBatch, StepInputs, make_batch
from eagleray.worker.sampler import NO_GUESS, HostSampler


@dataclass(frozen=True, slots=True)
class Proposals:
    """What is proposed behind the tokens of a step."""

    by_row: dict[int, Proposal] = field(default_factory=dict)
    passes: list[tuple[int, float]] = field(default_factory=list)
    """Number of tokens, and seconds, of each pass."""


class Proposer(Protocol):
    """A source of drafts in the worker: a draft model, or a layer of the checkpoint."""

    def add_row(self, new: NewRow) -> None:
        """Note that a request has entered a row."""
        ...

    def add_blocks(self, block_ids: Sequence[int]) -> None:
        """Note that blocks are about to get other content."""
        ...

    def propose(
        self, limits: Mapping[int, int], num_known: Mapping[int, int], inputs: StepInputs, hidden: Tensor
    ) -> Proposals:
        """Propose tokens behind the last ones of rows, up to `limits` by row. To be called after each step.

        `num_known`: number of tokens of each row that has sampled, which are in the runner's table. The numbers behind
        them in the table are overwritten. `hidden`: [num_tokens, hidden_size] the model's states for `inputs`.
        """
        ...


@dataclass(slots=True)
class CachedTokens:
    """Tokens of a row in the draft model's cache."""

    num_known: int = 0
    """Number of the row's first tokens in the cache."""
    proposed: list[int] = field(default_factory=list)
    """Proposed tokens in the cache behind these. They may have become the row's since."""


@dataclass(slots=True)
class DraftingRow:
    """A row of the next pass."""

    row: int
    start: int
    end: int
    """The pass computes the tokens at positions from `start` to `end` - 1."""
    num_known: int
    """Number of the row's tokens. A token is proposed when all of them are in the cache."""
    limit: int
    """Most tokens to propose."""
    proposed: list[int] = field(default_factory=list)


class DraftModel(Proposer):
    """`model` with its `cache`, for the rows and the sampler of a runner. A pass computes up to `max_tokens` tokens."""

    def __init__(
        self, model: Model, cache: KVCache, rows: InputBatch, sampler: HostSampler, *, max_tokens: int
    ) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._max_len = min(model.spec.max_model_len, rows.token_ids.shape[1] - 1)
        self._cached: dict[int, CachedTokens] = {}
        self._is_filled = np.zeros(len(cache.layers[0]), dtype=np.bool_)
        """Whether the tokens of each block are all in the cache."""

    def add_row(self, new: NewRow) -> None:
        """Note that a request has entered a row."""
        self._cached[new.row] = CachedTokens()
        self.add_blocks(new.block_ids[new.num_computed_tokens // self._rows.block_size :])

    def add_blocks(self, block_ids: Sequence[int]) -> None:
        """Note that blocks are about to get other content."""
        self._is_filled[block_ids] = False

    @torch.inference_mode()
    def propose(
        self, limits: Mapping[int, int], num_known: Mapping[int, int], inputs: StepInputs, hidden: Tensor
    ) -> Proposals:
        """See `Proposer`. Computes nothing without `limits`."""
        known = {row: num_known[row] for row in limits if row in num_known}
        drafting = self._begin(limits, known)
        going, passes = drafting, []
        matchers = self._sampler.copy_matchers([one.row for one in drafting])
        while going:
            began_at = time.perf_counter()
            num_tokens = sum(one.end - one.start for one in going)
            going = self._pass(going, matchers)
            passes.append((num_tokens, time.perf_counter() - began_at))
        for one in drafting:
            self._cached[one.row].proposed = one.proposed[:-1]  # no pass has computed the last one
        proposed = {one.row: one.proposed for one in drafting}
        return Proposals({row: Proposal(proposed.get(row, []), self._cached[row].num_known) for row in known}, passes)

    def _begin(self, limits: Mapping[int, int], num_known: Mapping[int, int]) -> list[DraftingRow]:
        """Return the rows of the first pass, which computes what the cache lacks of their tokens, as far as there is
        room. A row may read blocks that another one fills in the same pass."""
        drafting = []
        room = self._max_tokens
        for row, known in num_known.items():
            cached = self._cached[row]
            start = self._find_start(row, cached, known)
            end = min(known, start + room)
            limit = self._limit(row, known, limits[row])
            if end == start or limit < 1:
                continue
            room -= end - start
            cached.num_known, cached.proposed = end, []
            self._is_filled[self._rows.block_table[row, : end // self._rows.block_size]] = True
            drafting.append(DraftingRow(row, start, end, num_known=known, limit=limit))
        return drafting

    def _find_start(self, row: int, cached: CachedTokens, known: int) -> int:
        """Return the position of the first of a row's `known` tokens that is not in the cache, or of the last one, from
        which the next token follows."""
        start = cached.num_known
        for token_id, proposed in zip(self._rows.token_ids[row, start:known].tolist(), cached.proposed, strict=False):
            if token_id != proposed:
                break
            start += 1
        size, table = self._rows.block_size, self._rows.block_table[row]
        while (following := (start // size + 1) * size) <= known and self._is_filled[table[start // size]]:
            start = following
        return min(start, known - 1)

    def _limit(self, row: int, known: int, wanted: int) -> int:
        """Return how many tokens can be proposed. All but the last one are put into the cache."""
        return min(wanted, min(self._rows.num_slots(row), self._max_len) - known + 1)

    def _pass(self, drafting: Sequence[DraftingRow], matchers: Mapping[int, Matcher]) -> list[DraftingRow]:
        """Run a pass and propose a token for each row whose tokens are all in the cache, if its grammar allows one.
        Returns the rows of the next pass. `matchers`: see `HostSampler.guess`."""
        drafting = sorted(drafting, key=lambda one: one.end - one.start > 1)
        rows = np.array([one.row for one in drafting], dtype=np.int64)
        first = np.array([one.start for one in drafting], dtype=np.int64)
        ends = np.array([one.end for one in drafting], dtype=np.int64)
        hidden = self._model.forward(make_batch(self._rows, rows, first, ends - first), self._cache)
        whole = [index for index, one in enumerate(drafting) if one.end >= one.num_known]
        if not whole:
            return []
        last = np.cumsum(ends - first)[whole] - 1
        logits = self._model.logits(hidden.index_select(0, torch.from_numpy(last).to(hidden.device)))
        assert logits is not None, "the draft model is whole"
        going = []
        token_ids = self._sampler.guess(logits, rows[whole], ends[whole], matchers).tolist()
        for index, token_id in zip(whole, token_ids, strict=True):
            one = drafting[index]
            if token_id == NO_GUESS:
                continue
            one.proposed.append(token_id)
            self._rows.token_ids[one.row, one.end] = token_id
            one.start, one.end = one.end, one.end + 1
            if len(one.proposed) < one.limit:
                going.append(one)
        return going
