"""Chooses the next token of each row of a step.

In the order of vLLM: log-probabilities of the raw logits; allowed ids, bad words and the ids that min_tokens forbids;
bias; penalties; then the highest logit for greedy rows, a draw (`draw`) for the others. Each of these is done at once
for all rows that use it, and skipped when no row of the step does. Driven by the runner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagleray.kernels.ranking import Ranking
from eagleray.messages.outputs import TokenLogprobs
from eagleray.messages.steps import RowFailure
from eagleray.worker.logprobs import sample_logprobs
from eagleray.worker.random_sampler import DrawSettings, RandomSampler
from eagleray.worker.sampling_state import SamplingFeature, SamplingState
from eagleray.worker.token_table import IntArray
from eagleray.worker.uniform import uniform

NOT_FINITE = "the model produced no finite logits for the next token"
NOTHING_LEFT = (
    "no token is left to choose: allowed_token_ids, bad_words and min_tokens together forbid every one, "
    "or penalties made logits infinite; loosen them"
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled. A row is in `rows` or in `failures`."""

    rows: list[int]
    token_ids: list[int]
    """The token of each of `rows`."""
    logprobs: dict[int, TokenLogprobs]
    """By row, for those that asked."""
    failures: list[RowFailure]


@dataclass(frozen=True, slots=True)
class _SamplingStep:
    """The lines of a step's logits."""

    rows: IntArray
    positions: IntArray
    use: IntArray
    """`SamplingFeature` flags of each line"""
    used: int
    """and of all together."""

    def lines(self, use: SamplingFeature) -> IntArray:
        return np.flatnonzero(self.use & use)


class Sampler:
    """Reads the sampling rows, and changes nothing in them."""

    def __init__(self, rows: SamplingState, ranking: Ranking) -> None:
        self._rows = rows
        self._ranking = ranking
        self._device = rows.device
        self._drawer = RandomSampler(
            max_lines=len(rows.use), vocab_size=rows.vocab_size, device=rows.device, ranking=ranking
        )

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: list[int], positions: list[int]) -> Sampled:
        """A token for each row.

        logits: float32 [n, vocab_size], changed in place; rows: [n], the row of each line; positions: [n], the absolute
        position that the token will have, which is the number of tokens known.
        """
        step = self._look_up(rows, positions)
        chosen, highest = self._ranking.first(logits)
        failed = dict.fromkeys(_clear_broken(logits, chosen, highest), NOT_FINITE)
        reported = step.lines(SamplingFeature.LOGPROBS)
        raw = self._raw(logits, reported, step)
        if step.used & SamplingFeature.ADJUSTED:
            self._adjust(logits, step)
            chosen, highest = self._ranking.first(logits)
            failed = dict.fromkeys(_clear_broken(logits, chosen, highest), NOTHING_LEFT) | failed
        if step.used & SamplingFeature.RANDOM:
            lines = step.lines(SamplingFeature.RANDOM)
            self._drawer.draw(logits, highest, lines, self._settings(step, lines), out=chosen)
        reports = self._report(raw, reported, chosen, step) if len(reported) else {}
        return _gather(rows, chosen.tolist(), reports, failed)

    def _look_up(self, rows: list[int], positions: list[int]) -> _SamplingStep:
        row_ids = np.array(rows, dtype=np.int64)
        use = self._rows.use[row_ids]
        return _SamplingStep(row_ids, np.array(positions, dtype=np.int64), use, int(np.bitwise_or.reduce(use)))

    def _raw(self, logits: Tensor, reported: IntArray, step: _SamplingStep) -> Tensor:
        """[num_reported, vocab_size] the raw logits of the lines to report on: a copy where those will change."""
        if len(reported) == 0 or (len(reported) == len(logits) and not step.used & SamplingFeature.ADJUSTED):
            return logits
        return logits[self._tensor(reported)]

    def _adjust(self, logits: Tensor, step: _SamplingStep) -> None:
        rows = self._rows
        line_of = rows.line_of(step.rows)
        if step.used & SamplingFeature.ALLOWED:
            lines, token_ids, _ = self._tensors(*rows.allowed.select(line_of))
            values = logits[lines, token_ids]
            logits[self._tensor(step.lines(SamplingFeature.ALLOWED))] = -torch.inf
            logits[lines, token_ids] = values
        if step.used & SamplingFeature.BAD_WORDS:
            lines, token_ids = self._tensors(*rows.bad_words.select(line_of))
            logits[lines, token_ids] = -torch.inf
        if step.used & SamplingFeature.MIN_TOKENS:
            generated = step.positions - rows.num_prompt_tokens[step.rows]
            is_short = generated < rows.min_tokens[step.rows]
            lines, token_ids, _ = self._tensors(*rows.suppressed.select(_only(line_of, step.rows, is_short)))
            logits[lines, token_ids] = -torch.inf
        if step.used & SamplingFeature.BIAS:
            lines, token_ids, bias = self._tensors(*rows.bias.select(line_of))
            logits[lines, token_ids] += bias
        if step.used & SamplingFeature.PENALTIES:
            penalised = step.lines(SamplingFeature.PENALTIES)
            rows.penalties.apply(logits, self._tensor(penalised), step.rows[penalised])

    def _settings(self, step: _SamplingStep, lines: IntArray) -> DrawSettings:
        at, rows = step.rows[lines], self._rows
        uniforms = uniform(rows.streams[at], step.positions[lines])
        return DrawSettings(uniforms, rows.temperature[at], rows.min_p[at], rows.top_k[at], rows.top_p[at])

    def _report(self, raw: Tensor, reported: IntArray, chosen: Tensor, step: _SamplingStep) -> dict[int, TokenLogprobs]:
        rows = step.rows[reported]
        reports = sample_logprobs(
            raw,
            chosen[self._tensor(reported)],
            self._rows.num_logprobs[rows].tolist(),
            self._rows.reported.select(self._rows.line_of(rows)),
            self._ranking,
        )
        return dict(zip(rows.tolist(), reports, strict=True))

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _tensors(self, *arrays: npt.NDArray[Any]) -> list[Tensor]:
        return [self._tensor(array) for array in arrays]


def _clear_broken(logits: Tensor, chosen: Tensor, highest: Tensor) -> list[int]:
    """The lines that have no finite highest logit. They become harmless: all zeros."""
    broken = highest.isfinite().logical_not_().nonzero()[:, 0]
    if len(broken):
        logits[broken] = 0
        highest[broken] = 0
        chosen[broken] = 0
    return broken.tolist()


def _only(line_of: IntArray, rows: IntArray, keep: npt.NDArray[np.bool_]) -> IntArray:
    """`line_of` without the rows that are not kept."""
    fewer = line_of.copy()
    fewer[rows[~keep]] = -1
    return fewer


def _gather(
    rows: list[int], token_ids: list[int], reports: dict[int, TokenLogprobs], failed: dict[int, str]
) -> Sampled:
    if not failed:
        return Sampled(rows, token_ids, reports, [])
    sampled = [line for line in range(len(rows)) if line not in failed]
    return Sampled(
        rows=[rows[line] for line in sampled],
        token_ids=[token_ids[line] for line in sampled],
        logprobs={rows[line]: reports[rows[line]] for line in sampled if rows[line] in reports},
        failures=[
            RowFailure(rows[line], message, is_user_error=message == NOTHING_LEFT)
            for line, message in sorted(failed.items())
        ],
    )
