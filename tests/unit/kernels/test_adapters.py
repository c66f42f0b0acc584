"""Low-rank adapters of products in a pass, native and in plain torch, against products with merged weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from unit.kernels.test_pass_ops import CPU, MAKERS, batch_of, native

from eagleray.kernels.adapters import AdapterTable, LowRankFactors
from eagleray.kernels.backend import HiddenStates
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.forward_batch import AdapterGroups
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.rope import Rope
from eagleray.kernels.rope_spec import DefaultRope
from eagleray.kernels.torch.backend import TorchBackend

SIZES = (40, 24, 24)
"""Outputs of the layers that are merged; no multiples of a vector."""
HIDDEN, INNER, MAX_RANK, NUM_SLOTS = 40, 44, 12, 5
RANKS = (0, 1, 4, 7, 12)
"""Rank of the adapter in each slot."""


def random(*shape: int) -> Tensor:
    return torch.randn(shape) / shape[-1] ** 0.5


def factors_of(rank: int, in_features: int, out_features: int) -> LowRankFactors:
    return LowRankFactors(random(rank, in_features), random(out_features, rank), 0.75)


@dataclass
class Layers:
    """Merged layers whose first outputs go through a gated product with a bias, all with adapters; added to the hidden
    state."""

    kernels: TorchBackend
    dtype: torch.dtype

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        dtype = self.dtype
        self.table = AdapterTable(NUM_SLOTS, MAX_RANK, dtype, CPU)
        self.weights = [random(sum(SIZES), HIDDEN), random(2 * INNER, sum(SIZES)), random(HIDDEN, INNER)]
        self.bias = random(2 * INNER)
        sizes = [SIZES, (INNER, INNER), (HIDDEN,)]
        inputs = [HIDDEN, sum(SIZES), INNER]
        self.sites = [
            self.kernels.adapter_site(self.table, k, outputs) for k, outputs in zip(inputs, sizes, strict=True)
        ]
        self.factors = [
            [[factors_of(rank, k, size) for size in outputs] for k, outputs in zip(inputs, sizes, strict=True)]
            for rank in RANKS
        ]
        merged, gated, down = (weight.to(dtype) for weight in self.weights)
        products = (
            self.kernels.linear(merged, None),
            self.kernels.gated_linear(gated, self.bias.to(dtype)),
            self.kernels.linear(down, None),
        )
        self.storage = [product.storage() for product in products]
        self.products = [self.kernels.adapt(*pair) for pair in zip(products, self.sites, strict=True)]
        rope = Rope(DefaultRope(10_000.0), 2, dtype=dtype, device=CPU)
        self._run = self.kernels.compile(
            lambda x, caches, context: self.compute(x), rope=rope, windows=frozenset(), device=CPU
        )
        self._cache = KVCache([], 1)

    def compute(self, hidden: HiddenStates) -> HiddenStates:
        x = hidden
        for product in self.products:
            x = product(x)
        return self.kernels.add(hidden, x)

    def load(self, slots: Sequence[int] = range(NUM_SLOTS)) -> None:
        for slot in slots:
            for site, of_site in zip(self.sites, self.factors[slot], strict=True):
                site.clear(slot)
                for layer, factors in enumerate(of_site):
                    site.write(slot, layer, factors)

    def __call__(self, x: Tensor, slots: Sequence[int]) -> Tensor:
        groups = AdapterGroups.of(np.array(slots, dtype=np.int32))
        self.table.groups = groups
        hidden = x.to(self.kernels.hidden_dtype(self.dtype))
        return self._run(hidden, replace(batch_of(len(x)), adapters=groups), self._cache).clone()

    def expected(self, x: Tensor, slot: int) -> Tensor:
        """The numbers of products with merged weights, in float32."""
        merged, gated, down = (
            weight
            + torch.cat([factors.scale * factors.b @ factors.a for factors in of_site] if slot >= 0 else [weight * 0])
            for weight, of_site in zip(self.weights, self.factors[slot], strict=True)
        )
        gate, up = (x @ merged.T @ gated.T + self.bias).chunk(2, dim=1)
        return x + (torch.nn.functional.silu(gate) * up) @ down.T


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)])
def test_adapters_of_a_mixed_batch_equal_merged_weights(make, dtype, tolerance):
    layers = Layers(make(dtype), dtype)
    layers.load()
    slots = [3, -1, 4, 1, -1, 2, 4, 4, 0, 4, 4, 3, *[2] * 30, -1]
    x = random(len(slots), HIDDEN)
    result = layers(x, slots).float()
    expected = torch.cat([layers.expected(x[i : i + 1], slot) for i, slot in enumerate(slots)])
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    without = layers(x, [-1] * len(slots)).float()
    assert (without - expected).abs().amax(dim=1)[torch.tensor(slots) > 0].min() > 2 * tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_native_adapters_compute_the_same_bits_in_every_batch(dtype, num_threads):
    layers = Layers(CpuBackend(native_library(), dtype, num_threads=num_threads), dtype)
    layers.load()
    alone = Layers(native(dtype), dtype)
    alone.load()
    slots = [3, -1, 4, 1, -1, 2, 4, 4, 0, 4, 4, 3, *[2] * 30, -1]
    x = random(len(slots), HIDDEN)
    together = layers(x, slots)
    for i, slot in enumerate(slots):
        assert torch.equal(together[i : i + 1], alone(x[i : i + 1], [slot])), f"token {i} in slot {slot}"


@pytest.mark.parametrize("make", MAKERS)
def test_a_slot_that_is_written_again_changes_a_recorded_pass(make):
    layers = Layers(make(torch.float32), torch.float32)
    layers.load()
    x = random(3, HIDDEN)
    layers(x, [4, 4, 4])
    layers.factors[4] = layers.factors[2]
    layers.load([4])
    torch.testing.assert_close(layers(x, [4, 4, 4]), layers.expected(x, 2), atol=2e-5, rtol=2e-5)
    for site in layers.sites:
        site.clear(4)
    assert torch.equal(layers(x, [4, 4, 4]), layers(x, [-1, -1, -1]))


@pytest.mark.parametrize("make", MAKERS)
def test_an_adapted_product_has_the_storage_of_the_product(make):
    layers = Layers(make(torch.float32), torch.float32)
    for product, storage in zip(layers.products, layers.storage, strict=True):
        assert [memory.data_ptr() for memory in product.storage()] == [memory.data_ptr() for memory in storage]


def test_adapter_groups_of_slots_name_the_tokens_of_each():
    groups = AdapterGroups.of(np.array([2, -1, 0, 2, -1, 0, 7], dtype=np.int32))
    assert groups is not None
    assert groups.slots.tolist() == [0, 2, 7]
    assert groups.offsets.tolist() == [0, 2, 4, 5]
    assert groups.tokens.tolist() == [2, 5, 0, 3, 6]
    assert AdapterGroups.of(np.array([-1, -1], dtype=np.int32)) is None
