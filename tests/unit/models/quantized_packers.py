"""Reference writers of quantized checkpoints, each from the definition of its format, with loops over integers.

Every packer takes a weight [outputs, inputs] and returns the tensors of a module and the numbers that these stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import edit_config, make_checkpoint
from quantized_checkpoints import PLAIN, WEIGHTS
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]


def to_words(integers: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Pack unsigned integers along the last dimension into int32. Position i of a word has the integer `order[i]`."""
    count = 32 // bits
    parts = integers.long().unflatten(-1, (-1, count))
    words = sum(parts[..., from_] << (bits * place) for place, from_ in enumerate(order or range(count)))
    return torch.where(words >= 2**31, words - 2**32, words).int()


def quantize(
    weight: Tensor, bits: int, size: int, *, symmetric: bool, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned integers [rows, columns], scales and zero points [rows, groups]."""
    groups = weight.unflatten(1, (-1, size))
    top = 2**bits - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).clamp(min=1e-5).to(dtype)
    zeros = torch.full_like(scales, 2 ** (bits - 1)).float() if symmetric else (-low / scales.float()).round()
    zeros = zeros.clamp(0, top)
    integers = (groups / scales.float()[:, :, None] + zeros[:, :, None]).round().clamp(0, top)
    return integers.flatten(1).long(), scales, zeros.long()


def numbers(integers: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    return (integers - zeros[:, group_of]).float() * scales[:, group_of].float()


def groups_of(columns: int, size: int) -> Tensor:
    return torch.arange(columns) // size


def pack_gptq(
    weight: Tensor, *, bits: int = 4, size: int = 16, symmetric: bool = False, shift: int = 1, is_ordered: bool = False
) -> Packed:
    """`is_ordered`: inputs are ordered by activation."""
    rows, columns = weight.shape
    size = columns if size == -1 else size
    order = torch.randperm(columns) if is_ordered else torch.arange(columns)
    integers, scales, zeros = quantize(weight[:, order], bits, size, symmetric=symmetric)
    integers = integers[:, order.argsort()]
    group_of = groups_of(columns, size)[order.argsort()]
    tensors = {
        "qweight": to_words(integers, bits).t().contiguous(),
        "qzeros": to_words((zeros.t() - shift) % 2**bits, bits),
        "scales": scales.t().contiguous(),
        "g_idx": group_of.int(),
        "bias": torch.zeros(rows, dtype=torch.float16),
    }
    return tensors, numbers(integers, scales, zeros, group_of)


def pack_awq(weight: Tensor, *, size: int = 16) -> Packed:
    integers, scales, zeros = quantize(weight, 4, size, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": to_words(integers.t(), 4, order),
        "qzeros": to_words(zeros.t(), 4, order),
        "scales": scales.t().contiguous(),
    }
    return tensors, numbers(integers, scales, zeros, groups_of(weight.shape[1], size))


def pack_words(weight: Tensor, *, bits: int = 4, size: int | None = 16, symmetric: bool = True) -> Packed:
    """The format pack-quantized; `size` None: a scale for each output."""
    rows, columns = weight.shape
    size = size or columns
    integers, scales, zeros = quantize(weight, bits, size, symmetric=symmetric, dtype=torch.bfloat16)
    tensors = {
        "weight_packed": to_words(integers, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = to_words(zeros.t(), bits).t().contiguous()
    return tensors, numbers(integers, scales, zeros, groups_of(columns, size))


def pack_int8(weight: Tensor, *, per_tensor: bool = False, symmetric: bool = True) -> Packed:
    rows, columns = weight.shape
    flat = weight.reshape(1, -1) if per_tensor else weight
    integers, scales, zeros = quantize(flat, 8, flat.shape[1], symmetric=symmetric, dtype=torch.bfloat16)
    exact = numbers(integers, scales, zeros, groups_of(flat.shape[1], flat.shape[1])).view(rows, columns)
    tensors = {
        "weight": (integers - 128).to(torch.int8).view(rows, columns),
        "weight_scale": scales.flatten() if per_tensor else scales,
    }
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 128).to(torch.int8).view(tensors["weight_scale"].shape)
    return tensors, exact


def pack_fp8(weight: Tensor, *, sharing: str = "channel", dtype: torch.dtype = torch.float32) -> Packed:
    """`sharing`: tensor, channel, or block, which is of 24 x 32 numbers."""
    rows, columns = weight.shape
    high, wide = {"tensor": (rows, columns), "channel": (1, columns), "block": (24, 32)}[sharing]
    scales = torch.empty(-(-rows // high), -(-columns // wide), dtype=dtype)
    small, exact = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            place = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = weight[place].abs().max() / 448
            small[place] = (weight[place] / scales[i, j].float()).to(torch.float8_e4m3fn)
            exact[place] = small[place].float() * scales[i, j].float()
    stored = scales.reshape(()) if sharing == "tensor" else scales
    return {"weight": small, "weight_scale": stored, "input_scale": torch.ones(1)}, exact


def scheme(storage: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """Return the description of a compressed-tensors checkpoint."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    }


@dataclass(frozen=True)
class Case:
    """A format, with its description in config.json."""

    name: str
    pack: Callable[[Tensor], Packed]
    config: dict[str, Any]


INT8_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
FP8_INPUTS = INT8_INPUTS | {"type": "float"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}

CASES = [
    Case("gptq", pack_gptq, GPTQ),
    Case("gptq-sym", lambda w: pack_gptq(w, symmetric=True), GPTQ | {"sym": True}),
    Case("gptq-8", lambda w: pack_gptq(w, bits=8, size=-1), GPTQ | {"bits": 8, "group_size": -1}),
    Case(
        "gptq-v2-8-sym",
        lambda w: pack_gptq(w, bits=8, symmetric=True, shift=0),
        GPTQ | {"bits": 8, "sym": True, "checkpoint_format": "gptq_v2"},
    ),
    Case("gptq-desc-act", lambda w: pack_gptq(w, is_ordered=True), GPTQ | {"desc_act": True}),
    Case("awq", pack_awq, AWQ),
    Case(
        "w4a16",
        pack_words,
        scheme("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=16),
    ),
    Case(
        "w4a16-asym",
        lambda w: pack_words(w, symmetric=False),
        scheme("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=16),
    ),
    Case(
        "w8a16",
        lambda w: pack_words(w, bits=8, size=None),
        scheme("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
    ),
    Case(
        "w8a16-asym",
        lambda w: pack_words(w, bits=8, size=None, symmetric=False),
        scheme("pack-quantized", num_bits=8, type="int", symmetric=False, strategy="channel"),
    ),
    Case("w8a8", pack_int8, scheme("int-quantized", INT8_INPUTS, num_bits=8, type="int", strategy="channel")),
    Case(
        "w8a8-tensor-asym",
        lambda w: pack_int8(w, per_tensor=True, symmetric=False),
        scheme("int-quantized", INT8_INPUTS, num_bits=8, type="int", symmetric=False, strategy="tensor"),
    ),
    Case(
        "fp8-channel",
        lambda w: pack_fp8(w, dtype=torch.bfloat16),
        scheme("float-quantized", FP8_INPUTS, num_bits=8, type="float", strategy="channel"),
    ),
    Case(
        "fp8-block",
        lambda w: pack_fp8(w, sharing="block"),
        scheme("float-quantized", FP8_INPUTS, num_bits=8, type="float", strategy="block", block_structure=[24, 32]),
    ),
    Case(
        "fp8-tensor",
        lambda w: pack_fp8(w, sharing="tensor"),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    Case("fp8-own-channel", pack_fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
]


def case(name: str) -> Case:
    return next(one for one in CASES if one.name == name)


def write_packed_checkpoint(
    directory: Path, family: str, out: Path, form: Case, *, dtype: str = "float32", **fields: Any
) -> tuple[Path, Path]:
    """Write a quantized checkpoint and its dequantized twin of plain numbers."""
    plain = make_checkpoint(directory, family, tokenizer=False, dtype=dtype, **fields)
    tensors = load_file(plain / WEIGHTS)
    packed = dict(tensors)
    for name, weight in tensors.items():
        if weight.dim() == 2 and not name.endswith((*PLAIN, "block_sparse_moe.gate.weight")):
            del packed[name]
            module, exact = form.pack(weight.float())
            own = {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in module.items()}
            packed = own | packed  # a bias that the layer has is kept
            tensors[name] = exact
    save_file(tensors, plain / WEIGHTS, metadata={"format": "pt"})
    out.mkdir()
    (out / "config.json").write_text((plain / "config.json").read_text())
    edit_config(out, quantization_config=form.config)
    packed = {name: tensor.contiguous() for name, tensor in packed.items()}
    save_file(packed, out / WEIGHTS, metadata={"format": "pt"})
    return out, plain
