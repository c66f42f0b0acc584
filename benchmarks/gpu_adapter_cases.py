"""Low-rank adapters of a product: both kernels, as a pass launches them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gpu_case import KernelCase, KernelRun, num_bytes
from gpu_floors import Work
from torch import Tensor

from eagleray.kernels.adapters import AdapterTable, LowRankFactors
from eagleray.kernels.cuda.adapter_tiles import AdapterTiles, max_tiles, tile_size, write_tiles
from eagleray.kernels.cuda.adapters import CudaAdapterSite
from eagleray.kernels.cuda.metadata import MetadataSizes
from eagleray.kernels.forward_batch import AdapterGroups

NUM_SLOTS = 16


def adapters(
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int,
    num_adapters: int,
    in_features: int,
    out_features: Sequence[int],
    rank: int = 16,
) -> KernelRun:
    """Tokens that have the adapters in turn, but for every fifth one, which has none unless it is the only one."""
    table = AdapterTable(NUM_SLOTS, rank, dtype, device)
    site = CudaAdapterSite(table, in_features, out_features)
    factors = [[_factors(rank, in_features, size, device, dtype) for size in out_features] for _ in range(num_adapters)]
    for slot, of_slot in enumerate(factors):
        for layer, each in enumerate(of_slot):
            site.write(slot, layer, each)
    slots = np.arange(tokens, dtype=np.int32) % num_adapters
    slots[4::5] = -1
    tiles = _tiles(slots, device)
    inner = site.inner_spec(MetadataSizes(tokens, 0, 0, 0, 0, (), NUM_SLOTS))
    inner_memory = torch.empty(inner.shape, dtype=inner.dtype, device=device)
    x = torch.randn(tokens, in_features, device=device).to(dtype)
    y = torch.randn(tokens, sum(out_features), device=device).to(dtype)

    def expected() -> list[Tensor]:
        total = y.float()
        for slot, of_slot in enumerate(factors):
            own = torch.from_numpy(np.flatnonzero(slots == slot)).to(device)
            added = [x[own].float() @ each.a.float().T @ each.b.float().T * each.scale for each in of_slot]
            total[own] += torch.cat(added, dim=1)
        return [total]

    num_own = int((slots >= 0).sum())
    num_read = num_adapters * rank * (in_features * len(out_features) + sum(out_features)) * dtype.itemsize
    operations = 2 * num_own * rank * (in_features * len(out_features) + sum(out_features))
    return KernelRun(
        launch=lambda: site.add_to(y, x, tiles, inner_memory),
        results=lambda: [y],
        expected=expected,
        work=Work(num_read + num_bytes(x[:num_own], y[:num_own], y[:num_own]), operations),
        is_poisoned=False,
    )


def _factors(rank: int, in_features: int, size: int, device: torch.device, dtype: torch.dtype) -> LowRankFactors:
    a = torch.randn(rank, in_features, device=device) / in_features**0.5
    return LowRankFactors(a.to(dtype), (torch.randn(size, rank, device=device) / rank**0.5).to(dtype), 2.0)


def _tiles(slots: np.ndarray, device: torch.device) -> AdapterTiles:
    size, most = tile_size(len(slots)), max_tiles(len(slots), NUM_SLOTS)
    of_tiles, tokens = np.zeros(most, np.int32), np.zeros((most, size), np.int32)
    groups = AdapterGroups.of(slots)
    assert groups is not None
    num_tiles = np.array([write_tiles(groups, of_tiles, tokens)], np.int32)
    return AdapterTiles(*(torch.from_numpy(array).to(device) for array in (num_tiles, of_tiles, tokens)))


QKV = {"in_features": 4096, "out_features": (4096, 1024, 1024)}
GATE_UP = {"in_features": 4096, "out_features": (12288, 12288)}
DOWN = {"in_features": 12288, "out_features": (4096,)}
SMALL = {"in_features": 40, "out_features": (40, 24, 24), "tokens": 6, "num_adapters": 2}

CASES = [
    KernelCase("adapters", f"8B {name}, {tokens} tokens of {count}, rank {rank}", adapters, sizes, SMALL)
    for name, tokens, count, rank, product in (
        ("qkv", 1, 1, 16, QKV),
        ("qkv", 32, 8, 16, QKV),
        ("qkv", 256, 8, 16, QKV),
        ("qkv", 8192, 1, 16, QKV),
        ("gate and up", 32, 8, 16, GATE_UP),
        ("gate and up", 8192, 1, 16, GATE_UP),
        ("down", 1, 1, 16, DOWN),
        ("down", 32, 8, 64, DOWN),
    )
    for sizes in [{"tokens": tokens, "num_adapters": count, "rank": rank, **product}]
]
