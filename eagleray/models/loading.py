"""Reads weights from the safetensors files of a checkpoint.

Files are memory-mapped. A tensor is read when a layer loads it, directly into memory of its own, in the model's dtype
on the model's device. Every problem is a `CheckpointError` that names the file and the tensor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagleray.config.json_files import read_json_object, shown
from eagleray.errors import CheckpointError
from eagleray.kernels.quantized import FP8_COLUMNS, Fp8Weight, Weight, WeightFormat, group_scales, quantize_fp8
from eagleray.log import get_logger
from eagleray.models.weights import LAYER, Cut

logger = get_logger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

BYTES_OF_DTYPE = {"F32": 4, "F16": 2, "BF16": 2}
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
BYTES_OF_ENCODED_DTYPE = {"U8": 1}
"""Bytes per element of encoded tensors, whose elements are not parameters themselves."""
FP8 = "F8_E4M3"
MAX_INDEX_BYTES = 128 * 2**20
"""Bound for the size of an index. Published models with the most experts have one of about 20 MiB."""
ALL_BYTES = BYTES_OF_DTYPE | BYTES_OF_ENCODED_DTYPE | {FP8: 1}


class CheckpointWeights:
    """The `Weights` of one checkpoint, as a context manager.

    `is_elsewhere` says which tensors only other ranks have. Of the others, each of `tp_size` ranks reads its part.
    The exceptions are tensors that `is_whole`: of these, this rank reads the fraction `parts_wanted` by itself.
    `on_progress` is called with the bytes read and the total bytes of this rank's part, as stored in the files.
    `fp8_block`: see `ModelSpec`; without it, weights in FP8 are refused. `kept_formats`: see `KernelBackend`.
    `quantizes`: the weights of linear layers that are stored as plain numbers are quantized to FP8.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[int, int], None] | None,
        is_elsewhere: Callable[[str], bool] = lambda name: False,
        is_whole: Callable[[str], bool] = lambda name: False,
        parts_wanted: Callable[[str], Fraction] = lambda name: Fraction(1),
        tp_size: int = 1,
        fp8_block: tuple[int, int] | None = None,
        kept_formats: frozenset[WeightFormat] = frozenset(),
        quantizes: bool = False,
    ) -> None:
        self.dtype = dtype
        self._device = device
        self._fp8_block = fp8_block
        self._keeps_fp8 = WeightFormat.FP8 in kept_formats
        self._quantizes = quantizes
        self._has_warned = False
        self._on_progress = on_progress
        self.num_parameters = 0
        self._units_read = 0  # bytes of this rank, times `tp_size`
        self._lock = threading.Lock()
        with ExitStack() as stack:
            self._paths = _weight_files(directory)
            self._files = [stack.enter_context(_open(path)) for path in self._paths]
            self._owners = {name: index for index, file in enumerate(self._files) for name in file.keys()}  # noqa: SIM118
            self._left_over = {name for name in self._owners if not is_elsewhere(name)}
            self._tp_size = tp_size
            self._is_whole = is_whole
            whole = [name for name in self._left_over if is_whole(name)]
            others = self._owners.keys() - set(whole)
            all_bytes = sum(path.stat().st_size for path in self._paths)
            elsewhere_bytes = sum(self._num_bytes(name) for name in others if name not in self._left_over)
            divided_bytes = all_bytes - elsewhere_bytes - sum(map(self._num_bytes, whole))
            whole_bytes = sum(self._num_bytes(name) * parts_wanted(name) for name in whole)
            self._total_bytes = divided_bytes // tp_size + int(whole_bytes)
            self._close = stack.pop_all().close

    def __enter__(self) -> CheckpointWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def load(
        self, name: str, shape: tuple[int, ...], cut: Cut | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        return self._load([name], [shape], [cut], dtype or self.dtype)

    def load_part(self, name: str, shape: tuple[int, ...], index: int) -> Tensor:
        return self._load_part(name, shape, index, self.dtype, parameters=1)

    def load_bytes(self, name: str, shape: tuple[int, ...], index: int, *, parameters: int) -> Tensor:
        return self._load_part(name, shape, index, torch.uint8, parameters=parameters)

    def load_concatenated(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], cuts: Sequence[Cut | None] | None = None
    ) -> Tensor:
        return self._load(names, shapes, cuts or [None] * len(names), self.dtype)

    def load_weight(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], cuts: Sequence[Cut | None] | None = None
    ) -> Weight:
        cuts = cuts or [None] * len(names)
        are_fp8 = [self._is_fp8(self._kind(name), shape) for name, shape in zip(names, shapes, strict=True)]
        if not any(are_fp8):
            return self.quantize(self._load(names, shapes, cuts, self.dtype))
        if self._keeps_fp8 and all(are_fp8):
            if self._is_kept(columns := _columns(shapes[0], cuts[0])):
                return self._load_fp8(names, shapes, cuts, columns)
            self._warn_of_decoding(names[0], columns)
        return self._load(names, shapes, cuts, self.dtype)

    def quantize(self, weight: Tensor) -> Weight:
        return quantize_fp8(weight) if self._quantizes else weight

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

    def _load_fp8(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], cuts: Sequence[Cut | None], columns: range
    ) -> Fp8Weight:
        """Load weights in FP8 as they are stored. Where parts of blocks of rows are next to each other, blocks of fewer
        rows have the same scales."""
        assert self._fp8_block is not None
        high, wide = self._fp8_block
        values = self._load(names, shapes, cuts, torch.float8_e4m3fn)
        column_blocks = slice(columns.start // wide, -(-columns.stop // wide))
        scales, places, num_before = [], [], 0
        for name, shape, cut in zip(names, shapes, cuts, strict=True):
            rows = cut.span if cut is not None and cut.dim == 0 else range(shape[0])
            places.append(num_before + torch.arange(rows.start, rows.stop) // high)
            scales.append(self._load_scales(name, shape)[:, column_blocks])
            num_before += len(scales[-1])
        grouped, block_rows = group_scales(torch.cat(scales), torch.cat(places), high)
        return Fp8Weight(values, grouped.to(self._device), (block_rows, wide))

    def _load_scales(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return float32 [blocks of rows, blocks of columns], on the CPU, of a weight in FP8 of this shape."""
        assert self._fp8_block is not None
        scales = torch.empty([-(-size // step) for size, step in zip(shape, self._fp8_block, strict=True)])
        self._read(f"{name}_scale_inv", tuple(scales.shape), None, scales)
        return scales

    def _load_part(
        self, name: str, shape: tuple[int, ...], index: int, dtype: torch.dtype, *, parameters: int
    ) -> Tensor:
        self._stored(name, shape, dtype)
        out = torch.empty(shape[1:], dtype=dtype, device=self._device)
        self._read(name, shape, Cut(0, range(index, index + 1)), out[None], is_part=True)
        with self._lock:
            self.num_parameters += out.numel() * parameters
        return out

    def _load(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        cuts: Sequence[Cut | None],
        dtype: torch.dtype,
    ) -> Tensor:
        for name, shape in zip(names, shapes, strict=True):  # nothing is allocated if a tensor is missing
            self._stored(name, shape, dtype)
        wanted = [shape if cut is None else cut.shape(shape) for shape, cut in zip(shapes, cuts, strict=True)]
        num_rows = [shape[0] for shape in wanted]
        out = torch.empty((sum(num_rows), *wanted[0][1:]), dtype=dtype, device=self._device)
        for name, shape, cut, part in zip(names, shapes, cuts, out.split(num_rows), strict=True):
            self._read(name, shape, cut, part)
        with self._lock:
            self.num_parameters += out.numel()
        return out

    def finish(self, may_be_left: Callable[[str], bool]) -> None:
        """Report full progress when all layers are loaded. Raises `CheckpointError` if tensors are left of which
        `may_be_left` is false."""
        left = sorted(name for name in self._left_over if not may_be_left(name))
        if left:
            paths = ", ".join(sorted({str(self._paths[self._owners[name]]) for name in left}))
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(
                f"{paths}: the model that config.json describes has no place for {', '.join(left[:3])}{more}; "
                "config.json and the weights do not belong together, or this variant of the model is not supported"
            )
        if self._on_progress is not None:
            self._on_progress(self._total_bytes, self._total_bytes)

    def _stored(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Return the tensor in its file. Raises `CheckpointError` unless it exists, has this shape, and can be read as
        `dtype`."""
        if name not in self._owners:
            searched = ", ".join(map(str, self._paths))
            raise CheckpointError(f"tensor {name!r} of shape {list(shape)} is missing; searched in {searched}")
        index = self._owners[name]
        path, stored = self._paths[index], self._files[index].get_slice(name)
        kind = stored.get_dtype()
        expected = BYTES_OF_ENCODED_DTYPE if dtype == torch.uint8 else BYTES_OF_DTYPE
        if kind not in expected and not self._is_fp8(kind, shape):
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

    def _is_fp8(self, kind: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this kind and shape is a weight with a scale for each block."""
        return kind == FP8 and self._fp8_block is not None and len(shape) == 2

    def _read(self, name: str, shape: tuple[int, ...], cut: Cut | None, out: Tensor, *, is_part: bool = False) -> None:
        stored = self._stored(name, shape, out.dtype)
        part = stored[:] if cut is None else _part(stored, cut)
        is_decoded = self._is_fp8(stored.get_dtype(), shape) and out.dtype != part.dtype
        _copy(self._scaled(part, name, shape, cut) if is_decoded else part, out)
        with self._lock:
            self._left_over.discard(name)
            num_bytes = self._num_bytes(name) // shape[0] if is_part else self._num_bytes(name)
            self._units_read += num_bytes * (self._tp_size if self._is_whole(name) else 1)
            if self._on_progress is not None:
                self._on_progress(self._units_read // self._tp_size, self._total_bytes)

    def _scaled(self, part: Tensor, name: str, shape: tuple[int, ...], cut: Cut | None) -> Tensor:
        """Return float32: a weight in FP8, or the part `cut` of it, times the scales of its blocks."""
        assert self._fp8_block is not None
        rows, columns = self._fp8_block
        scales = self._load_scales(name, shape)
        wanted = [range(size) for size in shape]
        if cut is not None:
            wanted[cut.dim] = cut.span
        column_scales = scales[
            :, torch.arange(wanted[1].start, wanted[1].stop) // columns
        ]  # [row blocks, wanted columns]
        numbers = part.float()
        for block in range(wanted[0].start // rows, -(-wanted[0].stop // rows)):
            first, last = block * rows - wanted[0].start, (block + 1) * rows - wanted[0].start
            numbers[max(first, 0) : last] *= column_scales[block]
        return numbers

    def _num_bytes(self, name: str) -> int:
        stored = self._files[self._owners[name]].get_slice(name)
        return torch.Size(stored.get_shape()).numel() * ALL_BYTES.get(stored.get_dtype(), 0)


def stored_dtype(directory: Path) -> str:
    """Return the dtype of the first weight that is of float32, float16 or bfloat16. Raises `CheckpointError`."""
    paths = _weight_files(directory)
    for path in paths:
        file = _open(path)
        with file:
            kinds = (file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
            if (kind := next((kind for kind in kinds if kind in NAMES), None)) is not None:
                return NAMES[kind]
    raise CheckpointError(f"{paths[0]}: there are no weights of float32, float16 or bfloat16")


def read_headers(directory: Path) -> tuple[int, set[int]]:
    """Return the number of parameters in all weight files, where a byte of four-bit weights counts as two, and the
    layers that have a tensor. Raises `CheckpointError`."""
    num_parameters, layers = 0, set[int]()
    for path in _weight_files(directory):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118
                stored = file.get_slice(name)
                per_element = 2 if stored.get_dtype() in BYTES_OF_ENCODED_DTYPE else 1
                num_parameters += math.prod(stored.get_shape()) * per_element
                if (match := LAYER.match(name)) is not None:
                    layers.add(int(match[1]))
    return num_parameters, layers


def _columns(shape: tuple[int, ...], cut: Cut | None) -> range:
    """Return the wanted columns."""
    return cut.span if cut is not None and cut.dim == 1 else range(shape[1])


def _copy(source: Tensor, out: Tensor) -> None:
    if source.dtype == out.dtype and out.device.type == "cpu" and source.is_contiguous():
        # in one thread: torch would wake all of its threads for every tensor
        out.view(torch.uint8).numpy()[:] = source.view(torch.uint8).numpy()
    else:
        out.copy_(source)


def _part(stored: Any, cut: Cut) -> Tensor:
    """Read the part `cut` of a tensor, and no more."""
    span = slice(cut.span.start, cut.span.stop)
    return stored[span] if cut.dim == 0 else stored[:, span]


def _weight_files(directory: Path) -> list[Path]:
    """Return the single file, or the shards that the index names."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(
            f"{directory}: there is neither {SINGLE_FILE} nor {INDEX_FILE}; weights are read from safetensors files "
            "only (for random weights instead: --load-format dummy)"
        )
    weight_map = read_json_object(index, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(
            f"{index}: is not an index of safetensors files: its `weight_map` must name a file for each tensor, but it "
            f"is {shown(weight_map)}"
        )
    shards = sorted(set(weight_map.values()))
    if not shards:
        raise CheckpointError(f"{index}: its `weight_map` names no file")
    for shard in shards:
        if not _is_file(path := directory / shard):
            raise CheckpointError(f"{path}: not found, but {index} names it; the download may be incomplete")
    return [directory / shard for shard in shards]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _open(path: Path) -> Any:
    """Open a safetensors file. This checks that the file is as long as its header says."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: is not a complete safetensors file ({error}); it may be truncated or damaged, copy it again"
        ) from error
