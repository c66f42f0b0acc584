"""Small checkpoints with quantized weights."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import edit_config, make_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
PROJECTIONS = ("gate_up_proj", "down_proj")
PLAIN = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")


def of_blocks(weight: Tensor, block: tuple[int, int]) -> list[tuple[slice, slice]]:
    rows, columns = (range(0, size, step) for size, step in zip(weight.shape, block, strict=True))
    return [(slice(i, i + block[0]), slice(j, j + block[1])) for i in rows for j in columns]


def quantize_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight in FP8, its scales, and the dequantized weight."""
    scales = torch.empty([-(-size // step) for size, step in zip(weight.shape, block, strict=True)])
    small, large = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for number, place in enumerate(of_blocks(weight, block)):
        scale = weight[place].abs().max() / 448
        scales.view(-1)[number] = scale
        small[place] = (weight[place] / scale).to(torch.float8_e4m3fn)
        large[place] = small[place].float() * scale
    return small, scales, large


def write_fp8_checkpoint(
    directory: Path, family: str, out: Path, block: tuple[int, int], **fields: int
) -> tuple[Path, Path]:
    """Write a checkpoint in FP8 and its dequantized twin."""
    plain = make_checkpoint(directory, family, tokenizer=False, **fields)
    tensors = load_file(plain / WEIGHTS)
    small = dict(tensors)
    for name, weight in tensors.items():
        if weight.dim() == 2 and not name.endswith(PLAIN):
            small[name], small[f"{name}_scale_inv"], tensors[name] = quantize_blocks(weight, block)
    save_file(tensors, plain / WEIGHTS, metadata={"format": "pt"})
    out.mkdir()
    (out / "config.json").write_text((plain / "config.json").read_text())
    edit_config(out, quantization_config={"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"})
    save_file(small, out / WEIGHTS, metadata={"format": "pt"})
    return out, plain


def pack_mxfp4(directory: Path) -> None:
    """Replace the experts of a checkpoint by four-bit weights of random bits."""
    tensors = load_file(directory / WEIGHTS)
    generator = torch.Generator().manual_seed(0)
    for key in [key for key in tensors if key.endswith(PROJECTIONS)]:
        num_experts, num_in, num_out = tensors.pop(key).shape
        shape = num_experts, num_out, num_in // 32
        tensors[f"{key}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(121, 127, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    edit_config(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
