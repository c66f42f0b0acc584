"""Reads weights from a GGUF file. Quantized ones are kept in groups if the backend does so, and decoded otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from eagleray.errors import CheckpointError
from eagleray.kernels.quantized import LoadedWeight, Weight, WeightFormat
from eagleray.models.gguf_blocks import FORMATS, IntegerGroups, grouped_weight
from eagleray.models.gguf_file import PLAIN, Entry, GgufFile, find_name
from eagleray.models.stored_weights import WeightRules, spans
from eagleray.models.weights import Cut, Param, WeightRole

CHUNK_NUMBERS = 1 << 22
"""Numbers that are decoded at a time: those of a whole embedding would take several times its memory."""
HEAD = "lm_head.weight"


class GgufWeights:
    """The `Weights` of a GGUF file, as a context manager. `params` and `on_progress`: see `CheckpointWeights`."""

    def __init__(
        self,
        file: GgufFile,
        rules: WeightRules,
        *,
        params: Iterable[Param] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.kept_fp8: set[str] = set()
        """Empty, see `StoredWeights`."""
        self._file = file
        self._rules = rules
        self._bytes = file.map()
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._bytes_read = 0
        self._total_bytes = sum(map(self._num_bytes, params))

    def __enter__(self) -> GgufWeights:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: the file is unmapped with its last tensor."""

    def load(self, param: Param) -> Tensor:
        return self.load_concatenated([param])

    def load_concatenated(self, params: Sequence[Param]) -> Tensor:
        entries = [self._checked(param) for param in params]
        sizes = [param.local_shape[0] for param in params]
        dtype = params[0].dtype or self._rules.dtype
        out = torch.empty((sum(sizes), *params[0].local_shape[1:]), dtype=dtype, device=self._rules.device)
        for param, entry, part in zip(params, entries, out.split(sizes), strict=True):
            self._decode(param, entry, part)
        return out

    def load_weight(self, params: Sequence[Param]) -> LoadedWeight:
        if (weight := self._load_groups(params)) is not None:
            return weight
        return self.quantize(self.load_concatenated(params), params[0].role)

    def load_head(self, param: Param) -> Weight:
        groups = self._load_groups([param])
        return self.load(param) if groups is None else groups

    def quantize(self, weight: Tensor, role: WeightRole = WeightRole.FEED_FORWARD) -> Weight:
        quantizer = self._rules.quantizers.get(role)
        return weight if quantizer is None else quantizer(weight)

    def finish(self, names: Iterable[str], *, may_be_left: Callable[[str], bool]) -> None:
        """Report full progress when all layers are loaded, see `CheckpointWeights.finish`."""
        left = self._file.left_over([*names, *([HEAD] if may_be_left(HEAD) else [])])
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(
                f"{self._file.path}: the model that the header describes has no place for {', '.join(left[:3])}{more}; "
                "this variant of the model is not supported"
            )
        if self._on_progress is not None:
            self._on_progress(self._total_bytes, self._total_bytes)

    def _load_groups(self, params: Sequence[Param]) -> Weight | None:
        """Return weights in groups; None if the backend does not keep these, or if they have no such form, which either
        all experts of a layer must have or none."""
        if WeightFormat.INT8 not in self._rules.kept_formats:
            return None
        entries = [self._checked(param) for param in params]
        if any(entry.kind in PLAIN for entry in entries):
            return None
        parts = []
        for param, entry in zip(params, entries, strict=True):
            rows, columns = spans(param)
            blocks = self._blocks(param, entry, rows, columns)
            first = columns.start - columns.start % FORMATS[entry.kind].layout.block_size
            cut = blocks.cut_columns(range(columns.start - first, columns.stop - first))
            if cut is None:
                return None
            parts.append(cut)
        weight = grouped_weight(parts)
        if weight is None and (place := find_name(params[0].name)).expert is not None:
            raise CheckpointError(
                f"{self._file.path}: tensor {place.name!r} has the integer -128, or scales beyond float16, for which "
                "kernels of experts have no form; take a file of another type"
            )
        if weight is not None:
            for param in params:
                self._count(param)
        return weight

    def _decode(self, param: Param, entry: Entry, out: Tensor) -> None:
        """Write this rank's shard of a tensor into `out`."""
        rows, columns = spans(param)[0], spans(param)[1] if len(param.shape) == 2 else range(1)
        at_once = max(1, CHUNK_NUMBERS // len(columns)) if entry.kind not in PLAIN else len(rows)
        for first in range(0, len(rows), max(1, at_once)):
            some = rows[first : first + at_once]
            numbers = self._numbers(param, entry, some, columns)
            out[first : first + at_once] = numbers if len(param.shape) == 2 else numbers[:, 0]
        self._count(param)

    def _numbers(self, param: Param, entry: Entry, rows: range, columns: range) -> Tensor:
        """Return plain numbers [rows, columns]."""
        if entry.kind in PLAIN:
            data = self._matrix(param, entry)[self._file.rows(param.name, rows)]
            return data.contiguous().view(PLAIN[entry.kind])[:, columns.start : columns.stop]
        first = columns.start - columns.start % FORMATS[entry.kind].layout.block_size
        numbers = self._blocks(param, entry, rows, columns).numbers()
        return numbers[:, columns.start - first : columns.stop - first]

    def _blocks(self, param: Param, entry: Entry, rows: range, columns: range) -> IntegerGroups:
        """Return the whole blocks in which these rows and columns lie."""
        layout = FORMATS[entry.kind].layout
        blocks = self._matrix(param, entry).unflatten(1, (-1, layout.block_bytes))  # [rows, blocks, bytes]
        needed = blocks[:, columns.start // layout.block_size : -(-columns.stop // layout.block_size)]
        return FORMATS[entry.kind].split(needed[self._file.rows(param.name, rows)].contiguous())

    def _matrix(self, param: Param, entry: Entry) -> Tensor:
        """Return the bytes of a tensor [rows, bytes of a row]; a vector has a number in each row."""
        data = self._bytes[entry.offset : entry.offset + entry.num_bytes]
        if len(entry.shape) == 1:
            return data.view(entry.shape[0], -1)
        matrices = data.view(-1, entry.shape[-2], entry.row_bytes)
        return matrices[find_name(param.name).expert or 0]

    def _checked(self, param: Param) -> Entry:
        """Return the entry of a tensor. Raises `CheckpointError` if it is missing or has another shape."""
        name, expert = find_name(param.name)
        if (entry := self._file.entries.get(name)) is None:
            raise CheckpointError(f"{self._file.path}: tensor {name!r} of shape {list(param.shape)} is missing")
        found = entry.shape if expert is None else entry.shape[1:]
        if found != param.shape or (expert or 0) >= entry.shape[0]:
            raise CheckpointError(
                f"{self._file.path}: tensor {name!r} has the shape {list(entry.shape)}, but the header implies "
                f"{list(param.shape)}{'' if expert is None else ' for each expert'}"
            )
        return entry

    def _num_bytes(self, param: Param) -> int:
        """Return the bytes that this rank reads of a tensor; 0 if it is missing."""
        name, expert = find_name(param.name)
        if (entry := self._file.entries.get(name)) is None:
            return 0
        whole = entry.num_bytes // (1 if expert is None else entry.shape[0])
        share = len(param.shard.span) / param.shape[param.shard.dim] if isinstance(param.shard, Cut) else 1
        return int(whole * share)

    def _count(self, param: Param) -> None:
        if self._on_progress is not None:
            with self._lock:
                self._bytes_read += self._num_bytes(param)
                self._on_progress(self._bytes_read, self._total_bytes)
