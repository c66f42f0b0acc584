"""Choice of the next token of each row of a step on a CUDA device, without waiting on the host.

A step begins when its logits have been launched and finishes when its results have been downloaded. The tokens stay on
the device for the next step; the state that depends on them, such as counts of penalties, is kept there too. Grammars
alone are followed on the host: it computes their masks once their tokens are known, and uploads them. The
order of what is done to the logits is that of the sampler for CPUs, and so are the decisions. Driven by the runner.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from eagleray.grammars.matcher import mask_words
from eagleray.kernels.cuda.ranking import DeviceRanking
from eagleray.kernels.cuda.triton import logit_adjustments as adjustments
from eagleray.kernels.cuda.triton import sampling
from eagleray.kernels.cuda.triton.sampling import SamplingTensors, SamplingWorkspace
from eagleray.kernels.cuda.triton.sampling_records import collect_reported
from eagleray.kernels.forward_batch import DeviceNumbers
from eagleray.kernels.uploads import upload
from eagleray.messages.outputs import TokenLogprobs
from eagleray.messages.sampling import Sampling
from eagleray.worker.device_processed_logits import process_logits
from eagleray.worker.device_sampling_state import DeviceSamplingState, RowChanges, Words
from eagleray.worker.downloads import HostArray
from eagleray.worker.grammar_rows import GrammarRows, Masks, MatchedRows, PendingMasks
from eagleray.worker.logprobs import RAW_LOGPROBS, ScoreKind, make_reports, score_tokens
from eagleray.worker.sampler import NOT_FINITE, NOTHING_LEFT, Sampled, TokenSampler, gather_sampled
from eagleray.worker.sampling_state import SamplingFeature
from eagleray.worker.token_table import IntArray

MESSAGES = {sampling.NOT_FINITE: NOT_FINITE, sampling.NOTHING_LEFT: NOTHING_LEFT}
"""Reason for a row's failure, by the status that the kernels write."""

ALIGNED_WORDS = 4
"""Parts of an upload or a download begin at multiples of this, because Triton compiles a kernel twice if only some of
its pointers are multiples of 16 bytes."""


@dataclass(frozen=True, slots=True)
class PreparedSampling:
    """Knowledge of the host about a step that samples, and the words that the device needs for it."""

    rows: list[int]
    used: int
    """`SamplingFeature` flags of all rows together."""
    has_top_k: bool
    has_top_p: bool
    max_reported_top_k: int
    """The largest top_k that restricts a reported row, or 0."""
    drops_by_weight: bool
    """Whether a reported row has top_p or min_p."""
    reported: IntArray
    """Indices into `rows` of the rows whose log-probabilities are reported."""
    num_logprobs: list[int]
    """Number of likeliest tokens to report, by reported row."""
    num_requested: list[int]
    """Number of tokens to report that were asked for by id, by reported row."""
    grammars: MatchedRows | None
    changes: RowChanges
    words: Words
    """int32: rows, positions, reported indices, changes; each part but the last is padded to a multiple of
    `ALIGNED_WORDS`."""

    @property
    def is_adjusted(self) -> bool:
        return bool(self.used & SamplingFeature.ADJUSTED)

    @property
    def grammar_rows(self) -> Collection[int]:
        return () if self.grammars is None else self.grammars.matchers.keys()


@dataclass(frozen=True, slots=True)
class DeviceSamplingStep:
    """A `SamplingStep` whose tokens the device will have chosen when it comes to them."""

    token_ids: Tensor
    """int32 [n], on the device; 0 for a row that failed."""
    tensors: Sequence[Tensor]
    _prepared: PreparedSampling
    _num_top: int
    """Number of likeliest tokens that are reported of every reported row."""
    _masks: PendingMasks | None
    _refused: dict[int, str]
    """Reasons why matchers failed, by index into the rows."""
    _grammars: GrammarRows | None

    def finish(self, arrays: Sequence[HostArray]) -> Sampled:
        """Return the result, which the grammars of the rows accept. `arrays`: the content of `tensors`."""
        own = self._prepared
        token_ids, statuses = arrays[0][:, : len(own.rows)]
        failed = {int(index): MESSAGES[int(statuses[index])] for index in np.flatnonzero(statuses)}
        failed |= {index: reason for index, reason in self._refused.items() if failed.get(index) != NOT_FINITE}
        sampled = gather_sampled(own.rows, token_ids.tolist(), self._reports(arrays[1:]), failed, self._masks)
        if own.grammars is not None:
            assert self._grammars is not None
            self._grammars.accept(own.grammars, sampled.rows, sampled.token_ids)
        return sampled

    def _reports(self, arrays: Sequence[HostArray]) -> dict[int, TokenLogprobs]:
        if not arrays:
            return {}
        own = self._prepared
        token_ids, logprobs, ranks = (array.tolist() for array in arrays)
        reports = make_reports(token_ids, logprobs, ranks, own.num_logprobs, own.num_requested, self._num_top)
        return {own.rows[index]: report for index, report in zip(own.reported, reports, strict=True)}


class DeviceSampler(TokenSampler[PreparedSampling]):
    """Owns the sampling state of the rows, and the memory of the kernels."""

    def __init__(
        self,
        *,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        split_size: int = sampling.SPLIT,
        reported_kind: ScoreKind = RAW_LOGPROBS,
        grammars: GrammarRows | None = None,
    ) -> None:
        self._device = device
        self._grammars = grammars
        self._kind = reported_kind
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        """int32 [num_rows]; each step writes the tokens that it chooses, 0 for a row that fails."""
        self._state = DeviceSamplingState(num_rows=num_rows, vocab_size=vocab_size, device=self._device)
        self._workspace = SamplingWorkspace.allocate(num_rows, vocab_size, self._device, split_size)
        self._ranking = DeviceRanking()

    def add_row(self, row: int, sampling: Sampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Set the row's parameters. `token_ids` is the prompt, then the tokens that were generated before."""
        self._state.add_row(row, sampling, token_ids, num_prompt_tokens)
        if sampling.is_masked:
            assert self._grammars is not None, "the model has no tokenizer, so its requests have no grammars"
            self._grammars.add_row(row, sampling, token_ids[num_prompt_tokens:])

    def free_row(self, row: int) -> None:
        self._state.free_row(row)
        if self._grammars is not None and self._grammars.has_rows:
            self._grammars.free_row(row)

    @torch.inference_mode()
    def warm_up(self, num_rows: int, *, num_logprobs: int) -> None:
        """Run every kernel, on logits of `num_rows` rows with the costliest parameters, so that requests neither wait
        for a compiler nor need more memory than this. No row may have been added."""
        logits = torch.zeros((num_rows, self._state.vocab_size), device=self._device)
        rows = np.arange(num_rows)
        for parameters in _warm_up_parameters(self._state.vocab_size, num_logprobs):
            for row in rows.tolist():
                self.add_row(row, parameters, [0, 0], 1)
            plan = self.prepare(rows, np.full(num_rows, 2))
            self.launch(logits, plan, DeviceNumbers(plan.words).on(self._device))
        self._keep_masked(logits, rows, np.full((num_rows, mask_words(self._state.vocab_size)), -1, dtype=np.int32))
        self._state = DeviceSamplingState(
            num_rows=len(self.last_tokens), vocab_size=self._state.vocab_size, device=self._device
        )

    def prepare(self, rows: IntArray, positions: IntArray) -> PreparedSampling:
        state = self._state
        use = state.use[rows]
        reported = np.flatnonzero(use & SamplingFeature.LOGPROBS)
        indices = np.concatenate([_aligned(part) for part in (rows, positions, reported)])
        changes = state.pop_changes(len(indices))
        return PreparedSampling(
            rows=rows.tolist(),
            used=int(np.bitwise_or.reduce(use)),
            has_top_k=bool(state.has_top_k[rows].any()),
            has_top_p=bool(state.has_top_p[rows].any()),
            max_reported_top_k=int(state.restricting_top_k[rows[reported]].max(initial=0)),
            drops_by_weight=bool(state.drops_by_weight[rows[reported]].any()),
            reported=reported,
            num_logprobs=state.num_logprobs[rows[reported]].tolist(),
            num_requested=state.num_reported[rows[reported]].tolist(),
            grammars=self._grammars.select(rows) if self._grammars is not None and self._grammars.has_rows else None,
            changes=changes,
            words=np.concatenate([indices, changes.words]),
        )

    @torch.inference_mode()
    def launch(self, logits: Tensor, plan: PreparedSampling, words: Tensor) -> DeviceSamplingStep:
        masks = None
        if plan.grammars is not None:
            assert self._grammars is not None
            masks = self._grammars.begin_masks(plan.grammars)
        n, num_reported = len(plan.rows), len(plan.reported)
        size = _aligned_size(n)
        self._state.apply(plan.changes, words)
        outcome = torch.empty((2, size), dtype=torch.int32, device=self._device)
        tensors = SamplingTensors(
            logits=logits,
            rows=words[:n],
            positions=words[size : size + n],
            memory=self._state.memory,
            counts=self._state.counts,
            last_tokens=self.last_tokens,
            token_ids=outcome[0, :n],
            status=outcome[1, :n],
        )
        reported = words[2 * size : 2 * size + num_reported]
        is_first_chosen = not plan.used & SamplingFeature.RANDOM
        sampling.find_first(
            tensors, self._workspace, is_adjusted=False, is_chosen=is_first_chosen and not plan.is_adjusted
        )
        raw = logits if self._kind.is_processed else self._raw(logits, reported, plan)
        refused = {} if masks is None else self._apply_masks(logits, masks)
        if plan.is_adjusted:
            self._adjust(tensors, plan.used)
            sampling.find_first(tensors, self._workspace, is_adjusted=True, is_chosen=is_first_chosen)
        if plan.used & SamplingFeature.RANDOM:
            self._draw(tensors, plan)
        downloads = [outcome]
        num_top = 0
        if num_reported:
            num_top = min(max(plan.num_logprobs), logits.shape[1])
            downloads += self._report(raw, tensors, reported, plan, num_top)
        return DeviceSamplingStep(tensors.token_ids, downloads, plan, num_top, masks, refused, self._grammars)

    def _raw(self, logits: Tensor, reported: Tensor, prepared: PreparedSampling) -> Tensor:
        """Return the raw logits to report on, [num_reported, vocab_size]: a copy if they will change."""
        if len(reported) == 0 or (len(reported) == len(logits) and not prepared.is_adjusted):
            return logits
        return logits.index_select(0, reported)

    def _apply_masks(self, logits: Tensor, pending: PendingMasks) -> dict[int, str]:
        """Forbid what the grammars do not allow. Returns the reasons of the matchers that failed, by logit index."""
        masks, failed = pending.wait()
        self._keep_masked(logits, pending.rows.indices, masks)
        return failed

    def _keep_masked(self, logits: Tensor, indices: IntArray, masks: Masks) -> None:
        """Upload the masks of the logits at `indices`, and forbid what they do not allow."""
        words = upload(np.concatenate([_aligned(indices), masks.reshape(-1)]), self._device)
        adjustments.keep_masked(logits, words[: len(indices)], words[_aligned_size(len(indices)) :].view(masks.shape))

    def _adjust(self, tensors: SamplingTensors, used: int) -> None:
        logits, rows, positions, memory = tensors.logits, tensors.rows, tensors.positions, tensors.memory
        if used & SamplingFeature.ALLOWED:
            adjustments.keep_allowed(logits, memory, rows)
        if used & SamplingFeature.BAD_WORDS:
            adjustments.forbid_bad_words(logits, memory, rows, positions)
        if used & SamplingFeature.MIN_TOKENS:
            adjustments.suppress(logits, memory, rows, positions)
        if used & SamplingFeature.BIAS:
            adjustments.add_bias(logits, memory, rows)
        if used & SamplingFeature.PENALTIES:
            adjustments.penalise(logits, memory, rows, tensors.counts)

    def _draw(self, tensors: SamplingTensors, prepared: PreparedSampling) -> None:
        if prepared.has_top_k:
            sampling.cut_front(tensors, self._workspace, by_weight=False)
        if prepared.has_top_p:
            sampling.cut_front(tensors, self._workspace, by_weight=True)
        sampling.draw(tensors, self._workspace)

    def _report(
        self, raw: Tensor, tensors: SamplingTensors, reported: Tensor, prepared: PreparedSampling, num_top: int
    ) -> list[Tensor]:
        """Return the reported tokens, their scores and the ranks of the chosen ones, by reported row."""
        chosen = tensors.token_ids.index_select(0, reported)
        num_given = 1 + max(prepared.num_requested)
        given = torch.empty((len(reported), num_given), dtype=torch.int64, device=self._device)
        collect_reported(tensors.memory, tensors.rows, reported, chosen, out=given)
        processed = None
        if self._kind.is_processed:
            raw, processed = process_logits(
                tensors,
                self._workspace,
                reported,
                chosen,
                self._ranking,
                max_top_k=prepared.max_reported_top_k,
                drops_by_weight=prepared.drops_by_weight,
            )
        token_ids, scores, ranks = score_tokens(
            raw, given, num_top, self._ranking, processed=processed, is_logits=self._kind.is_logits
        )
        return [token_ids.to(torch.int32), scores, ranks.to(torch.int32)]


def _aligned_size(size: int) -> int:
    return -(-size // ALIGNED_WORDS) * ALIGNED_WORDS


def _aligned(part: IntArray) -> Words:
    words = np.zeros(_aligned_size(len(part)), dtype=np.int32)
    words[: len(part)] = part
    return words


def _warm_up_parameters(vocab_size: int, num_logprobs: int) -> list[Sampling]:
    """Return parameters of greedy and random rows, without and with adjustments: each has kernels of its own."""
    greedy = Sampling(seed=0, temperature=0.0)
    random = Sampling(
        seed=0,
        top_k=max(2, vocab_size // 2),
        top_p=0.5,
        logprobs=num_logprobs,
        logprob_token_ids=(0,),
    )
    adjustments_of_all = {
        "allowed_token_ids": (0, 1, 2),
        "bad_words": ((0, 1),),
        "min_tokens": 2,
        "suppressed_token_ids": (1,),
        "logit_bias": {0: 1.0},
        "repetition_penalty": 1.5,
    }
    return [replace(base, **changes) for base in (greedy, random) for changes in ({}, adjustments_of_all)]
