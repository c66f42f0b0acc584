"""The quantized weights of a checkpoint whose format is a `StoredFormat`: kept for backends that read them, decoded for
the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch
from torch import Tensor

from eagleray.kernels.grouped import GROUP_SIZES, Encoding, GroupedWeight
from eagleray.kernels.quantized import FP8_COLUMNS, Fp8Weight
from eagleray.models.quantized_formats.stored_format import StoredFormat, is_quantized
from eagleray.models.quantized_formats.stored_tensors import MatrixPart
from eagleray.models.stored_weights import spans
from eagleray.models.tensor_files import TensorFiles
from eagleray.models.weights import Param, Part

ITEMSIZES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}
WEIGHT = ".weight"


class QuantizedTensors:
    """The quantized weights in the files of one checkpoint."""

    def __init__(self, stored_format: StoredFormat, files: TensorFiles) -> None:
        self.format = stored_format
        self._files = files

    def part_of(self, param: Param) -> MatrixPart | None:
        """Return this rank's part of a weight, or None if it is not a quantized one."""
        if not param.name.endswith(WEIGHT) or len(param.shape) != 2 or isinstance(param.shard, Part):
            return None
        module = param.name.removesuffix(WEIGHT)
        if not is_quantized(self.format, module, self._files):
            return None
        rows, columns = spans(param)
        return MatrixPart(module, (param.shape[0], param.shape[1]), rows, columns)

    def read(self, part: MatrixPart) -> GroupedWeight:
        return self.format.read(part, self._files)

    def num_bytes(self, part: MatrixPart) -> int:
        """Return about the bytes that a part takes in the files, with its scales."""
        share = len(part.rows) * len(part.columns) / max(part.shape[0] * part.shape[1], 1)
        return int(share * sum(map(self._tensor_bytes, self._names_of(part.module))))

    def weight_name(self, param: Param) -> str:
        """Return the name of the tensor that would have a quantized weight."""
        return f"{param.name.removesuffix(WEIGHT)}.{self.format.weight_suffix}" if param.name.endswith(WEIGHT) else ""

    def belongs_to_weight(self, name: str, names: Set[str]) -> bool:
        """Whether a tensor is one of a quantized weight. `names`: the tensors of the model. Quantizers also add biases
        of zeros to layers that have none."""
        module, _, suffix = name.rpartition(".")
        if f"{module}{WEIGHT}" not in names or not is_quantized(self.format, module, self._files):
            return False
        return name in self._names_of(module) or (suffix == "bias" and not bool(self._files.slice_of(name)[...].any()))

    def _names_of(self, module: str) -> list[str]:
        return [f"{module}.{suffix}" for suffix in (self.format.weight_suffix, *self.format.other_suffixes)]

    def _tensor_bytes(self, name: str) -> int:
        kind = self._files.kind(name)
        return torch.Size(self._files.shape(name)).numel() * ITEMSIZES.get(kind, 0) if kind else 0


def concatenate(parts: Sequence[GroupedWeight]) -> GroupedWeight | None:
    """Return weights one after another, or None if their groups are of different kinds."""
    kinds = {(part.encoding, part.group_size, part.offsets is None) for part in parts}
    if len(kinds) > 1:
        return None
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return GroupedWeight(
        torch.cat([part.codes for part in parts]),
        _joined(part.scales for part in parts),
        parts[0].encoding,
        _joined(offsets) if offsets else None,
    )


def kept_weight(weight: GroupedWeight, device: torch.device) -> GroupedWeight | Fp8Weight | None:
    """Return a weight for products that read it, or None if they cannot because of its groups."""
    is_float = weight.encoding is Encoding.E4M3
    is_whole_row = is_float and weight.group_size == weight.shape[1]
    if not is_whole_row and weight.group_size % columns_read_together(weight.encoding) != 0:
        return None
    if not is_float:
        return weight
    values = weight.codes.view(torch.float8_e4m3fn)
    return Fp8Weight(values.to(device), weight.scales.to(device), (1, weight.group_size))


def columns_read_together(encoding: Encoding) -> int:
    """Return the number of columns of which groups must have a multiple, so that products can read them."""
    return FP8_COLUMNS if encoding is Encoding.E4M3 else min(GROUP_SIZES)


def decode(weight: GroupedWeight, out: Tensor) -> None:
    """Write the numbers of a weight. They are decoded on the device of `out`."""
    codes, scales, offsets = (
        part if part is None else part.to(out.device) for part in (weight.codes, weight.scales, weight.offsets)
    )
    assert codes is not None and scales is not None
    out.copy_(GroupedWeight(codes, scales, weight.encoding, offsets).dequantize(out.dtype))


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    parts = list(tensors)
    is_alike = len({part.dtype for part in parts}) == 1
    return torch.cat(parts if is_alike else [part.float() for part in parts])
