"""Weights made of stored tensors: cast to the model's dtype, decoded or kept if they are quantized.

A subclass has the tensors, in files or in memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagleray.kernels.quantized import (
    FP8_COLUMNS,
    Fp8Weight,
    LoadedWeight,
    Weight,
    WeightFormat,
    group_scales,
)
from eagleray.log import get_logger
from eagleray.models.quantized_formats.stored_format import StoredFormat
from eagleray.models.weights import Cut, Param, Quantizers, WeightRole

logger = get_logger(__name__)

SCALES_SUFFIX = "_scale_inv"
"""Suffix of the scales of a weight in FP8, after its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRules:
    """The forms in which weights are loaded and kept."""

    dtype: torch.dtype
    """The model's dtype."""
    device: torch.device
    fp8_block: tuple[int, int] | None = None
    """See `ModelSpec`; without it, weights in FP8 with a scale for each block are refused."""
    stored_format: StoredFormat | None = None
    """See `ModelSpec`."""
    kept_formats: frozenset[WeightFormat] = frozenset()
    """See `KernelBackend`."""
    takes_parts: bool = False
    """See `KernelBackend`."""
    quantizers: Quantizers = field(default_factory=dict)
    """Functions that quantize weights that are stored as plain numbers."""

    def can_be_fp8(self, param: Param) -> bool:
        """Whether a tensor may be stored in FP8 with a scale for each block."""
        return self.fp8_block is not None and len(param.shape) == 2

    def scales_of(self, param: Param) -> Param:
        """Return the scales of a weight in FP8: [blocks of rows, blocks of columns]."""
        assert self.fp8_block is not None
        shape = tuple(-(-size // step) for size, step in zip(param.shape, self.fp8_block, strict=True))
        return Param(f"{param.name}{SCALES_SUFFIX}", shape, dtype=torch.float32)


class StoredWeights(ABC):
    """`Weights` of stored tensors."""

    def __init__(self, rules: WeightRules) -> None:
        self.rules = rules
        self.kept_fp8: set[str] = set()
        """The first name of each weight that was loaded in FP8 as it is stored."""
        self.lock = threading.Lock()
        """Held while the state that threads share is changed."""
        self._has_warned = False

    @abstractmethod
    def _check(self, param: Param, dtype: torch.dtype) -> None:
        """Raise an error unless the tensor exists, has its shape, and can be loaded as `dtype`."""

    @abstractmethod
    def _is_fp8(self, param: Param) -> bool:
        """Whether a tensor exists and is a weight in FP8 with a scale for each block."""

    @abstractmethod
    def _read(self, param: Param) -> Tensor:
        """Return this rank's shard of a tensor that was checked, in the dtype that it is stored in."""

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate the result of a load."""
        return torch.empty(shape, dtype=dtype, device=self.rules.device)

    def load(self, param: Param) -> Tensor:
        return self._load([param], param.dtype or self.rules.dtype)

    def load_concatenated(self, params: Sequence[Param]) -> Tensor:
        return self._load(params, self.rules.dtype)

    def load_weight(self, params: Sequence[Param]) -> LoadedWeight:
        are_fp8 = [self._is_fp8(param) for param in params]
        if not any(are_fp8):
            return self.quantize(self._load(params, self.rules.dtype), params[0].role)
        if WeightFormat.FP8 in self.rules.kept_formats and all(are_fp8):
            if self._is_kept(columns := spans(params[0])[1]):
                return self._load_fp8(params, columns)
            self._warn_of_decoding(params[0].name, columns)
        return self._load(params, self.rules.dtype)

    def load_head(self, param: Param) -> Weight:
        return self.load(param)

    def quantize(self, weight: Tensor, role: WeightRole = WeightRole.FEED_FORWARD) -> Weight:
        quantizer = self.rules.quantizers.get(role)
        return weight if quantizer is None else quantizer(weight)

    def _is_kept(self, columns: range) -> bool:
        """Whether these columns of a weight in FP8 can be a weight of their own, whose blocks products can read."""
        assert self.rules.fp8_block is not None
        size = self.rules.fp8_block[1]
        is_one_block = columns.start // size == (columns.stop - 1) // size
        return is_one_block or (columns.start % size == 0 and size % FP8_COLUMNS == 0)

    def _warn_of_decoding(self, name: str, columns: range) -> None:
        assert self.rules.fp8_block is not None
        self._warn_once(
            "%s and others are decoded and take twice the memory of FP8: columns %d to %d, this worker's, have scales "
            "for each %d columns; FP8 is kept only if a worker's columns begin with a block, and blocks have a "
            "multiple of %d columns",
            name,
            columns.start,
            columns.stop - 1,
            self.rules.fp8_block[1],
            FP8_COLUMNS,
        )

    def _warn_once(self, message: str, *args: object) -> None:
        with self.lock:
            if self._has_warned:
                return
            self._has_warned = True
        logger.warning(message, *args)

    def _load_fp8(self, params: Sequence[Param], columns: range) -> Fp8Weight:
        """Load weights in FP8 as they are stored. Where parts of blocks of rows are next to each other, blocks of fewer
        rows have the same scales."""
        assert self.rules.fp8_block is not None
        high, wide = self.rules.fp8_block
        values = self._load(params, torch.float8_e4m3fn)
        column_blocks = slice(columns.start // wide, -(-columns.stop // wide))
        scales, places, num_before = [], [], 0
        for param in params:
            rows, _ = spans(param)
            places.append(num_before + torch.arange(rows.start, rows.stop) // high)
            scales.append(self._load_scales(param)[:, column_blocks])
            num_before += len(scales[-1])
        grouped, block_rows = group_scales(torch.cat(scales), torch.cat(places), high)
        with self.lock:
            self.kept_fp8.add(params[0].name)
        return Fp8Weight(values, grouped.to(self.rules.device), (block_rows, wide))

    def _load_scales(self, param: Param) -> Tensor:
        """Return float32 [blocks of rows, blocks of columns], on the CPU, of a weight in FP8."""
        scales = self.rules.scales_of(param)
        self._check(scales, torch.float32)
        out = torch.empty(scales.shape)
        self._copy(scales, out)
        return out

    def _load(self, params: Sequence[Param], dtype: torch.dtype) -> Tensor:
        for param in params:  # nothing is allocated if a tensor is missing
            self._check(param, dtype)
        shapes = [param.local_shape for param in params]
        num_rows = [shape[0] for shape in shapes]
        out = self._empty((sum(num_rows), *shapes[0][1:]), dtype)
        for param, part in zip(params, out.split(num_rows), strict=True):
            self._copy(param, part)
        return out

    def _copy(self, param: Param, out: Tensor) -> None:
        part = self._read(param)
        is_decoded = self._is_fp8(param) and out.dtype != part.dtype
        copy_in_thread(self._scaled(part, param) if is_decoded else part, out)

    def _scaled(self, part: Tensor, param: Param) -> Tensor:
        """Return float32: this rank's shard of a weight in FP8 times the scales of its blocks."""
        assert self.rules.fp8_block is not None
        high, wide = self.rules.fp8_block
        rows, columns = spans(param)
        scales = self._load_scales(param)[:, torch.arange(columns.start, columns.stop) // wide]
        numbers = part.float()
        for block in range(rows.start // high, -(-rows.stop // high)):
            first, last = block * high - rows.start, (block + 1) * high - rows.start
            numbers[max(first, 0) : last] *= scales[block]
        return numbers


def spans(param: Param) -> list[range]:
    """Return this rank's rows and columns of a matrix."""
    spans = [range(size) for size in param.shape]
    if isinstance(param.shard, Cut):
        spans[param.shard.dim] = param.shard.span
    return spans


def copy_in_thread(source: Tensor, out: Tensor) -> None:
    """Copy and cast a tensor."""
    if source.dtype == out.dtype and out.device.type == "cpu" and source.is_contiguous():
        # in one thread: torch would wake all of its threads for every tensor
        out.view(torch.uint8).numpy()[:] = source.view(torch.uint8).numpy()
    else:
        out.copy_(source)
