"""Reads weights from the safetensors files of a checkpoint.

Files are memory-mapped. A tensor is read when a layer loads it, directly into memory of its own, in the model's dtype
on the model's device. Every problem is a `CheckpointError` that names the file and the tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from eagleray.errors import CheckpointError
from eagleray.kernels.quantized import FP8_COLUMNS, Fp8Weight, Weight, WeightFormat, group_scales, quantize_fp8
from eagleray.log import get_logger
from eagleray.models.checkpoint_files import DTYPE_NAMES, PACKED, header_bytes, open_file, weight_files
from eagleray.models.weights import Cut, Param

logger = get_logger(__name__)

FP8 = "F8_E4M3"
ITEMSIZES = {"F32": 4, "F16": 2, "BF16": 2, PACKED: 1, FP8: 1}
SCALES_SUFFIX = "_scale_inv"
"""Suffix of the scales of a weight in FP8, after its name."""


class CheckpointWeights:
    """The `Weights` of one checkpoint, as a context manager.

    `on_progress` is called with the bytes read and the total bytes of `params`, those that this rank reads, as stored
    in the files. `fp8_block`: see `ModelSpec`; without it, weights in FP8 are refused. `kept_formats`: see
    `KernelBackend`. `quantizes`: the weights of linear layers that are stored as plain numbers are quantized to FP8.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        params: Iterable[Param] = (),
        on_progress: Callable[[int, int], None] | None = None,
        fp8_block: tuple[int, int] | None = None,
        kept_formats: frozenset[WeightFormat] = frozenset(),
        quantizes: bool = False,
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._fp8_block = fp8_block
        self._keeps_fp8 = WeightFormat.FP8 in kept_formats
        self._quantizes = quantizes
        self._has_warned = False
        self._on_progress = on_progress
        self._lock = threading.Lock()
        with ExitStack() as stack:
            self._paths = weight_files(directory)
            self._files = [stack.enter_context(open_file(path)) for path in self._paths]
            self._owners = {name: index for index, file in enumerate(self._files) for name in file.keys()}  # noqa: SIM118
            self._bytes_read = sum(map(header_bytes, self._paths))
            self._total_bytes = self._bytes_read + sum(map(self._num_bytes, params))
            self._close = stack.pop_all().close

    def __enter__(self) -> CheckpointWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def load(self, param: Param) -> Tensor:
        return self._load([param], param.dtype or self._dtype)

    def load_concatenated(self, params: Sequence[Param]) -> Tensor:
        return self._load(params, self._dtype)

    def load_weight(self, params: Sequence[Param]) -> Weight:
        are_fp8 = [self._is_fp8(self._kind(param.name), param) for param in params]
        if not any(are_fp8):
            return self.quantize(self._load(params, self._dtype))
        if self._keeps_fp8 and all(are_fp8):
            if self._is_kept(columns := _spans(params[0])[1]):
                return self._load_fp8(params, columns)
            self._warn_of_decoding(params[0].name, columns)
        return self._load(params, self._dtype)

    def quantize(self, weight: Tensor) -> Weight:
        return quantize_fp8(weight) if self._quantizes else weight

    def finish(self, names: Iterable[str], *, may_be_left: Callable[[str], bool]) -> None:
        """Report full progress when all layers are loaded. `names`: those of the whole model. Raises `CheckpointError`
        if there are other tensors of which `may_be_left` is false."""
        left = self._owners.keys() - set(names)
        left = {name for name in left if not may_be_left(name) and not self._are_scales(name, left)}
        if left:
            first = sorted(left)[:3]
            paths = ", ".join(sorted({str(self._paths[self._owners[name]]) for name in left}))
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(
                f"{paths}: the model that config.json describes has no place for {', '.join(first)}{more}; "
                "config.json and the weights do not belong together, or this variant of the model is not supported"
            )
        if self._on_progress is not None:
            self._on_progress(self._total_bytes, self._total_bytes)

    def _are_scales(self, name: str, left: set[str]) -> bool:
        """Whether these are the scales of a tensor in FP8 that is not left over itself."""
        weight = name.removesuffix(SCALES_SUFFIX)
        return weight != name and weight not in left and self._kind(weight) == FP8 and self._fp8_block is not None

    def _is_kept(self, columns: range) -> bool:
        """Whether these columns of a weight in FP8 can be a weight of their own, whose blocks products can read."""
        assert self._fp8_block is not None
        size = self._fp8_block[1]
        is_one_block = columns.start // size == (columns.stop - 1) // size
        return is_one_block or (columns.start % size == 0 and size % FP8_COLUMNS == 0)

    def _warn_of_decoding(self, name: str, columns: range) -> None:
        with self._lock:
            if self._has_warned:
                return
            self._has_warned = True
        assert self._fp8_block is not None
        logger.warning(
            "%s and others are decoded and take twice the memory of FP8: columns %d to %d, this worker's, have scales "
            "for each %d columns; what stays FP8 begins with a block and has blocks of a multiple of %d columns",
            name,
            columns.start,
            columns.stop - 1,
            self._fp8_block[1],
            FP8_COLUMNS,
        )

    def _load_fp8(self, params: Sequence[Param], columns: range) -> Fp8Weight:
        """Load weights in FP8 as they are stored. Where parts of blocks of rows are next to each other, blocks of fewer
        rows have the same scales."""
        assert self._fp8_block is not None
        high, wide = self._fp8_block
        values = self._load(params, torch.float8_e4m3fn)
        column_blocks = slice(columns.start // wide, -(-columns.stop // wide))
        scales, places, num_before = [], [], 0
        for param in params:
            rows, _ = _spans(param)
            places.append(num_before + torch.arange(rows.start, rows.stop) // high)
            scales.append(self._load_scales(param)[:, column_blocks])
            num_before += len(scales[-1])
        grouped, block_rows = group_scales(torch.cat(scales), torch.cat(places), high)
        return Fp8Weight(values, grouped.to(self._device), (block_rows, wide))

    def _load_scales(self, param: Param) -> Tensor:
        """Return float32 [blocks of rows, blocks of columns], on the CPU, of a weight in FP8."""
        scales = self._scales_of(param)
        out = torch.empty(scales.shape)
        self._read(scales, out)
        return out

    def _scales_of(self, param: Param) -> Param:
        assert self._fp8_block is not None
        shape = tuple(-(-size // step) for size, step in zip(param.shape, self._fp8_block, strict=True))
        return Param(f"{param.name}{SCALES_SUFFIX}", shape, dtype=torch.float32)

    def _load(self, params: Sequence[Param], dtype: torch.dtype) -> Tensor:
        for param in params:  # nothing is allocated if a tensor is missing
            self._stored(param, dtype)
        shapes = [param.local_shape for param in params]
        num_rows = [shape[0] for shape in shapes]
        out = torch.empty((sum(num_rows), *shapes[0][1:]), dtype=dtype, device=self._device)
        for param, part in zip(params, out.split(num_rows), strict=True):
            self._read(param, part)
        return out

    def _stored(self, param: Param, dtype: torch.dtype) -> Any:
        """Return the tensor in its file. Raises `CheckpointError` unless it exists, has its shape, and can be read as
        `dtype`."""
        name, shape = param.name, param.shape
        if name not in self._owners:
            searched = ", ".join(map(str, self._paths))
            raise CheckpointError(f"tensor {name!r} of shape {list(shape)} is missing; searched in {searched}")
        index = self._owners[name]
        path, stored = self._paths[index], self._files[index].get_slice(name)
        kind = stored.get_dtype()
        expected = (PACKED,) if dtype == torch.uint8 else tuple(DTYPE_NAMES)
        if kind not in expected and not self._is_fp8(kind, param):
            supported = ", ".join(expected)
            raise CheckpointError(f"{path}: tensor {name!r} is stored as {kind}; supported are {supported}")
        if (found := tuple(stored.get_shape())) != shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has the shape {list(found)}, but config.json implies {list(shape)}"
            )
        return stored

    def _kind(self, name: str) -> str:
        """Return the dtype of a tensor in its file, or "" if it is missing."""
        index = self._owners.get(name)
        return "" if index is None else str(self._files[index].get_slice(name).get_dtype())

    def _is_fp8(self, kind: str, param: Param) -> bool:
        """Whether a tensor of this kind is a weight with a scale for each block."""
        return kind == FP8 and self._fp8_block is not None and len(param.shape) == 2

    def _read(self, param: Param, out: Tensor) -> None:
        stored = self._stored(param, out.dtype)
        part = stored[:] if param.shard is None else param.shard.of(stored)
        is_decoded = self._is_fp8(stored.get_dtype(), param) and out.dtype != part.dtype
        _copy(self._scaled(part, param) if is_decoded else part, out)
        with self._lock:
            self._bytes_read += part.numel() * part.itemsize
            if self._on_progress is not None:
                self._on_progress(self._bytes_read, self._total_bytes)

    def _scaled(self, part: Tensor, param: Param) -> Tensor:
        """Return float32: this rank's shard of a weight in FP8 times the scales of its blocks."""
        assert self._fp8_block is not None
        high, wide = self._fp8_block
        rows, columns = _spans(param)
        scales = self._load_scales(param)[:, torch.arange(columns.start, columns.stop) // wide]
        numbers = part.float()
        for block in range(rows.start // high, -(-rows.stop // high)):
            first, last = block * high - rows.start, (block + 1) * high - rows.start
            numbers[max(first, 0) : last] *= scales[block]
        return numbers

    def _num_bytes(self, param: Param) -> int:
        """Return the bytes that this rank reads of a tensor, with its scales; 0 if it is missing."""
        kind = self._kind(param.name)
        of_scales = self._num_bytes(self._scales_of(param)) if self._is_fp8(kind, param) else 0
        return param.local_size * ITEMSIZES.get(kind, 0) + of_scales


def _spans(param: Param) -> list[range]:
    """Return this rank's rows and columns of a matrix."""
    spans = [range(size) for size in param.shape]
    if isinstance(param.shard, Cut):
        spans[param.shard.dim] = param.shard.span
    return spans


def _copy(source: Tensor, out: Tensor) -> None:
    if source.dtype == out.dtype and out.device.type == "cpu" and source.is_contiguous():
        # in one thread: torch would wake all of its threads for every tensor
        out.view(torch.uint8).numpy()[:] = source.view(torch.uint8).numpy()
    else:
        out.copy_(source)
