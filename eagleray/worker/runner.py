"""Execution of steps: from `StepPlan` to `StepResult`.

Owns the input batch, the sampler and the use of the cache; driven by the worker. A step begins, which launches all its
work on the device, and finishes when its results are on the host. Several steps may have begun: on a GPU the next one
takes the tokens of the one before from the device's memory, before the host knows them.

Every rank of an engine runs every step: it updates its own rows and computes its part of the model. Either one rank
samples and the others get the tokens from it (`TokenRelay`), or every rank of the last stage samples, and tokens travel
between stages only (`Groups.ranks_sample_alike`). One rank reports the result; if routed experts are requested, the
first rank of every other stage reports those of its layers. With a pooling model no rank samples, and the one that
reports pools the hidden states.

Engines that share experts step together: a step begins with an exchange about whether any of them has something to
compute, and if one has, all run their layers, even without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.decode_table import DecodeTable
from eagleray.kernels.forward_batch import DeviceNumbers, Int32Array
from eagleray.kernels.kv_cache import KVCache
from eagleray.messages.arrays import Array
from eagleray.messages.outputs import PromptLogprobs
from eagleray.messages.steps import RowFailure, StageRoutedExperts, StepPlan, StepResult
from eagleray.models.base import Model
from eagleray.worker.downloads import Download, DownloadQueue, HostArray
from eagleray.worker.draft_check import Checked, DraftCheck
from eagleray.worker.draft_model import Proposals, Proposer
from eagleray.worker.input_batch import (
    ExpectedTokens,
    InputBatch,
    IntArray,
    StepInputs,
    build_inputs,
    token_indices_of,
)
from eagleray.worker.logprobs import PROMPT_CHUNK_SIZE, score_prompt
from eagleray.worker.pooler import Pooler, split_pooled
from eagleray.worker.routed_experts import ExpertsReader
from eagleray.worker.sampler import NOT_FINITE, HostSampler, Sampled, SamplingStep, TokenSampler
from eagleray.worker.token_relay import TokenRelay

NOTHING_SAMPLED = Sampled([], [], {}, [], [])
NOTHING_CHECKED = Checked({}, {})
NOTHING_PROPOSED = Proposals()


@dataclass(slots=True)
class UnfinishedStep:
    """A step that has begun. Steps finish in the order in which they began."""

    plan: StepPlan
    any_engine_busy: bool = True
    sampled: Sampled = NOTHING_SAMPLED
    """The tokens, if the host knows them already."""
    checked: Checked = NOTHING_CHECKED
    """Further tokens of the rows that have drafts."""
    proposals: Proposals = NOTHING_PROPOSED
    sampling: tuple[ExpectedTokens, SamplingStep] | None = None
    """The tokens, if the host does not know them yet."""
    prompts: dict[int, int] = field(default_factory=dict)
    """First scored position of each row whose prompt is scored."""
    routed_experts: Array | None = None
    """The experts of the rows that asked for them, if the host knows them already."""
    routed_slots: Array | None = None
    pooled_rows: list[int] = field(default_factory=list)
    """Rows whose vectors are reported."""
    tensors: list[Tensor] = field(default_factory=list)
    """Results on the device: those of `sampling`, three for each of `prompts`, the vectors of `pooled_rows` if there
    are any, one of routed experts if they are read from there."""
    download: Download | None = None
    arrays: Iterator[HostArray] | None = None
    """Results on the host, without those of `sampling`, once they have been waited for."""

    @property
    def is_done(self) -> bool:
        """Whether it can be finished without waiting."""
        return self.download is None or self.download.is_done


@dataclass(frozen=True, slots=True)
class _Samples:
    """The rows that sample in a step."""

    expected: ExpectedTokens
    plan: Any
    """The sampler's plan; None on ranks that do not sample."""
    num_lines: int
    """Number of lines of the hidden states that predict a token, if these are not all; their indices are the last ones
    of the batch's `numbers`."""
    drafts: DraftCheck | None = None
    """The rows with drafts, whose tokens are not among `expected`; None without any."""


class Runner:
    """Runs the steps of one worker. The public attributes describe its activity for a thread beside it."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        rows: InputBatch,
        sampler: TokenSampler[Any],
        downloads: DownloadQueue,
        *,
        reports_logits: bool = False,
        pooler: Pooler | None = None,
        proposer: Proposer | None = None,
        wait: Callable[[UnfinishedStep], None] | None = None,
    ) -> None:
        """`wait` is called before the results of a step are read, and returns when they can be waited for."""
        self.num_steps = 0
        """Number of steps begun."""
        self.is_stepping = False
        self._model = model
        self._cache = cache
        self._rows = rows
        self._sampler = sampler
        self._downloads = downloads
        self._reports_logits = reports_logits
        """Whether prompts are scored by logits, and not by log-probabilities."""
        mesh = model.groups.mesh
        self._is_reporter = mesh.is_sampler
        self._is_sampling = model.groups.is_sampling
        self._is_last_stage = mesh.is_last_stage
        knows_all_tokens = mesh.world_size == 1 or (mesh.pp_size == 1 and model.groups.ranks_sample_alike)
        self._relay = None if knows_all_tokens else TokenRelay(model.groups, rows)
        self._experts: ExpertsReader | None = None
        if model.trace is not None:
            self._experts = ExpertsReader(model.trace, model.groups.tp, has_sequence_shards=model.has_sequence_shards)
        self._pooler = pooler
        """None for a model that generates."""
        self._proposer = proposer
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}  # row -> (k, first position still wanted)
        self._scored: dict[int, Int32Array] = {}
        """Token ids [num_prompt_tokens - 1, num_ids] that are scored at the positions of prompts too, by row."""
        self._wait = wait
        self._decode_table: DecodeTable | None = None
        """The requests as the kernels read them in steps that are one call; None if this worker has no such steps."""
        if isinstance(sampler, HostSampler) and self._relay is None and proposer is None:
            self._decode_table = sampler.decode_table(rows)
        self._last_choices: dict[int, UnfinishedStep] = {}
        """Step that chooses the last token of each row with a grammar, while the host may not know it."""

    @property
    def num_used_blocks(self) -> int:
        """Highest block id in use so far, plus 1."""
        return self._rows.num_used_blocks

    def begin(self, plan: StepPlan) -> UnfinishedStep | StepResult:
        """Begin the step, or take it at once and return its result. Raises `ExpertGroupBroken` if an engine that steps
        together with this one has exited: rows are invalid then until later plans add them again."""
        self.num_steps += 1
        self.is_stepping = True
        try:
            self._update_rows(plan)
            return self._decode(plan) or self._begin(plan)
        finally:
            self.is_stepping = False

    def finish(self, step: UnfinishedStep) -> StepResult | StageRoutedExperts | None:
        """Wait for the results of the step and return this rank's report."""
        arrays = self._receive(step)
        sampled, experts, plan = step.sampled, step.routed_experts, step.plan
        prompts = {row: PromptLogprobs(start, *islice(arrays, 3)) for row, start in step.prompts.items()}
        pooled, failures = split_pooled(step.pooled_rows, next(arrays)) if step.pooled_rows else ({}, [])
        if experts is None:
            experts = next(arrays, None)
        if not self._is_reporter:
            return None if experts is None else StageRoutedExperts(step=plan.step, routed_experts=experts)
        return StepResult(
            step=plan.step,
            rows=sampled.rows,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            checked_token_ids=step.checked.token_ids,
            checked_logprobs=step.checked.logprobs,
            proposals=step.proposals.by_row,
            draft_passes=step.proposals.passes,
            prompt_logprobs=prompts,
            pooled=pooled,
            mask_seconds=sampled.mask_seconds + step.checked.mask_seconds,
            ended=sampled.ended,
            failures=sampled.failures + failures,
            routed_experts=experts,
            routed_slots=step.routed_slots,
            any_engine_busy=step.any_engine_busy,
        )

    def _receive(self, step: UnfinishedStep) -> Iterator[HostArray]:
        """Wait for the results of the step, unless that was done, and adopt its tokens. Returns its other results."""
        if step.arrays is None:
            if self._wait is not None:
                self._wait(step)
            step.arrays = iter(() if step.download is None else step.download.wait())
            if step.sampling is not None:
                expected, sampling = step.sampling
                step.sampled = sampling.finish(list(islice(step.arrays, len(sampling.tensors))))
                self._rows.set_tokens(expected, _token_of_each(expected.rows, step.sampled))
        return step.arrays

    def _decode(self, plan: StepPlan) -> StepResult | None:
        """Take a step by one call of the kernels, if they have one for it: each row computes its last token, and the
        choice of the next one needs nothing from the sampler. Returns None, and has done nothing, for other steps."""
        has_more = plan.drafts or plan.capture_rows or plan.is_idle or plan.total_num_tokens != len(plan.rows)
        if self._decode_table is None or has_more:
            return None
        rows, failures = plan.rows, []
        token_ids = self._model.decode(rows, self._cache, self._decode_table)
        if token_ids is None:
            return None
        if min(token_ids) < 0:
            failures = [RowFailure(row, NOT_FINITE) for row, token in zip(rows, token_ids, strict=True) if token < 0]
            rows = [row for row, token in zip(rows, token_ids, strict=True) if token >= 0]
            token_ids = [token for token in token_ids if token >= 0]
        return StepResult(step=plan.step, rows=rows, token_ids=token_ids, failures=failures, any_engine_busy=True)

    @torch.inference_mode()
    def _begin(self, plan: StepPlan) -> UnfinishedStep:
        if self._relay is not None:
            self._relay.catch_up(np.array(plan.rows, dtype=np.int64))
        inputs = build_inputs(plan, self._rows, self._sampler.last_tokens)
        step = UnfinishedStep(plan)
        if not self._model.begin_step(plan.is_idle, inputs.batch.num_tokens):
            step.any_engine_busy = False
            return step
        samples = self._prepare_samples(inputs, plan.drafts)
        hidden = self._model.forward(inputs.batch, self._cache)  # [num_tokens, hidden_size]
        experts = self._read_experts(step, inputs)
        prompts = self._score_prompts(step, inputs, hidden)
        if self._pooler is not None:
            prompts += self._pool(step, self._pooler, inputs, hidden)
        self._rows.num_computed[inputs.rows] += inputs.num_tokens
        if inputs.num_drafts is not None:
            self._rows.num_computed[inputs.rows] -= inputs.num_drafts
        if samples is not None:
            self._sample(step, samples, inputs, hidden)
        if self._proposer is not None:
            step.proposals = self._proposer.propose(plan.proposals, self._num_known(step), inputs, hidden)
        self._model.rebalance_if_due()
        step.tensors += prompts
        if isinstance(experts, Tensor):
            step.tensors.append(experts)
        else:
            step.routed_experts = experts
        # Where results stay on the device, a step without any, too, is done when it is computed.
        has_results = self._pooler is not None or self._sampler.last_tokens is not None
        if step.tensors or (self._relay is None and has_results):
            step.download = self._downloads.begin(step.tensors)
        return step

    def _update_rows(self, plan: StepPlan) -> None:
        if plan.freed_rows or plan.new_rows:
            self._replace_rows(plan)
        for row, block_ids in plan.new_blocks:
            self._rows.append_blocks(row, block_ids)
            if self._proposer is not None:
                self._proposer.add_blocks(block_ids)
        for row, token_ids in plan.settled_rows:
            self._rows.settle_drafts(row, token_ids)
        for row, token_ids in plan.drafts.items():
            self._rows.put_drafts(row, token_ids)

    @torch.inference_mode()
    def _replace_rows(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            self._sampler.free_row(row)
            self._last_choices.pop(row, None)
            if self._pooler is not None:
                self._pooler.free_row(row)
            self._prompt_logprobs.pop(row, None)
            self._scored.pop(row, None)
        for new in plan.new_rows:
            self._rows.add_row(new)
            if self._proposer is not None:
                self._proposer.add_row(new)
            if self._is_sampling:
                self._sampler.add_row(new.row, new.sampling, new.token_ids, new.num_prompt_tokens)
            if new.sampling.prompt_logprobs is not None and new.prompt_logprobs_from < new.num_prompt_tokens:
                self._prompt_logprobs[new.row] = (new.sampling.prompt_logprobs, new.prompt_logprobs_from)
                if new.sampling.prompt_logprob_token_ids:
                    self._scored[new.row] = np.array(new.sampling.prompt_logprob_token_ids, dtype=np.int32)

    def _read_experts(self, step: UnfinishedStep, inputs: StepInputs) -> Array | Tensor | None:
        """Return the routed experts of the rows `capture_rows` of the plan, on the ranks that report them, and note the
        cache slots of these rows' tokens."""
        plan = step.plan
        if not plan.capture_rows:
            return None
        assert self._experts is not None, "routed experts were requested of a model that has none"
        batch = inputs.batch
        is_planned_order = batch.num_decodes == len(inputs.rows) or plan.rows == inputs.rows.tolist()
        if len(plan.capture_rows) == len(plan.rows) and is_planned_order:  # the whole batch in its own order
            step.routed_slots = batch.slot_mapping
            return self._experts.read(None, batch.num_tokens)
        indices = token_indices_of(plan.capture_rows, inputs)
        step.routed_slots = batch.slot_mapping[indices]
        return self._experts.read(indices, batch.num_tokens)

    def _prepare_samples(self, inputs: StepInputs, drafts_by_row: dict[int, list[int]]) -> _Samples | None:
        """Expect the next token of every row whose last token is computed in this step, on every rank, and send what
        its choice needs to the device together with the batch. Returns None if there is no such row."""
        if len(inputs.sampling_indices) == 0 or self._pooler is not None:
            return None
        rows = inputs.rows[inputs.sampling_indices]
        positions, ends = self._rows.num_tokens[rows], inputs.query_end_loc[inputs.sampling_indices]
        drafts, lines = None, None
        if inputs.num_drafts is not None:
            drafts = DraftCheck(rows, positions, inputs.num_drafts[inputs.sampling_indices], drafts_by_row)
            lines = drafts.lines(ends).astype(np.int32)
        elif len(rows) < inputs.batch.num_tokens:
            lines = (ends - 1).astype(np.int32)
        expected = self._rows.expect_tokens(rows if drafts is None else drafts.rows_without)
        plan = self._sampler.prepare(rows, positions) if self._is_sampling else None
        parts = [part for part in (None if plan is None else plan.words, lines) if part is not None]
        if parts:
            inputs.batch.numbers.array = np.concatenate(parts)
        return _Samples(expected, plan, num_lines=0 if lines is None else len(lines), drafts=drafts)

    def _sample(self, step: UnfinishedStep, samples: _Samples, inputs: StepInputs, hidden: Tensor) -> None:
        """Launch the choice of the tokens, and share them if other ranks need them."""
        expected, plan = samples.expected, samples.plan
        logits = None
        if self._is_last_stage:
            words = inputs.batch.numbers.on(hidden.device)
            if samples.num_lines:
                hidden = hidden.index_select(0, words[len(words) - samples.num_lines :])
            logits = self._model.logits(hidden)  # float32 [num_samples, vocab_size] where sampled
        if logits is None:
            assert self._relay is not None, "a rank without logits gets the tokens from another"
            self._relay.share(expected, None)
            return
        assert plan is not None
        # The forward pass is launched, so the device computes while the host waits for the tokens before.
        for row in plan.grammar_rows:
            if (before := self._last_choices.pop(row, None)) is not None:
                self._receive(before)
        drafts = samples.drafts
        sampling = self._sampler.launch(logits if drafts is None else drafts.first_logits(logits), plan, words)
        if sampling.tensors and self._relay is None:
            assert drafts is None, "drafts are checked where the host knows the tokens at once"
            step.sampling = expected, sampling
            self._last_choices |= dict.fromkeys(plan.grammar_rows, step)
            step.tensors += sampling.tensors
            return
        step.sampled = sampling.finish(self._downloads.begin(sampling.tensors).wait() if sampling.tensors else [])
        if drafts is not None:
            step.checked = drafts.run(logits, step.sampled, self._sampler)
        token_ids = _token_of_each(expected.rows, step.sampled)
        if self._relay is None:
            self._rows.set_tokens(expected, token_ids)
        else:
            self._relay.share(expected, token_ids)

    def _num_known(self, step: UnfinishedStep) -> dict[int, int]:
        """Return the number of tokens of each row that the step has sampled for, and put those into the table that
        come there with the next plan only: the tokens of rows with drafts."""
        num_known = {}
        for row, token_id in zip(step.sampled.rows, step.sampled.token_ids, strict=True):
            num_known[row] = int(self._rows.num_tokens[row])
            if row in step.plan.drafts:
                token_ids = [token_id, *step.checked.token_ids.get(row, ())]
                self._rows.put_drafts(row, token_ids)
                num_known[row] += len(token_ids)
        return num_known

    def _pool(self, step: UnfinishedStep, pooler: Pooler, inputs: StepInputs, hidden: Tensor) -> list[Tensor]:
        """Pool the hidden states of this step. Returns the vectors of the rows that are complete with it, in the one
        tensor that is noted in the step; on ranks that report nothing, an empty list."""
        if not self._is_reporter:
            return []
        step.pooled_rows, vectors = pooler.pool(inputs, self._rows.num_computed, hidden)
        return [] if vectors is None else [vectors]

    def _score_prompts(self, step: UnfinishedStep, inputs: StepInputs, hidden: Tensor) -> list[Tensor]:
        """Score the prompt positions that this step's hidden states predict, for the rows that want it. Returns three
        tensors for each row that is noted in the step, see `score_prompt`."""
        tensors: list[Tensor] = []
        if not self._prompt_logprobs or not self._is_last_stage:
            return tensors
        for index in np.flatnonzero(np.isin(inputs.rows, list(self._prompt_logprobs))):
            row = int(inputs.rows[index])
            k, wanted_from = self._prompt_logprobs[row]
            first = int(self._rows.num_computed[row]) + 1  # hidden state i predicts position i + 1
            begin = max(first, wanted_from)
            end = min(first + int(inputs.num_tokens[index]), int(self._rows.num_prompt[row]))
            if begin >= end:
                continue
            offset = int(inputs.query_end_loc[index] - inputs.num_tokens[index]) - first
            given = self._rows.token_ids[row, begin:end][:, None]
            if row in self._scored:
                given = np.concatenate([given, self._scored[row][begin - 1 : end - 1]], axis=1)
            ids = DeviceNumbers(given.reshape(-1)).on(hidden.device).to(torch.int64).view(given.shape)
            chunks = self._score(hidden[offset + begin : offset + end], ids, k)
            if chunks:
                step.prompts[row] = begin
                tensors += [torch.cat(parts) for parts in zip(*chunks, strict=True)]
            self._prompt_logprobs[row] = (k, end)
        return tensors

    def _score(self, hidden: Tensor, given: Tensor, k: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Score positions in chunks, so that the logits of a long prompt over a large vocabulary never exist at once.
        The list is empty on ranks that report nothing."""
        chunks = []
        for i in range(0, len(hidden), PROMPT_CHUNK_SIZE):
            logits = self._model.logits(hidden[i : i + PROMPT_CHUNK_SIZE])
            if logits is not None and self._is_reporter:
                part = given[i : i + PROMPT_CHUNK_SIZE]
                chunks.append(score_prompt(logits, part, k, self._model.ranking, is_logits=self._reports_logits))
        return chunks


def _token_of_each(rows: IntArray, sampled: Sampled) -> IntArray:
    """Return the token of each of `rows`, int64 [num_rows]. A row without one gets token 0 until it is freed, because
    steps that compute it may be in flight."""
    if sampled.rows == rows.tolist():
        return np.array(sampled.token_ids, dtype=np.int64)
    token_of = dict(zip(sampled.rows, sampled.token_ids, strict=True))
    return np.array([token_of.get(row, 0) for row in rows.tolist()], dtype=np.int64)
