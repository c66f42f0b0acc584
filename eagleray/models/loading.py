"""Reads weights from the safetensors files of a checkpoint.

Files are memory-mapped. A tensor is read when a layer loads it, directly into memory of its own, in the model's dtype
on the model's device. Every problem is a `CheckpointError` that names the file and the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from eagleray.errors import CheckpointError
from eagleray.models.checkpoint_files import DTYPE_NAMES, PACKED, full_names, header_bytes, open_file, weight_files
from eagleray.models.stored_weights import SCALES_SUFFIX, StoredWeights, WeightRules
from eagleray.models.weights import Param

FP8 = "F8_E4M3"
ITEMSIZES = {"F32": 4, "F16": 2, "BF16": 2, PACKED: 1, FP8: 1}


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
            self._paths = weight_files(directory)
            self._files = [stack.enter_context(open_file(path)) for path in self._paths]
            owners = {name: index for index, file in enumerate(self._files) for name in file.keys()}  # noqa: SIM118
            self._stored_names = full_names(owners)
            self._owners = {name: owners[stored] for name, stored in self._stored_names.items()}
            self._bytes_read = sum(map(header_bytes, self._paths))
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
        return weight != name and weight not in left and self._kind(weight) == FP8 and self.rules.fp8_block is not None

    def _check(self, param: Param, dtype: torch.dtype) -> None:
        name, shape = param.name, param.shape
        if name not in self._owners:
            searched = ", ".join(map(str, self._paths))
            raise CheckpointError(f"tensor {name!r} of shape {list(shape)} is missing; searched in {searched}")
        index = self._owners[name]
        path, stored = self._paths[index], self._slice(name)
        kind = stored.get_dtype()
        expected = (PACKED,) if dtype == torch.uint8 else tuple(DTYPE_NAMES)
        if kind not in expected and not self._is_fp8(param):
            supported = ", ".join(expected)
            raise CheckpointError(f"{path}: tensor {name!r} is stored as {kind}; supported are {supported}")
        if (found := tuple(stored.get_shape())) != shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has the shape {list(found)}, but config.json implies {list(shape)}"
            )

    def _kind(self, name: str) -> str:
        """Return the dtype of a tensor in its file, or "" if it is missing."""
        return str(self._slice(name).get_dtype()) if name in self._owners else ""

    def _slice(self, name: str) -> Any:
        return self._files[self._owners[name]].get_slice(self._stored_names[name])

    def _is_fp8(self, param: Param) -> bool:
        return self.rules.can_be_fp8(param) and self._kind(param.name) == FP8

    def _read(self, param: Param) -> Tensor:
        stored = self._slice(param.name)
        part: Tensor = stored[:] if param.shard is None else param.shard.of(stored)
        with self.lock:
            self._bytes_read += part.numel() * part.itemsize
            if self._on_progress is not None:
                self._on_progress(self._bytes_read, self._total_bytes)
        return part

    def _num_bytes(self, param: Param) -> int:
        """Return the bytes that this rank reads of a tensor, with its scales; 0 if it is missing."""
        of_scales = self._num_bytes(self.rules.scales_of(param)) if self._is_fp8(param) else 0
        return param.local_size * ITEMSIZES.get(self._kind(param.name), 0) + of_scales
