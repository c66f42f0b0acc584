"""Runs a step: from `StepPlan` to `StepResult`.

Owns the rows, the sampling state and the cache; is driven by the worker. Every rank of an engine runs every step: it
keeps its own rows, computes its part of the model, and only the sampler has a result; where routed experts are asked
for, the first rank of every other stage has those of its layers.

Engines that share experts step together: a step begins with the question whether any of them has something to compute,
and where one has, all run their layers, be it with no rows.
"""

from __future__ import annotations

import numpy as np
import torch

from eagleray.kernels.kv_cache import KVCache
from eagleray.messages.arrays import Array
from eagleray.messages.outputs import PromptLogprobs
from eagleray.messages.steps import StageRoutedExperts, StepPlan, StepResult
from eagleray.models.base import Model
from eagleray.worker.input_batch import InputBatch
from eagleray.worker.inputs import StepInputs, build_inputs, token_indices_of
from eagleray.worker.logprobs import prompt_logprobs
from eagleray.worker.routed_experts import ExpertsReader, Reading
from eagleray.worker.sampler import Sampled, Sampler
from eagleray.worker.sampling_state import SamplingState
from eagleray.worker.token_relay import TokenRelay

PIECE = 256
"""Prompt positions scored at once: 256 x 151,936 float32 logits are 156 MB."""


class Runner:
    def __init__(self, model: Model, cache: KVCache, rows: InputBatch, sampling_rows: SamplingState) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._sampling_rows = sampling_rows
        self._sampler = Sampler(sampling_rows, model.ranking)
        self._relay = TokenRelay(model.groups, rows)
        self._experts: ExpertsReader | None = None
        if model.trace is not None:
            self._experts = ExpertsReader(model.trace, model.groups.tp, has_sequence_shards=model.has_sequence_shards)
        self._mesh = model.groups.mesh
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}  # row -> (k, first position still wanted)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult | StageRoutedExperts | None:
        """What this rank has to say of the step. Raises `ExpertGroupBroken` if an engine that steps together with this
        one is gone: rows are of no use then until plans start them anew."""
        self._update_rows(plan)
        self._relay.catch_up(np.array(plan.rows, dtype=np.int64))
        inputs = build_inputs(plan, self._rows)
        if not self._model.begin_step(plan.is_idle, inputs.batch.num_tokens):
            return StepResult(step=plan.step, rows=[], token_ids=[]) if self._mesh.is_sampler else None
        hidden = self._model.forward(inputs.batch, self._cache)  # [num_tokens, hidden_size]
        reading, slots = self._read_experts(plan, inputs)
        prompt = self._score_prompts(inputs, hidden)
        self._rows.num_computed[inputs.rows] += inputs.num_tokens
        sampled = self._sample(inputs, hidden)
        self._model.rebalance_if_due()
        experts = None if reading is None else reading()
        if not self._mesh.is_sampler:
            return None if experts is None else StageRoutedExperts(step=plan.step, routed_experts=experts)
        return StepResult(
            step=plan.step,
            rows=sampled.rows,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt,
            failures=sampled.failures,
            routed_experts=experts,
            routed_slots=slots,
            any_engine_busy=True,
        )

    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            self._sampling_rows.end(row)
            self._prompt_logprobs.pop(row, None)
        for start in plan.new_rows:
            self._rows.start(start)
            if self._mesh.is_sampler:
                self._sampling_rows.start(start.row, start.sampling, start.token_ids, start.num_prompt_tokens)
            if start.sampling.prompt_logprobs is not None and start.prompt_logprobs_from < start.num_prompt_tokens:
                self._prompt_logprobs[start.row] = (start.sampling.prompt_logprobs, start.prompt_logprobs_from)
        for row, block_ids in plan.new_blocks:
            self._rows.grow(row, block_ids)

    def _read_experts(self, plan: StepPlan, inputs: StepInputs) -> tuple[Reading | None, Array | None]:
        """Those of the rows `plan.capture_rows`, on the ranks that report them, and the slots of these rows' tokens."""
        if not plan.capture_rows:
            return None, None
        assert self._experts is not None, "routed experts of a model that has none"
        batch = inputs.batch
        is_planned_order = batch.num_decodes == len(inputs.rows) or plan.rows == inputs.rows.tolist()
        if len(plan.capture_rows) == len(plan.rows) and is_planned_order:  # all of the batch, as it is
            return self._experts.begin(None, batch.num_tokens), batch.slot_mapping
        lines = token_indices_of(plan.capture_rows, inputs)
        return self._experts.begin(lines, batch.num_tokens), batch.slot_mapping[lines]

    def _sample(self, inputs: StepInputs, hidden: torch.Tensor) -> Sampled:
        """The next token of every row whose last known one was computed."""
        if len(inputs.samples) == 0:
            return Sampled([], [], {}, [])
        rows = inputs.rows[inputs.samples]
        if not self._mesh.is_last_stage:
            self._relay.share(rows, None)
            return Sampled([], [], {}, [])
        lines = torch.from_numpy(inputs.ends[inputs.samples] - 1).to(hidden.device)
        logits = self._model.logits(hidden[lines])  # float32 [num_samples, vocab_size] on the sampler
        if logits is None:
            self._relay.share(rows, None)
            return Sampled([], [], {}, [])
        sampled = self._sampler.sample(logits, rows.tolist(), self._rows.num_tokens[rows].tolist())
        self._relay.share(rows, _token_of_each(rows.tolist(), sampled))
        self._sampling_rows.append(sampled.rows, sampled.token_ids)
        return sampled

    def _score_prompts(self, inputs: StepInputs, hidden: torch.Tensor) -> dict[int, PromptLogprobs]:
        """Log-probabilities of the prompt positions that this step's hidden states predict, for rows that want them."""
        scored: dict[int, PromptLogprobs] = {}
        if not self._prompt_logprobs or not self._mesh.is_last_stage:
            return scored
        for line in np.flatnonzero(np.isin(inputs.rows, list(self._prompt_logprobs))):
            row = int(inputs.rows[line])
            k, wanted_from = self._prompt_logprobs[row]
            first = int(self._rows.num_computed[row]) + 1  # hidden state i predicts position i + 1
            begin = max(first, wanted_from)
            end = min(first + int(inputs.num_tokens[line]), int(self._rows.num_prompt[row]))
            if begin >= end:
                continue
            offset = int(inputs.ends[line] - inputs.num_tokens[line]) - first
            targets = torch.from_numpy(self._rows.token_ids[row, begin:end].astype(np.int64)).to(hidden.device)
            pieces = self._score(hidden[offset + begin : offset + end], targets, k, begin)
            if pieces:
                scored[row] = _join(pieces)
            self._prompt_logprobs[row] = (k, end)
        return scored

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor, k: int, start: int) -> list[PromptLogprobs]:
        """In pieces, so that the logits of a long prompt over a large vocabulary never exist at once. Nothing on ranks
        that only help to compute the logits."""
        pieces = []
        for i in range(0, len(hidden), PIECE):
            logits = self._model.logits(hidden[i : i + PIECE])
            if logits is not None:
                pieces.append(prompt_logprobs(logits, targets[i : i + PIECE], k, start + i, self._model.ranking))
        return pieces


def _token_of_each(rows: list[int], sampled: Sampled) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[num_rows] in the order of `rows`. A row that failed goes on with token 0 until it is ended: steps that compute
    it may be on their way."""
    token_of = dict(zip(sampled.rows, sampled.token_ids, strict=True))
    return np.array([token_of.get(row, 0) for row in rows], dtype=np.int64)


def _join(pieces: list[PromptLogprobs]) -> PromptLogprobs:
    if len(pieces) == 1:
        return pieces[0]
    return PromptLogprobs(
        start=pieces[0].start,
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        ranks=np.concatenate([piece.ranks for piece in pieces]),
    )
