"""The choice of experts, their products in every format, and products with quantized weights."""

from __future__ import annotations

import torch
from gpu_case import EXACT, KernelCase, KernelRun, num_bytes
from gpu_floors import Work
from torch import Tensor

from eagleray.kernels.cuda.triton.grouped_linear import grouped_gated_linear, grouped_linear, pair_tile
from eagleray.kernels.cuda.triton.linear import quantized_gated_linear, quantized_linear
from eagleray.kernels.cuda.triton.routing import PairTiles, align, align_workspace, route
from eagleray.kernels.cuda.triton.tile_product import pad_scales
from eagleray.kernels.params import ClampedSwiglu, RouterParams
from eagleray.kernels.quantized import Fp8Weight, Mxfp4Weight, Weight
from eagleray.kernels.torch.functional import clamped_swiglu, silu_and_mul
from eagleray.kernels.torch.routing import route as torch_route

CLAMP = ClampedSwiglu(alpha=1.702, limit=7.0)
QUANTIZED_TOLERANCE = 2e-2
"""Relative error of sums of bfloat16 products whose inputs were rounded before."""


def choose(device: torch.device, dtype: torch.dtype, *, tokens: int, experts: int, top_k: int) -> KernelRun:
    router = RouterParams(top_k=top_k, renormalize=True, round_weights=False)
    scores = torch.randn(tokens, experts, device=device)
    ids = torch.empty(tokens, top_k, device=device, dtype=torch.int32)
    weights = torch.empty(tokens, top_k, device=device)
    counts = torch.zeros(experts, device=device, dtype=torch.int64)
    num_tokens = torch.tensor([tokens], dtype=torch.int32, device=device)

    def expected() -> list[Tensor]:
        expected_ids, expected_weights = torch_route(scores, router)
        return [expected_ids, expected_weights]

    return KernelRun(
        launch=lambda: route(
            scores, router, num_tokens=num_tokens, dtype=dtype, ids=ids, weights=weights, counts=counts
        ),
        results=lambda: [ids, weights],
        expected=expected,
        work=Work(num_bytes(scores, ids, weights)),
        tolerance=1e-5,
    )


def sort_pairs(device: torch.device, dtype: torch.dtype, *, tokens: int, experts: int, top_k: int) -> KernelRun:
    """Prepare the sort of pairs by slot. The result is the slot of each pair, by the tiles that name the pair."""
    slots = _random_slots(device, tokens, experts, top_k)
    tiles = PairTiles.empty(slots.numel(), experts, pair_tile(slots.numel(), experts), device)
    workspace = _workspace(slots, experts)

    def found() -> list[Tensor]:
        used = int(tiles.num_tiles)
        pairs = tiles.sorted_pairs[: used * tiles.tile]
        slot_of_pair = torch.full((slots.numel(),), -1, device=device)
        slot_of_pair[pairs[pairs >= 0].long()] = tiles.tile_slot[:used].repeat_interleave(tiles.tile)[pairs >= 0].long()
        return [slot_of_pair.view(slots.shape)]

    return KernelRun(
        launch=lambda: align(slots, experts, tiles, workspace),
        results=found,
        expected=lambda: [slots],
        work=Work(2 * slots.nbytes),
        tolerance=EXACT,
        is_poisoned=False,
    )


def expert_products(
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    is_gated: bool,
    kind: str = "plain",
) -> KernelRun:
    """Prepare the first product of the experts with its gate, or their second one."""
    slots = _random_slots(device, tokens, experts, top_k)
    num_pairs = slots.numel()
    tiles = PairTiles.empty(num_pairs, experts, pair_tile(num_pairs, experts), device)
    align(slots, experts, tiles, _workspace(slots, experts))
    clamp = CLAMP if kind == "mxfp4" else None
    rows, columns = (2 * inner, hidden) if is_gated else (hidden, inner)
    weight = _random_weight(kind, (experts, rows, columns), device, dtype)
    bias = torch.randn(experts, rows, device=device).to(dtype) if clamp else None
    x = torch.randn(tokens if is_gated else num_pairs, columns, device=device).to(dtype)
    out = torch.empty(num_pairs, inner if is_gated else hidden, device=device, dtype=dtype)

    def launch() -> None:
        if is_gated:
            grouped_gated_linear(x, weight, bias, clamp, tiles, top_k=top_k, out=out)
        else:
            grouped_linear(x, weight, bias, tiles, out=out)

    def expected() -> list[Tensor]:
        result = torch.empty(out.shape, device=device)
        for slot in slots.unique().tolist():
            pairs = (slots.flatten() == slot).nonzero()[:, 0]
            inputs = x[pairs // top_k if is_gated else pairs].float()
            product = inputs @ _slot(weight, slot).float().T
            product = product if bias is None else product + bias[slot].float()
            result[pairs] = _gated(product, clamp) if is_gated else product
        return [result]

    used = int(slots.unique().numel())
    read = used * _weight_bytes(weight) / experts
    return KernelRun(
        launch=launch,
        results=lambda: [out],
        expected=expected,
        work=Work(read + num_bytes(x, out), 2.0 * num_pairs * rows * columns),
        tolerance=QUANTIZED_TOLERANCE,
    )


def small_product(
    device: torch.device, dtype: torch.dtype, *, tokens: int, rows: int, columns: int, kind: str, is_gated: bool = False
) -> KernelRun:
    weight = _random_weight(kind, (rows, columns), device, dtype)
    x = torch.randn(tokens, columns, device=device).to(dtype)
    out = torch.empty(tokens, rows // 2 if is_gated else rows, device=device, dtype=dtype)
    multiply = quantized_gated_linear if is_gated else quantized_linear

    def expected() -> list[Tensor]:
        product = x.float() @ _dequantized(weight).float().T
        return [silu_and_mul(product) if is_gated else product]

    return KernelRun(
        launch=lambda: multiply(x, weight, out=out),
        results=lambda: [out],
        expected=expected,
        work=Work(_weight_bytes(weight) + num_bytes(x, out), 2.0 * tokens * rows * columns),
        tolerance=QUANTIZED_TOLERANCE,
    )


def _random_slots(device: torch.device, tokens: int, experts: int, top_k: int) -> Tensor:
    """Return different experts for each token, int32 [tokens, top_k]."""
    return torch.rand(tokens, experts, device=device).topk(top_k).indices.int().contiguous()


def _workspace(slots: Tensor, experts: int) -> Tensor:
    return torch.empty(align_workspace(slots.numel(), experts), dtype=torch.int32, device=slots.device)


def _gated(product: Tensor, clamp: ClampedSwiglu | None) -> Tensor:
    return silu_and_mul(product) if clamp is None else clamped_swiglu(product, clamp)


def _random_weight(kind: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Weight:
    """Return a weight such that products of unit inputs have about unit size."""
    *leading, rows, columns = shape
    if kind == "plain":
        # one expert at a time, since float32 of all would be large
        weight = torch.empty(shape, device=device, dtype=dtype)
        for part in weight.flatten(0, -3) if leading else [weight]:
            part.copy_(torch.randn(rows, columns, device=device) * columns**-0.5)
        return weight
    if kind == "mxfp4":
        blocks = torch.randint(256, (*leading, rows, columns // 32, 16), device=device, dtype=torch.uint8)
        scales = torch.randint(118, 122, (*leading, rows, columns // 32), device=device, dtype=torch.uint8)
        return Mxfp4Weight(blocks, pad_scales(scales))
    bits = torch.randint(0x7F, shape, device=device, dtype=torch.uint8)  # all positive numbers but NaN
    bits |= torch.randint(2, shape, device=device, dtype=torch.uint8) << 7
    scales = torch.rand(*leading, -(-rows // 128), -(-columns // 128), device=device) * columns**-0.5 / 100
    return Fp8Weight(bits.view(torch.float8_e4m3fn), scales, (128, 128))


def _slot(weight: Weight, slot: int) -> Tensor:
    if isinstance(weight, Tensor):
        return weight[slot]
    if isinstance(weight, Fp8Weight):
        values = weight.values.view(torch.uint8)[slot].view(torch.float8_e4m3fn)
        return _dequantized(Fp8Weight(values, weight.scales[slot], weight.block))
    return _dequantized(Mxfp4Weight(weight.blocks[slot], weight.scales[slot]))


def _dequantized(weight: Weight) -> Tensor:
    """Return the weights as float32, as accurately as the stored numbers are."""
    return weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)


def _weight_bytes(weight: Weight) -> int:
    if isinstance(weight, Tensor):
        return weight.nbytes
    if isinstance(weight, Fp8Weight):
        return num_bytes(weight.values, weight.scales)
    return num_bytes(weight.blocks, weight.scales)


QWEN3_MOE = {"experts": 128, "top_k": 8, "hidden": 2048, "inner": 768}
GPT_OSS = {"experts": 32, "top_k": 4, "hidden": 2880, "inner": 2880, "kind": "mxfp4"}
SMALL_MOE = {"tokens": 5, "experts": 4, "top_k": 2, "hidden": 64, "inner": 32}
SMALL_PRODUCT = {"tokens": 3, "rows": 64, "columns": 64}

CASES = [
    *(
        KernelCase(
            "route",
            f"{tokens} tokens, {top_k} of {experts}",
            choose,
            {"tokens": tokens, "experts": experts, "top_k": top_k},
            {"tokens": 3, "experts": 8, "top_k": 2},
        )
        for tokens, experts, top_k in [(1, 128, 8), (32, 128, 8), (8192, 128, 8), (32, 32, 4)]
    ),
    *(
        KernelCase(
            "align",
            f"{tokens * 8} pairs, 128 slots",
            sort_pairs,
            {"tokens": tokens, "experts": 128, "top_k": 8},
            {"tokens": 5, "experts": 4, "top_k": 2},
        )
        for tokens in (1, 32, 256, 8192)
    ),
    *(
        KernelCase(
            "grouped_gated_linear" if is_gated else "grouped_linear",
            f"{tokens} tokens, {name}",
            expert_products,
            shape | {"tokens": tokens, "is_gated": is_gated},
            SMALL_MOE,
        )
        for is_gated in (True, False)
        for tokens, name, shape in [
            (1, "8 of 128 x 2048 x 768", QWEN3_MOE),
            (32, "8 of 128 x 2048 x 768", QWEN3_MOE),
            (256, "8 of 128 x 2048 x 768", QWEN3_MOE),
            (8192, "8 of 128 x 2048 x 768", QWEN3_MOE),
            (32, "8 of 128 x 2048 x 768, FP8", QWEN3_MOE | {"kind": "fp8"}),
            (1, "4 of 32 x 2880 x 2880, MXFP4", GPT_OSS),
            (32, "4 of 32 x 2880 x 2880, MXFP4", GPT_OSS),
            (2048, "4 of 32 x 2880 x 2880, MXFP4", GPT_OSS),
        ]
    ),
    *(
        KernelCase(
            "quantized_gated_linear" if is_gated else "quantized_linear",
            f"{tokens} x {columns} x {rows}, FP8",
            small_product,
            {"tokens": tokens, "rows": rows, "columns": columns, "kind": "fp8", "is_gated": is_gated},
            SMALL_PRODUCT,
        )
        for tokens, rows, columns, is_gated in [
            (1, 6144, 4096, False),
            (1, 24_576, 4096, True),
            (1, 4096, 12_288, False),
            (32, 24_576, 4096, True),
            (256, 24_576, 4096, True),
        ]
    ),
]
