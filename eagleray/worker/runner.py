"""Execution of a step: from `StepPlan` to `StepResult`.

Owns the input batch, the sampling state and the use of the cache; driven by the worker. Every rank of an engine runs
every step: it updates its own rows and computes its part of the model. Only the sampler has a result; if routed experts
are requested, the first rank of every other stage reports those of its layers.

Engines that share experts step together: a step begins with an exchange about whether any of them has something to
compute, and if one has, all run their layers, even without rows.
"""

from __future__ import annotations

import numpy as np
import torch

from eagleray.kernels.kv_cache import KVCache
from eagleray.messages.arrays import Array
from eagleray.messages.outputs import PromptLogprobs
from eagleray.messages.steps import StageRoutedExperts, StepPlan, StepResult
from eagleray.models.base import Model
from eagleray.worker.input_batch import InputBatch, IntArray, StepInputs, build_inputs, token_indices_of
from eagleray.worker.logprobs import prompt_logprobs
from eagleray.worker.routed_experts import ExpertsReader, Reading
from eagleray.worker.sampler import Sampled, Sampler
from eagleray.worker.sampling_state import SamplingState
from eagleray.worker.token_relay import TokenRelay

PROMPT_CHUNK_SIZE = 256
"""Prompt positions scored at once: 256 x 151,936 float32 logits are 156 MB."""


class Runner:
    """Runs the steps of one worker. The public attributes describe its activity for a thread beside it."""

    def __init__(self, model: Model, cache: KVCache, rows: InputBatch, sampling_state: SamplingState) -> None:
        self.num_steps = 0
        """Number of steps begun."""
        self.is_stepping = False
        self._model = model
        self._cache = cache
        self._rows = rows
        self._sampling_state = sampling_state
        self._sampler = Sampler(sampling_state, model.ranking)
        mesh = model.groups.mesh
        self._is_sampler = mesh.is_sampler
        self._is_last_stage = mesh.is_last_stage
        self._relay = None if mesh.world_size == 1 else TokenRelay(model.groups, rows)
        self._experts: ExpertsReader | None = None
        if model.trace is not None:
            self._experts = ExpertsReader(model.trace, model.groups.tp, has_sequence_shards=model.has_sequence_shards)
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}  # row -> (k, first position still wanted)

    @property
    def num_used_blocks(self) -> int:
        """Highest block id in use so far, plus 1."""
        return self._rows.num_used_blocks

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult | StageRoutedExperts | None:
        """Run the step and return this rank's report. Raises `ExpertGroupBroken` if an engine that steps together with
        this one has exited: rows are invalid then until later plans add them again."""
        self.num_steps += 1
        self.is_stepping = True
        try:
            return self._step(plan)
        finally:
            self.is_stepping = False

    def _step(self, plan: StepPlan) -> StepResult | StageRoutedExperts | None:
        self._update_rows(plan)
        if self._relay is not None:
            self._relay.catch_up(np.array(plan.rows, dtype=np.int64))
        inputs = build_inputs(plan, self._rows)
        if not self._model.begin_step(plan.is_idle, inputs.batch.num_tokens):
            return StepResult(step=plan.step, rows=[], token_ids=[]) if self._is_sampler else None
        hidden = self._model.forward(inputs.batch, self._cache)  # [num_tokens, hidden_size]
        reading, slots = self._read_experts(plan, inputs)
        prompt = self._score_prompts(inputs, hidden)
        self._rows.num_computed[inputs.rows] += inputs.num_tokens
        sampled = self._sample(inputs, hidden)
        self._model.rebalance_if_due()
        experts = None if reading is None else reading()
        if not self._is_sampler:
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
            self._sampling_state.free_row(row)
            self._prompt_logprobs.pop(row, None)
        for new in plan.new_rows:
            self._rows.add_row(new)
            if self._is_sampler:
                self._sampling_state.add_row(new.row, new.sampling, new.token_ids, new.num_prompt_tokens)
            if new.sampling.prompt_logprobs is not None and new.prompt_logprobs_from < new.num_prompt_tokens:
                self._prompt_logprobs[new.row] = (new.sampling.prompt_logprobs, new.prompt_logprobs_from)
        for row, block_ids in plan.new_blocks:
            self._rows.append_blocks(row, block_ids)

    def _read_experts(self, plan: StepPlan, inputs: StepInputs) -> tuple[Reading | None, Array | None]:
        """Return the routed experts of the rows `plan.capture_rows`, on the ranks that report them, and the cache slots
        of these rows' tokens."""
        if not plan.capture_rows:
            return None, None
        assert self._experts is not None, "routed experts were requested of a model that has none"
        batch = inputs.batch
        is_planned_order = batch.num_decodes == len(inputs.rows) or plan.rows == inputs.rows.tolist()
        if len(plan.capture_rows) == len(plan.rows) and is_planned_order:  # the whole batch in its own order
            return self._experts.begin(None, batch.num_tokens), batch.slot_mapping
        indices = token_indices_of(plan.capture_rows, inputs)
        return self._experts.begin(indices, batch.num_tokens), batch.slot_mapping[indices]

    def _sample(self, inputs: StepInputs, hidden: torch.Tensor) -> Sampled:
        """Sample the next token of every row whose last known token was computed, and append it on every rank."""
        if len(inputs.sampling_indices) == 0:
            return Sampled([], [], {}, [])
        rows = inputs.rows[inputs.sampling_indices]
        logits = None
        if self._is_last_stage:
            last = torch.from_numpy(inputs.query_end_loc[inputs.sampling_indices] - 1).to(hidden.device)
            logits = self._model.logits(hidden[last])  # float32 [num_samples, vocab_size] on the sampler
        if logits is None:
            assert self._relay is not None, "a single rank has the logits"
            self._relay.share(rows, None)
            return Sampled([], [], {}, [])
        row_list = rows.tolist()
        sampled = self._sampler.sample(logits, row_list, self._rows.num_tokens[rows].tolist())
        token_ids = _token_of_each(row_list, sampled)
        if self._relay is None:
            self._rows.append_tokens(rows, token_ids)
        else:
            self._relay.share(rows, token_ids)
        self._sampling_state.append_tokens(sampled.rows, sampled.token_ids)
        return sampled

    def _score_prompts(self, inputs: StepInputs, hidden: torch.Tensor) -> dict[int, PromptLogprobs]:
        """Return the log-probabilities of the prompt positions that this step's hidden states predict, for the rows
        that want them."""
        scored: dict[int, PromptLogprobs] = {}
        if not self._prompt_logprobs or not self._is_last_stage:
            return scored
        for index in np.flatnonzero(np.isin(inputs.rows, list(self._prompt_logprobs))):
            row = int(inputs.rows[index])
            k, wanted_from = self._prompt_logprobs[row]
            first = int(self._rows.num_computed[row]) + 1  # hidden state i predicts position i + 1
            begin = max(first, wanted_from)
            end = min(first + int(inputs.num_tokens[index]), int(self._rows.num_prompt[row]))
            if begin >= end:
                continue
            offset = int(inputs.query_end_loc[index] - inputs.num_tokens[index]) - first
            targets = torch.from_numpy(self._rows.token_ids[row, begin:end].astype(np.int64)).to(hidden.device)
            chunks = self._score(hidden[offset + begin : offset + end], targets, k, begin)
            if chunks:
                scored[row] = _join(chunks)
            self._prompt_logprobs[row] = (k, end)
        return scored

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor, k: int, start: int) -> list[PromptLogprobs]:
        """Score positions in chunks, so that the logits of a long prompt over a large vocabulary never exist at once.
        The list is empty on ranks that only help to compute the logits."""
        chunks = []
        for i in range(0, len(hidden), PROMPT_CHUNK_SIZE):
            logits = self._model.logits(hidden[i : i + PROMPT_CHUNK_SIZE])
            if logits is not None:
                own = targets[i : i + PROMPT_CHUNK_SIZE]
                chunks.append(prompt_logprobs(logits, own, k, start + i, self._model.ranking))
        return chunks


def _token_of_each(rows: list[int], sampled: Sampled) -> IntArray:
    """Return the token of each of `rows`, int64 [num_rows]. A row that failed gets token 0 until it is freed, because
    steps that compute it may be in flight."""
    if not sampled.failures:
        return np.array(sampled.token_ids, dtype=np.int64)
    token_of = dict(zip(sampled.rows, sampled.token_ids, strict=True))
    return np.array([token_of.get(row, 0) for row in rows], dtype=np.int64)


def _join(chunks: list[PromptLogprobs]) -> PromptLogprobs:
    if len(chunks) == 1:
        return chunks[0]
    return PromptLogprobs(
        start=chunks[0].start,
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        ranks=np.concatenate([chunk.ranks for chunk in chunks]),
    )
