"""Pooling of hidden states: one vector for each prompt, when its last token is computed.

Used in place of a sampler by the rank that reports; driven by the runner. The hidden states of a step are overwritten
by the next one, so what later steps need of them is kept here, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagleray.config.pooling_spec import PoolingMethod
from eagleray.kernels.uploads import upload
from eagleray.messages.arrays import Array
from eagleray.messages.steps import RowFailure
from eagleray.models.base import Model
from eagleray.worker.input_batch import IntArray, StepInputs

NOT_FINITE = "the model produced hidden states that are not finite numbers"


class Pooler:
    """Pools the hidden states of a prompt, which may be computed in several steps, by `method`."""

    def __init__(self, model: Model, method: PoolingMethod) -> None:
        self._model = model
        self._method = method
        self._kept: dict[int, Tensor] = {}
        """float32 [hidden_size] of rows whose prompt is not complete: the sum of the hidden states so far, or the first
        one."""

    def free_row(self, row: int) -> None:
        """Forget what was kept for a row. Does nothing for a free row."""
        self._kept.pop(row, None)

    @torch.inference_mode()
    def pool(
        self, inputs: StepInputs, num_computed: npt.NDArray[Any], hidden: Tensor
    ) -> tuple[list[int], Tensor | None]:
        """Return the rows whose prompt is complete with this step, and their vectors, float32 [n, size] on the device;
        None if there are none.

        `num_computed`: the tokens of each row of the table that were computed before this step. `hidden`:
        [num_tokens, hidden_size] of the step.
        """
        done = inputs.sampling_indices
        rows = inputs.rows[done].tolist()
        if self._method == "last":
            if not rows:
                return [], None
            return rows, self._model.score(_lines(hidden, inputs.query_end_loc[done] - 1))
        pooled = self._pool_first if self._method == "cls" else self._pool_mean
        vectors = pooled(inputs, num_computed, hidden)
        return (rows, self._model.score(torch.stack(vectors))) if rows else ([], None)

    def _pool_first(self, inputs: StepInputs, num_computed: npt.NDArray[Any], hidden: Tensor) -> list[Tensor]:
        starts = inputs.query_end_loc - inputs.num_tokens
        for row, start in zip(inputs.rows.tolist(), starts.tolist(), strict=True):
            if num_computed[row] == 0:
                self._kept[row] = hidden[start].to(torch.float32, copy=True)
        return [self._kept.pop(row) for row in inputs.rows[inputs.sampling_indices].tolist()]

    def _pool_mean(self, inputs: StepInputs, num_computed: npt.NDArray[Any], hidden: Tensor) -> list[Tensor]:
        """Add up the hidden states row by row, so that a row's sum does not depend on the others of its step."""
        done = set(inputs.sampling_indices.tolist())
        vectors = []
        for index, row in enumerate(inputs.rows.tolist()):
            end, before = int(inputs.query_end_loc[index]), int(num_computed[row])
            count = int(inputs.num_tokens[index])
            total = hidden[end - count : end].sum(0, dtype=torch.float32)
            if before > 0:
                total += self._kept.pop(row)
            if index in done:
                vectors.append(total / (before + count))
            else:
                self._kept[row] = total
        return vectors


def _lines(hidden: Tensor, indices: IntArray) -> Tensor:
    return hidden.index_select(0, upload(indices.astype(np.int32), hidden.device))


def split_pooled(rows: Sequence[int], vectors: Array) -> tuple[dict[int, Array], list[RowFailure]]:
    """Return the vectors [n, size] by row, and the failures of those that are not finite."""
    is_finite = [bool(np.isfinite(vector).all()) for vector in vectors]
    pooled = {row: vector for row, vector, good in zip(rows, vectors, is_finite, strict=True) if good}
    return pooled, [RowFailure(row, NOT_FINITE) for row, good in zip(rows, is_finite, strict=True) if not good]
