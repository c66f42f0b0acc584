"""Adapters by Triton's kernels equal plain torch, in tiles of tokens of several adapters, and compile for every GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from triton_compile import MAX_SHARED_BYTES, compile_kernel

from eagleray.kernels.adapters import AdapterTable, LowRankFactors
from eagleray.kernels.cuda import adapter_tiles
from eagleray.kernels.cuda.adapter_tiles import AdapterTiles, max_tiles, tile_size, write_tiles
from eagleray.kernels.cuda.adapters import CudaAdapterSite
from eagleray.kernels.cuda.metadata import MetadataSizes
from eagleray.kernels.cuda.triton import adapters as module
from eagleray.kernels.cuda.triton.adapters import AdapterKernelConfig
from eagleray.kernels.forward_batch import AdapterGroups
from eagleray.kernels.torch.adapters import TorchAdapterSite

CPU = torch.device("cpu")
MIXED = [3, -1, 4, 1, -1, 2, 4, 4, 0, 4, 4, 3, *[2] * 18, -1]
"""Slots of tokens, of which some need a second tile; slot 0 has an adapter of rank 0, and the last slot has none."""
RANKS = (0, 1, 9, 7, 20)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def strided(x: Tensor) -> Tensor:
    """Return the same numbers between rows and columns of NaN."""
    memory = torch.full((len(x) + 2, x.shape[1] + 16), torch.nan, dtype=x.dtype)
    memory[1:-1, : x.shape[1]] = x
    return memory[1:-1, : x.shape[1]]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)


def tiles_of(slots: list[int], num_slots: int) -> AdapterTiles:
    """Return the tiles of a batch, with random numbers behind those that are written."""
    size, most = tile_size(len(slots)), max_tiles(len(slots), num_slots)
    of_tiles, tokens = np.full(most, 10**6, np.int32), np.full((most, size), 10**6, np.int32)
    groups = AdapterGroups.of(np.array(slots, np.int32))
    num_tiles = 0 if groups is None else write_tiles(groups, of_tiles, tokens)
    return AdapterTiles(*map(torch.from_numpy, (np.array([num_tiles], np.int32), of_tiles, tokens)))


class Sites:
    """The same adapters in the layouts of Triton's kernels and of plain torch."""

    def __init__(self, in_features: int, out_features: tuple[int, ...], dtype: torch.dtype, max_rank: int = 20) -> None:
        torch.manual_seed(0)
        self.table = AdapterTable(len(RANKS) + 1, max_rank, dtype, CPU)
        self.found = CudaAdapterSite(self.table, in_features, out_features)
        self.expected = TorchAdapterSite(self.table, in_features, out_features)
        for memory in self.found.storage():  # numbers that no adapter wrote are never read
            memory.view(dtype).fill_(torch.nan)
        for slot, rank in enumerate(RANKS):
            for layer, size in enumerate(out_features):
                own = rank if layer != 1 or slot != 3 else 0  # an adapter that has not all layers
                self.write(slot, layer, LowRankFactors(torch.randn(own, in_features) / 8, torch.randn(size, own), 0.75))

    def write(self, slot: int, layer: int, factors: LowRankFactors) -> None:
        for site in (self.found, self.expected):
            site.write(slot, layer, factors)

    def add(self, y: Tensor, x: Tensor, slots: list[int]) -> Tensor:
        """Return what Triton's kernels make of `y`, in memory between NaN, and check that."""
        out, sizes = strided(y), MetadataSizes(len(x), 0, 0, 0, 0, (), self.table.num_slots)
        spec = self.found.inner_spec(sizes)
        self.found.add_to(out, strided(x), tiles_of(slots, self.table.num_slots), torch.full(spec.shape, torch.nan))
        assert out._base is not None
        assert out._base[[0, -1]].isnan().all() and out._base[:, y.shape[1] :].isnan().all()
        return out

    def add_in_torch(self, y: Tensor, x: Tensor, slots: list[int]) -> Tensor:
        self.table.groups = AdapterGroups.of(np.array(slots, np.int32))
        total = y.clone()
        self.expected.add_to(total, x)
        return total


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sums split after few features."""
    monkeypatch.setattr(module, "SPLIT_FEATURES", 128)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("in_features", "out_features"), [(40, (40, 24, 24)), (200, (72, 72)), (136, (100,))])
@pytest.mark.usefixtures("small_splits")
def test_adapters_of_a_mixed_batch_equal_torch(
    dtype: torch.dtype, in_features: int, out_features: tuple[int, ...]
) -> None:
    sites = Sites(in_features, out_features, dtype)
    x, y = random(len(MIXED), in_features, dtype=dtype), random(len(MIXED), sum(out_features), dtype=dtype)
    found, expected = sites.add(y, x, MIXED), sites.add_in_torch(y, x, MIXED)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    untouched = torch.tensor(MIXED) <= 0
    assert torch.equal(found[untouched], y[untouched])
    assert ((found != y).any(dim=1) == ~untouched).all()


def test_adapters_in_large_tiles_have_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Sites(40, (40, 24, 24), torch.float32)
    x, y = random(len(MIXED), 40, dtype=torch.float32), random(len(MIXED), 88, dtype=torch.float32)
    small = sites.add(y, x, MIXED)
    monkeypatch.setattr(adapter_tiles, "FEW_TOKENS", 4)
    torch.testing.assert_close(sites.add(y, x, MIXED), small, atol=1e-6, rtol=1e-6)


def test_adapters_of_several_blocks_of_ranks_equal_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Sites(24, (40,), torch.float32, max_rank=75)
    assert AdapterKernelConfig(75, is_float32=True).ranks < 64
    factors = LowRankFactors(torch.randn(70, 24) / 8, torch.randn(40, 70), 0.5)
    sites.write(5, 0, factors)
    x, y = random(3, 24, dtype=torch.float32), random(3, 40, dtype=torch.float32)
    slots = [5, 1, 5]
    torch.testing.assert_close(sites.add(y, x, slots), sites.add_in_torch(y, x, slots), atol=2e-5, rtol=2e-5)


def test_adapters_of_a_cleared_slot_add_nothing() -> None:
    sites = Sites(24, (40,), torch.float32)
    x, y = random(2, 24, dtype=torch.float32), random(2, 40, dtype=torch.float32)
    sites.found.clear(4)
    assert torch.equal(sites.add(y, x, [4, -1]), y)
    assert torch.equal(sites.add(y, x, [-1, -1]), y)


@pytest.mark.parametrize("seed", range(5))
def test_write_tiles_has_every_token_of_a_group_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_tiles, "FEW_TOKENS", 40)
    random = np.random.default_rng(seed)
    slots = random.integers(-1, 6, random.integers(1, 100)).astype(np.int32)
    tiles = tiles_of(slots.tolist(), 6)
    num_tiles, seen = int(tiles.num_tiles), []
    for slot, tokens in zip(tiles.slots[:num_tiles].tolist(), tiles.tokens[:num_tiles].tolist(), strict=True):
        own = [token for token in tokens if token >= 0]
        assert own and tokens == own + [-1] * (len(tokens) - len(own))
        assert all(slots[token] == slot for token in own)
        seen += own
    assert sorted(seen) == np.flatnonzero(slots >= 0).tolist()


@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, 16), (5, 16), (40, 3), (512, 16), (600, 16), (600, 1)])
def test_max_tiles_has_room_for_the_worst_batch(num_tokens: int, num_slots: int) -> None:
    """One token of each adapter but one, and the rest of that."""
    others = min(num_slots, num_tokens) - 1
    slots = [*range(others), *[others] * (num_tokens - others)]
    groups = AdapterGroups.of(np.array(slots, np.int32))
    assert groups is not None
    most = max_tiles(num_tokens, num_slots)
    tokens = np.empty((most, tile_size(num_tokens)), np.int32)
    assert write_tiles(groups, np.empty(most, np.int32), tokens) <= most


# ---- compilation


@pytest.mark.parametrize(
    ("capability", "dtype", "max_rank", "tile"),
    [
        (90, "bf16", 256, 64),
        *(
            pytest.param(*case, marks=pytest.mark.grid)
            for case in (
                *((capability, "bf16", 16, 16) for capability in (80, 90, 100)),
                (90, "bf16", 16, 64),
                (90, "fp32", 64, 64),
            )
        ),
    ],
)
def test_adapter_kernels_compile(capability: int, dtype: str, max_rank: int, tile: int, tmp_path: Path) -> None:
    config, disassembles = AdapterKernelConfig(max_rank, dtype == "fp32"), (capability, tile) == (90, 16)
    tiles = {"num_tiles": "*i32", "tile_slots": "*i32", "tile_tokens": "*i32"}
    sizes = {"LAYERS": 3, "MAX_RANK": max_rank, "RANKS": config.ranks, "TOKENS": tile}
    reduce = compile_kernel(
        module._shrink,
        {"x": f"*{dtype}", "a": f"*{dtype}", "ranks": "*i32", **tiles, "out": "*fp32"},
        {**sizes, "X_STRIDE": 4096, "K": 4096, "FEATURES": config.features, "SPLIT": config.split_features(4096)},
        capability=capability,
        num_warps=module.shrink_warps(config, tile),
        num_stages=module.SHRINK_STAGES,
        disassemble=disassembles,
        directory=tmp_path,
    )
    outputs = {"OUT_STRIDE": 6144, "SIZE_0": 4096, "SIZE_1": 1024, "SIZE_2": 1024, "OUTPUTS": config.outputs(tile)}
    add = compile_kernel(
        module._expand,
        {"inner": "*fp32", "b": f"*{dtype}", "ranks": "*i32", "scales": "*fp32", **tiles, "out": f"*{dtype}"},
        {**sizes, **outputs, "SPLITS": config.num_splits(4096), "RANK_STRIDE": max_rank},
        capability=capability,
        num_warps=module.expand_warps(tile),
        num_stages=module.EXPAND_STAGES,
        disassemble=disassembles,
        directory=tmp_path,
    )
    for compiled in (reduce, add):
        assert compiled.shared_bytes <= MAX_SHARED_BYTES
        assert capability != 90 or not compiled.spills
        if disassembles:
            assert compiled.instructions & {"HMMA", "HGMMA"}
    if disassembles:
        assert "LDGSTS" in reduce.instructions
