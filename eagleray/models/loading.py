"""Reads weights from the safetensors files of a checkpoint.

Files are memory-mapped. A tensor is read when a layer loads it, directly into memory of its own, in the model's dtype
on the model's device. Every problem is a `CheckpointError` that names the file and the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from eagleray.errors import CheckpointError
from eagleray.kernels.grouped import GroupedWeight
from eagleray.kernels.quantized import LoadedWeight
from eagleray.models.checkpoint_files import DTYPE_NAMES, PACKED
from eagleray.models.quantized_formats.stored_tensors import MatrixPart
from eagleray.models.quantized_tensors import (
    ITEMSIZES,
    QuantizedTensors,
    columns_read_together,
    concatenate,
    decode,
    kept_weight,
)
from eagleray.models.stored_weights import SCALES_SUFFIX, StoredWeights, WeightRules
from eagleray.models.tensor_files import TensorFiles
from eagleray.models.weights import Param

FP8 = "F8_E4M3"


class CheckpointWeights(StoredWeights):
    """The `Weights` of one checkpoint, as a context manager.

    `params` are the tensors that this rank reads. `on_progress` is called with the bytes of them that are read and
    their total bytes, as stored in the files.
    """

    def __init__(
        self,
        directory: Path,
        rules: WeightRules,
        *,
        params: Iterable[Param] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(rules)
        self._on_progress = on_progress
        with ExitStack() as stack:
            self._files = TensorFiles(directory)
            stack.callback(self._files.close)
            self._quantized = (
                None if rules.stored_format is None else QuantizedTensors(rules.stored_format, self._files)
            )
            self._bytes_read = self._files.header_bytes
            self._total_bytes = self._bytes_read + sum(map(self._num_bytes, params))
            self._close = stack.pop_all().close

    def __enter__(self) -> CheckpointWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def finish(self, names: Iterable[str], *, may_be_left: Callable[[str], bool]) -> None:
        """Report full progress when all layers are loaded. `names`: the tensors of the whole model. Raises
        `CheckpointError` if the files have other tensors for which `may_be_left` is false."""
        known = frozenset(names)
        left = self._files.names - known
        left = {name for name in left if not may_be_left(name) and not self._are_scales(name, left)}
        if self._quantized is not None:
            left = {name for name in left if not self._quantized.belongs_to_weight(name, known)}
        if left:
            first = sorted(left)[:3]
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(
                f"{self._files.paths(left)}: the model that config.json describes has no place for "
                f"{', '.join(first)}{more}; config.json and the weights do not belong together, or this variant of the "
                "model is not supported"
            )
        if self._on_progress is not None:
            self._on_progress(self._total_bytes, self._total_bytes)

    def load_weight(self, params: Sequence[Param]) -> LoadedWeight:
        parts = [part for param in params if (part := self._quantized_part(param)) is not None]
        if self._quantized is None or len(parts) < len(params) or not self._keeps_format:
            return super().load_weight(params)
        loaded = [self._read_quantized(part) for part in parts]
        whole = concatenate(loaded)
        if whole is not None and (kept := kept_weight(whole, self.rules.device)) is not None:
            return kept
        self._warn_of_groups(parts[0], loaded[0])
        return torch.cat([part.dequantize(self.rules.dtype) for part in loaded]).to(self.rules.device)

    @property
    def _keeps_format(self) -> bool:
        return self._quantized is not None and self._quantized.format.kept_as in self.rules.kept_formats

    def _quantized_part(self, param: Param) -> MatrixPart | None:
        """Return this rank's part of a weight, or None if it is not stored in the checkpoint's quantized format."""
        return None if self._quantized is None else self._quantized.part_of(param)

    def _read_quantized(self, part: MatrixPart) -> GroupedWeight:
        assert self._quantized is not None
        weight = self._quantized.read(part)
        self._count_bytes(self._quantized.num_bytes(part))
        return weight

    def _warn_of_groups(self, part: MatrixPart, weight: GroupedWeight) -> None:
        self._warn_once(
            "%s.weight and others are decoded, so they take more memory than in the checkpoint: this worker's columns "
            "%d to %d have groups of %d, and products read groups of a multiple of %d columns; a cut of the columns "
            "must be between groups, and inputs must not be ordered by activation",
            part.module,
            part.columns.start,
            part.columns.stop - 1,
            weight.group_size,
            columns_read_together(weight.encoding),
        )

    def _are_scales(self, name: str, left: Set[str]) -> bool:
        """Whether these are the scales of a tensor in FP8 that is not left over itself."""
        weight = name.removesuffix(SCALES_SUFFIX)
        is_fp8 = self._files.kind(weight) == FP8 and self.rules.fp8_block is not None
        return weight != name and weight not in left and is_fp8

    def _check(self, param: Param, dtype: torch.dtype) -> None:
        if self._quantized_part(param) is not None:
            return  # the format checks it
        if self._quantized is not None and param.name not in self._files.names:
            raise self._files.missing(param.name, param.shape, other=self._quantized.weight_name(param))
        kinds = (PACKED,) if dtype == torch.uint8 else tuple(DTYPE_NAMES)
        self._files.check(param.name, (*kinds, FP8) if self._is_fp8(param) else kinds, param.shape)

    def _is_fp8(self, param: Param) -> bool:
        return self.rules.can_be_fp8(param) and self._files.kind(param.name) == FP8

    def _copy(self, param: Param, out: Tensor) -> None:
        if (part := self._quantized_part(param)) is None:
            super()._copy(param, out)
        else:
            decode(self._read_quantized(part), out)

    def _read(self, param: Param) -> Tensor:
        stored = self._files.slice_of(param.name)
        part: Tensor = stored[:] if param.shard is None else param.shard.of(stored)
        self._count_bytes(part.numel() * part.itemsize)
        return part

    def _count_bytes(self, num_bytes: int) -> None:
        with self.lock:
            self._bytes_read += num_bytes
            if self._on_progress is not None:
                self._on_progress(self._bytes_read, self._total_bytes)

    def _num_bytes(self, param: Param) -> int:
        """Return the bytes that this rank reads of a tensor, with its scales; 0 if it is missing."""
        if self._quantized is not None and (part := self._quantized_part(param)) is not None:
            return self._quantized.num_bytes(part)
        of_scales = self._num_bytes(self.rules.scales_of(param)) if self._is_fp8(param) else 0
        return param.local_size * ITEMSIZES.get(self._files.kind(param.name), 0) + of_scales
