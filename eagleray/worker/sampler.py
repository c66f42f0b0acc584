"""Chooses the next token of each row of a step.

In the order of vLLM: raw log-probabilities; allowed ids, bad words and the ids that min_tokens forbids; bias;
penalties; then the highest logit for greedy rows, a draw (`random_sampler`) for the others; or processed
log-probabilities at the end. Each of these is done at once for all rows that use it, and skipped if no row of the step
does. A row with forced tokens is treated like any other, and then gets its forced token in place of the drawn one.
Driven by the runner.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagleray.grammars.matcher import Matcher, mask_words
from eagleray.kernels.decode_table import DecodeTable
from eagleray.kernels.forward_batch import Int32Array
from eagleray.kernels.inference import inference_mode
from eagleray.kernels.ranking import Ranking
from eagleray.messages.outputs import TokenLogprobs
from eagleray.messages.sampling import Sampling
from eagleray.messages.steps import RowFailure
from eagleray.worker.downloads import HostArray
from eagleray.worker.grammar_rows import GrammarRows, PendingMasks
from eagleray.worker.input_batch import InputBatch
from eagleray.worker.logprobs import RAW_LOGPROBS, ScoreKind, sample_logprobs
from eagleray.worker.random_sampler import RandomSampler, uniform
from eagleray.worker.sampling_state import SamplingFeature, SamplingState
from eagleray.worker.token_table import IntArray

NOT_FINITE = "the model produced no finite logits for the next token"
NOTHING_LEFT = (
    "no token is left to choose: allowed_token_ids, bad_words and min_tokens together forbid every one, "
    "or penalties made logits infinite; loosen them"
)
NOTHING_LEFT_BY_GRAMMAR = (
    "no token is left to choose: structured_outputs, allowed_token_ids, bad_words, min_tokens and "
    "thinking_token_budget together forbid every one; loosen them"
)

NO_INDICES = np.empty(0, dtype=np.int64)

NO_GUESS = -1
"""The number that `HostSampler.guess` returns in place of a token where none is allowed."""

NO_MATCHERS: Mapping[int, Matcher] = {}


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens sampled in a step. A row is in `rows`, in `ended` or in `failures`."""

    rows: list[int]
    token_ids: list[int]
    """Tokens in the order of `rows`."""
    logprobs: dict[int, TokenLogprobs]
    """Log-probabilities by row, for rows that asked for them."""
    ended: list[int]
    """Rows whose grammar is complete, and for which no token is left."""
    failures: list[RowFailure]
    mask_seconds: float = field(default=0.0, compare=False)
    """Time for the masks of grammars."""


class SamplingPlan(Protocol):
    """Knowledge of the host about a choice of tokens that is to come."""

    @property
    def words(self) -> Int32Array:
        """Numbers that must be on the device when the choice is launched."""
        ...

    @property
    def grammar_rows(self) -> Collection[int]:
        """Rows whose grammar must have accepted their tokens of earlier steps, by `SamplingStep.finish`, when the
        choice is launched. Empty for a sampler that knows the tokens when `launch` returns."""
        ...


class SamplingStep(Protocol):
    """The choice of a step's tokens, which was launched."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Results on the device that `finish` needs on the host. Empty if the tokens are known already."""
        ...

    def finish(self, arrays: Sequence[HostArray]) -> Sampled:
        """Return the tokens, given `tensors` as arrays."""
        ...


Plan = TypeVar("Plan", bound=SamplingPlan)


class TokenSampler(Protocol[Plan]):
    """Chooses tokens, and has the sampling parameters of all rows."""

    last_tokens: Tensor | None
    """[num_rows] the last token sampled for each row, on the device; None if the host knows the tokens when `launch`
    returns."""

    def add_row(self, row: int, sampling: Sampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Set the row's parameters. `token_ids` is the prompt, then the tokens that were generated before."""
        ...

    def free_row(self, row: int) -> None:
        """Free the row. Does nothing for a free row."""
        ...

    def warm_up(self, num_rows: int, *, num_logprobs: int) -> None:
        """Do what would delay the first choices, for up to `num_rows` rows with up to `num_logprobs` log-probabilities
        each. No row may have been added."""
        ...

    def prepare(self, rows: IntArray, positions: IntArray) -> Plan:
        """Prepare the choice of a token for each of `rows` [n], which has no duplicates. `positions` [n]: the positions
        of these tokens. Every plan is launched, in the order of preparation."""
        ...

    def launch(self, logits: Tensor, plan: Plan, words: Tensor) -> SamplingStep:
        """Launch the choice. logits: float32 [n, vocab_size], changed in place; words: those of `plan` on the
        device."""
        ...


class HostPlan(NamedTuple):
    """A `SamplingPlan` of a sampler that reads everything on the host."""

    rows: IntArray
    positions: IntArray
    words: Int32Array = np.empty(0, np.int32)
    masks: PendingMasks | None = None
    grammar_rows: Collection[int] = ()


class _KnownTokens:
    """A `SamplingStep` that is done."""

    tensors = ()

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled

    def finish(self, arrays: Sequence[HostArray]) -> Sampled:
        return self._sampled


class IdleSampler(TokenSampler[HostPlan]):
    """The sampler of a pooling model, which never chooses a token."""

    last_tokens = None

    def add_row(self, row: int, sampling: Sampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Do nothing: rows have no sampling state."""

    def free_row(self, row: int) -> None:
        """Do nothing, as `add_row`."""

    def warm_up(self, num_rows: int, *, num_logprobs: int) -> None:
        """Do nothing: there is no choice to warm up."""

    def prepare(self, rows: IntArray, positions: IntArray) -> HostPlan:
        raise RuntimeError("a pooling model has no tokens to choose")

    def launch(self, logits: Tensor, plan: HostPlan, words: Tensor) -> SamplingStep:
        raise RuntimeError("a pooling model has no tokens to choose")


@dataclass(frozen=True, slots=True)
class _Batch:
    """The rows that sample in a step, in the order of the step's logits."""

    rows: IntArray
    positions: IntArray
    use: IntArray
    """`SamplingFeature` flags of each row."""
    used: int
    """`SamplingFeature` flags of all rows together."""

    def logit_indices(self, use: SamplingFeature) -> IntArray:
        """Return the indices of the logits whose row uses the feature."""
        return np.flatnonzero(self.use & int(use)) if self.used & use else NO_INDICES


class HostSampler(TokenSampler[HostPlan]):
    """Chooses the tokens at once, with reads from the device in between: for CPUs, and GPUs without Triton."""

    last_tokens = None

    def __init__(
        self,
        state: SamplingState,
        ranking: Ranking,
        reported_kind: ScoreKind = RAW_LOGPROBS,
        grammars: GrammarRows | None = None,
    ) -> None:
        self._state = state
        self._ranking = ranking
        self._grammars = grammars
        self._kind = reported_kind
        self._device = state.device
        self._random: RandomSampler | None = None  # made when first needed, because it has large buffers

    def add_row(self, row: int, sampling: Sampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self._state.add_row(row, sampling, token_ids, num_prompt_tokens)
        if sampling.is_masked:
            assert self._grammars is not None, "the model has no tokenizer, so its requests have no grammars"
            self._grammars.add_row(row, sampling, token_ids[num_prompt_tokens:])

    def free_row(self, row: int) -> None:
        self._state.free_row(row)
        if self._grammars is not None and self._grammars.has_rows:
            self._grammars.free_row(row)

    def warm_up(self, num_rows: int, *, num_logprobs: int) -> None:
        """Make the buffers of draws on a GPU, whose cache is sized afterwards. There is nothing to compile."""
        if self._device.type == "cuda":
            self._random = self._make_random()

    def decode_table(self, rows: InputBatch) -> DecodeTable:
        """Return the table from which the kernels choose tokens without this sampler. `rows`: the requests that it
        samples for."""
        state = self._state
        return DecodeTable(
            token_ids=rows.token_ids,
            num_tokens=rows.num_tokens,
            num_computed=rows.num_computed,
            block_table=rows.block_table,
            block_size=rows.block_size,
            features=state.use,
            random=SamplingFeature.RANDOM,
            streams=state.streams,
            temperature=state.temperature,
            min_p=state.min_p,
            top_k=state.top_k,
            top_p=state.top_p,
        )

    def prepare(self, rows: IntArray, positions: IntArray) -> HostPlan:
        grammars = self._grammars
        if grammars is None or not grammars.has_rows or (matched := grammars.select(rows)) is None:
            return HostPlan(rows, positions)
        return HostPlan(rows, positions, masks=grammars.begin_masks(matched))

    def launch(self, logits: Tensor, plan: HostPlan, words: Tensor) -> SamplingStep:
        sampled = self.sample(logits, plan.rows, plan.positions, plan.masks)
        self._state.append_tokens(sampled.rows, sampled.token_ids)
        if plan.masks is not None:
            assert self._grammars is not None
            self._grammars.accept(plan.masks.rows, sampled.rows, sampled.token_ids)
        return _KnownTokens(sampled)

    @inference_mode
    def sample(self, logits: Tensor, rows: IntArray, positions: IntArray, masks: PendingMasks | None = None) -> Sampled:
        """Choose a token for each row and leave the sampling state unchanged. `masks`: those of the grammars. For the
        other parameters see `prepare` and `launch`."""
        step = self._batch(rows, positions)
        reported = step.logit_indices(SamplingFeature.LOGPROBS)
        raw = logits if self._kind.is_processed else self._raw(logits, reported, step)
        chosen, highest, failed = self._choose_likeliest(logits, masks)
        if step.used & SamplingFeature.BY_PARAMETERS:
            chosen, highest, broken = self._choose_adjusted(logits, step)
            failed = dict.fromkeys(broken, NOTHING_LEFT) | failed
        if step.used & SamplingFeature.RANDOM:
            self._draw(logits, highest, step, out=chosen)
        drawn = chosen
        if step.used & SamplingFeature.FORCED:
            chosen = self._force(drawn, step)
        reports: dict[int, TokenLogprobs] = {}
        if len(reported) and self._kind.is_processed:
            reports = self._report_processed(logits, highest, reported, drawn, chosen, step)
        elif len(reported):
            reports = self._report(raw, None, reported, chosen, step)
        return gather_sampled(rows.tolist(), chosen.tolist(), reports, failed, masks)

    def copy_matchers(self, rows: Sequence[int]) -> dict[int, Matcher]:
        """Return copies of the matchers of those of `rows` that have a grammar, for `guess`."""
        return {} if self._grammars is None or not self._grammars.has_rows else self._grammars.copy_matchers(rows)

    @inference_mode
    def guess(
        self, logits: Tensor, rows: IntArray, positions: IntArray, matchers: Mapping[int, Matcher] = NO_MATCHERS
    ) -> IntArray:
        """Return the token [n] that each row would choose at these positions if these logits were the model's, or
        `NO_GUESS` where none is allowed. The sampling state stays unchanged.

        matchers: of the rows that have a grammar, behind all tokens before these positions; they accept the tokens. For
        the other parameters see `prepare` and `launch`.
        """
        step = self._batch(rows, positions)
        matched = [(index, matchers[row]) for index, row in enumerate(rows.tolist()) if row in matchers]
        if matched:
            masks = np.empty((len(matched), mask_words(self._state.vocab_size)), dtype=np.int32)
            for mask, (_, matcher) in zip(masks, matched, strict=True):
                matcher.fill_mask(mask)
                if matcher.failure is not None:
                    mask[:] = 0
            indices = np.array([index for index, _ in matched], dtype=np.int64)
            chosen, highest, _ = self._ranking.first_allowed(logits, self._tensor(indices), self._tensor(masks))
        else:
            chosen, highest = self._ranking.first(logits)
        broken = _clear_broken(logits, chosen, highest)
        if step.used & SamplingFeature.BY_PARAMETERS:
            chosen, highest, further = self._choose_adjusted(logits, step)
            broken += further
        if step.used & SamplingFeature.RANDOM:
            self._draw(logits, highest, step, out=chosen)
        if step.used & SamplingFeature.FORCED:
            chosen = self._force(chosen, step)
        token_ids: IntArray = chosen.numpy(force=True)
        token_ids[broken] = NO_GUESS
        for index, matcher in matched:
            if token_ids[index] != NO_GUESS:
                matcher.accept([int(token_ids[index])])
        return token_ids

    def _batch(self, rows: IntArray, positions: IntArray) -> _Batch:
        use = self._state.use[rows]
        return _Batch(rows, positions, use, int(np.bitwise_or.reduce(use)))

    def _raw(self, logits: Tensor, reported: IntArray, step: _Batch) -> Tensor:
        """Return the raw logits to report on, [num_reported, vocab_size]: a copy if they will change."""
        if len(reported) == 0 or (len(reported) == len(logits) and not step.used & SamplingFeature.ADJUSTED):
            return logits
        return logits[self._tensor(reported)]

    def _choose_likeliest(self, logits: Tensor, masks: PendingMasks | None) -> tuple[Tensor, Tensor, dict[int, str]]:
        """Forbid what the grammars do not allow. Returns the token of the highest logit of each row [n], this logit
        [n], and reasons why rows failed, by logit index."""
        if masks is None:
            chosen, highest = self._ranking.first(logits)
            return chosen, highest, dict.fromkeys(_clear_broken(logits, chosen, highest), NOT_FINITE)
        words, refused = masks.wait()
        rows = self._tensor(masks.rows.indices)
        chosen, highest, unmasked = self._ranking.first_allowed(logits, rows, self._tensor(words))
        failed = dict.fromkeys(_clear_broken(logits, chosen, highest), NOTHING_LEFT) | refused
        return chosen, highest, failed | dict.fromkeys(_find_broken(unmasked), NOT_FINITE)

    def _choose_adjusted(self, logits: Tensor, step: _Batch) -> tuple[Tensor, Tensor, list[int]]:
        """Adjust the logits by the rows' parameters. Returns the token of the highest logit of each row [n], this logit
        [n], and the indices of the logits of which none is left."""
        self._adjust(logits, step)
        chosen, highest = self._ranking.first(logits)
        return chosen, highest, _clear_broken(logits, chosen, highest)

    def _adjust(self, logits: Tensor, step: _Batch) -> None:
        state = self._state
        logit_index_of_row = state.logit_index_of_row(step.rows)
        if step.used & SamplingFeature.ALLOWED:
            indices, token_ids, _ = self._tensors(*state.allowed.select(logit_index_of_row))
            values = logits[indices, token_ids]
            logits[self._tensor(step.logit_indices(SamplingFeature.ALLOWED))] = -torch.inf
            logits[indices, token_ids] = values
        if step.used & SamplingFeature.BAD_WORDS:
            indices, token_ids = self._tensors(*state.bad_words.select(logit_index_of_row))
            logits[indices, token_ids] = -torch.inf
        if step.used & SamplingFeature.MIN_TOKENS:
            generated = step.positions - state.num_prompt_tokens[step.rows]
            short = logit_index_of_row.copy()
            short[step.rows[generated >= state.min_tokens[step.rows]]] = -1
            indices, token_ids, _ = self._tensors(*state.suppressed.select(short))
            logits[indices, token_ids] = -torch.inf
        if step.used & SamplingFeature.BIAS:
            indices, token_ids, bias = self._tensors(*state.bias.select(logit_index_of_row))
            logits[indices, token_ids] += bias
        if step.used & SamplingFeature.PENALTIES:
            penalised = step.logit_indices(SamplingFeature.PENALTIES)
            state.penalties.apply(logits, self._tensor(penalised), step.rows[penalised])

    def _draw(self, logits: Tensor, highest: Tensor, step: _Batch, *, out: Tensor) -> None:
        indices = step.logit_indices(SamplingFeature.RANDOM)
        rows = step.rows[indices]
        uniforms = uniform(self._state.streams[rows], step.positions[indices])
        self._random_sampler.draw(logits, highest, indices, self._state.draw_settings(rows, uniforms), out=out)

    def _force(self, drawn: Tensor, step: _Batch) -> Tensor:
        """Return the tokens [n] with the forced ones in place of those that were drawn."""
        indices, token_ids = self._tensors(*self._state.forced_tokens(step.rows, step.positions))
        return drawn.index_put((indices,), token_ids)

    @property
    def _random_sampler(self) -> RandomSampler:
        if self._random is None:
            self._random = self._make_random()
        return self._random

    def _make_random(self) -> RandomSampler:
        state = self._state
        return RandomSampler(
            max_rows=len(state.use), vocab_size=state.vocab_size, device=self._device, ranking=self._ranking
        )

    def _report_processed(
        self, logits: Tensor, highest: Tensor, reported: IntArray, drawn: Tensor, chosen: Tensor, step: _Batch
    ) -> dict[int, TokenLogprobs]:
        at = self._tensor(reported)
        settings = self._state.process_settings(step.rows[reported])
        adjusted = logits[at]
        processed = self._random_sampler.process(adjusted, highest[at], settings, drawn[at])
        return self._report(adjusted, processed, reported, chosen, step)

    def _report(
        self, logits: Tensor, processed: Tensor | None, reported: IntArray, chosen: Tensor, step: _Batch
    ) -> dict[int, TokenLogprobs]:
        rows = step.rows[reported]
        reports = sample_logprobs(
            logits,
            chosen[self._tensor(reported)],
            self._state.num_logprobs[rows].tolist(),
            self._state.reported.select(self._state.logit_index_of_row(rows)),
            self._ranking,
            processed=processed,
            is_logits=self._kind.is_logits,
        )
        return dict(zip(rows.tolist(), reports, strict=True))

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _tensors(self, *arrays: npt.NDArray[Any]) -> list[Tensor]:
        return [self._tensor(array) for array in arrays]


def _clear_broken(logits: Tensor, chosen: Tensor, highest: Tensor) -> list[int]:
    """Return the indices of the logits without a finite highest one, and set them to 0, so that they are harmless."""
    broken = _find_broken(highest)
    if broken:
        logits[broken] = 0
        highest[broken] = 0
        chosen[broken] = 0
    return broken


def _find_broken(highest: Tensor) -> list[int]:
    """Return the indices of the highest logits that are not finite."""
    return [index for index, value in enumerate(highest.tolist()) if not math.isfinite(value)]


def gather_sampled(
    rows: list[int],
    token_ids: list[int],
    reports: dict[int, TokenLogprobs],
    failed: dict[int, str],
    masks: PendingMasks | None,
) -> Sampled:
    """Return the tokens of a step whose logits `failed`, each for the reason given. rows, token_ids: [n]; reports: by
    row; masks: of the grammars, which have not accepted these tokens yet."""
    mask_seconds = 0.0 if masks is None else masks.seconds
    if not failed:
        return Sampled(rows, token_ids, reports, [], [], mask_seconds)
    sampled = [index for index in range(len(rows)) if index not in failed]
    matchers = {} if masks is None else masks.rows.matchers
    ended, failures = [], []
    for index, message in sorted(failed.items()):
        matcher = matchers.get(row := rows[index])
        if message == NOTHING_LEFT and matcher is not None:
            if matcher.is_complete:
                ended.append(row)
                continue
            message = NOTHING_LEFT_BY_GRAMMAR
        failures.append(RowFailure(row, message, is_user_error=message != NOT_FINITE))
    return Sampled(
        rows=[rows[index] for index in sampled],
        token_ids=[token_ids[index] for index in sampled],
        logprobs={rows[index]: reports[rows[index]] for index in sampled if rows[index] in reports},
        ended=ended,
        failures=failures,
        mask_seconds=mask_seconds,
    )
