"""Weights made of tensors in memory, which a trainer has pushed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.quantized import Fp8Weight, LoadedWeight, RowParts, group_scales, quantize_fp8
from eagleray.models.staging import Scratch, StagingMemory
from eagleray.models.stored_weights import StoredWeights, WeightRules, copy_in_thread, spans
from eagleray.models.weights import Param

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, eq=False)
class Pushed:
    """A tensor that has come: the whole one, or a copy of this rank's shard."""

    tensor: Tensor
    is_local: bool = False

    def local(self, param: Param) -> Tensor:
        """Return this rank's shard."""
        return self.tensor if self.is_local or param.shard is None else param.shard.of(self.tensor)

    def copied(self, param: Param, memory: StagingMemory) -> Pushed:
        """Return a copy of this rank's shard, in `memory` until `release`."""
        if self.is_local:
            return self
        part = self.local(param)
        copy = memory.allocate(part.numel(), part.dtype).view(part.shape)
        copy_in_thread(part, copy)
        return Pushed(copy, is_local=True)

    def release(self, memory: StagingMemory) -> None:
        """Give the memory of a copy back."""
        if self.is_local:
            memory.release([self.tensor])


class PushedWeights(StoredWeights):
    """The `Weights` of one group whose tensors have all come. A loaded tensor may be in `scratch`, or be a pushed one
    itself: it must not be changed, and is valid until the next group is packed. `kept_fp8`: see `StoredWeights`."""

    def __init__(
        self, rules: WeightRules, came: Mapping[str, Pushed], scratch: Scratch, *, kept_fp8: Set[str] = frozenset()
    ) -> None:
        super().__init__(rules)
        self._came = came
        self._scratch = scratch
        self._was_fp8 = kept_fp8

    def load_weight(self, params: Sequence[Param]) -> LoadedWeight:
        was_fp8 = params[0].name in self._was_fp8
        if not was_fp8 and not self.rules.quantizers:
            parts = self._in_place(params, self.rules.dtype) if self.rules.takes_parts and len(params) > 1 else None
            return RowParts(parts) if parts is not None else self._load(params, self.rules.dtype)
        weight = super().load_weight(params)
        return self._quantize_in_blocks(params) if was_fp8 and isinstance(weight, Tensor) else weight

    def _check(self, param: Param, dtype: torch.dtype) -> None:
        assert param.name in self._came, "the group is complete"

    def _is_fp8(self, param: Param) -> bool:
        return self.rules.can_be_fp8(param) and self._came[param.name].tensor.dtype == FP8

    def _read(self, param: Param) -> Tensor:
        return self._came[param.name].local(param)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._scratch.empty(shape, dtype)

    def _load(self, params: Sequence[Param], dtype: torch.dtype) -> Tensor:
        part = self._in_place(params, dtype) if len(params) == 1 else None
        return part[0] if part is not None else super()._load(params, dtype)

    def _in_place(self, params: Sequence[Param], dtype: torch.dtype) -> tuple[Tensor, ...] | None:
        """Return the tensors themselves, or None if they must be cast, moved or made contiguous."""
        parts = tuple(map(self._read, params))
        fit = (part.dtype == dtype and part.device == self.rules.device and part.is_contiguous() for part in parts)
        return parts if all(fit) else None

    def _quantize_in_blocks(self, params: Sequence[Param]) -> Fp8Weight:
        """Return plain numbers in FP8, in the layout of weights that are stored so."""
        assert self.rules.fp8_block is not None
        high, wide = self.rules.fp8_block
        values, scales, places, num_before = [], [], [], 0
        for param in params:
            rows, columns = spans(param)
            above, left = rows.start % high, columns.start % wide
            padded = F.pad(self._load([param], self.rules.dtype), (left, 0, above, 0))
            quantized = quantize_fp8(padded, (high, wide))
            values.append(quantized.values.view(torch.uint8)[above:, left:])
            places.append(num_before + torch.arange(above, above + len(rows)) // high)
            scales.append(quantized.scales)
            num_before += len(quantized.scales)
        grouped, block_rows = group_scales(torch.cat(scales), torch.cat(places), high)
        return Fp8Weight(torch.cat(values).view(FP8), grouped, (block_rows, wide))


class PartialWeights(PushedWeights):
    """The `Weights` of a group some of whose tensors have come; the others are zeros."""

    def _is_fp8(self, param: Param) -> bool:
        return param.name in self._came and super()._is_fp8(param)

    def _in_place(self, params: Sequence[Param], dtype: torch.dtype) -> tuple[Tensor, ...] | None:
        return None

    def _check(self, param: Param, dtype: torch.dtype) -> None:
        pass

    def _copy(self, param: Param, out: Tensor) -> None:
        if param.name in self._came:
            super()._copy(param, out)
        else:
            out.zero_()


class MaskWeights(PartialWeights):
    """Bits that are one for the tensors that have come, and zero for the others."""

    def _copy(self, param: Param, out: Tensor) -> None:
        out.view(torch.uint8).fill_(255 if param.name in self._came else 0)
