"""Expert products for code that routes and sums up itself, against plain torch and against the experts of a pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.backend import ExpertProducts
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.kernels.torch.onednn import OneDnnBackend

NUM_SLOTS, HIDDEN, INNER = 6, 48, 20
DTYPES = (torch.float32, torch.bfloat16)


def weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights: gate and up [slots, 2 * inner, hidden], down [slots, hidden, inner]."""
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(NUM_SLOTS, 2 * INNER, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(NUM_SLOTS, HIDDEN, INNER, generator=generator) / INNER**0.5
    return gate_up.to(dtype), down.to(dtype)


def products(kernels: TorchBackend, dtype: torch.dtype) -> ExpertProducts:
    gate_up, down = weights(dtype)
    return kernels.expert_products(
        [kernels.gated_linear(weight.clone(), None) for weight in gate_up],
        [kernels.linear(weight.clone(), None) for weight in down],
    )


def native(dtype: torch.dtype, *, num_threads: int = 1) -> ExpertProducts:
    return products(CpuBackend(native_library(), dtype, num_threads=num_threads), dtype)


def random_pairs(n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, slots of which some are -1, and weights."""
    torch.manual_seed(n)
    slots = torch.randint(-1, NUM_SLOTS, (n, k), dtype=torch.int32)
    slots[slots == 4] = 3  # so slot 4 has no rows
    return torch.randn(n, HIDDEN).to(dtype), slots, torch.rand(n, k)


def exact_pairs(x: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    gate_up, down = (weight.double() for weight in weights(dtype))
    outputs = torch.zeros(*slots.shape, HIDDEN, dtype=torch.float64)
    for row, place in (slots >= 0).nonzero().tolist():
        slot = slots[row, place]
        gate, up = F.linear(x[row].double(), gate_up[slot]).chunk(2)
        outputs[row, place] = F.linear(F.silu(gate) * up, down[slot])
    return outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [TorchBackend, OneDnnBackend, None])
@pytest.mark.parametrize(("n", "k"), [(0, 3), (1, 1), (7, 3), (90, 2), (3, 0)])
def test_expert_products_pairs_and_sums_equal_plain_torch(
    make: type[TorchBackend] | None, n: int, k: int, dtype: torch.dtype
) -> None:
    experts = native(dtype) if make is None else products(make(), dtype)
    x, slots, factors = random_pairs(n, k, dtype)
    tolerance = {"rtol": 0.0, "atol": 1e-5 if dtype == torch.float32 else 0.06}
    assert experts.num_slots == NUM_SLOTS
    pairs = experts.pairs(x, slots)
    assert pairs.dtype == torch.float32
    expected = exact_pairs(x, slots, dtype)
    torch.testing.assert_close(pairs.double(), expected, **tolerance)
    assert (pairs[slots < 0] == 0).all()
    sums = experts.sums(x, slots, factors)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), (expected * factors.double()[:, :, None]).sum(dim=1), **tolerance)
    assert torch.equal(experts.weighted_sum(pairs, factors), sums)


@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_products_row_computed_alone_has_the_same_bits(dtype: torch.dtype) -> None:
    x, slots, factors = random_pairs(600, 3, dtype)  # more than one part
    experts, with_threads = native(dtype), native(dtype, num_threads=3)
    pairs, sums = experts.pairs(x, slots), experts.sums(x, slots, factors)
    assert torch.equal(with_threads.pairs(x, slots), pairs)
    assert torch.equal(with_threads.sums(x, slots, factors), sums)
    assert torch.equal(with_threads.weighted_sum(pairs, factors), sums)
    for rows in (slice(0, 1), slice(599, 600), slice(123, 141)):
        assert torch.equal(experts.pairs(x[rows], slots[rows]), pairs[rows])
        assert torch.equal(experts.sums(x[rows], slots[rows], factors[rows]), sums[rows])
        assert torch.equal(experts.weighted_sum(pairs[rows], factors[rows]), sums[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [TorchBackend, OneDnnBackend, None])
def test_expert_products_swapped_storage_and_slots_keep_outputs(
    make: type[TorchBackend] | None, dtype: torch.dtype
) -> None:
    experts = native(dtype) if make is None else products(make(), dtype)
    x, slots, _ = random_pairs(20, 3, dtype)
    before = experts.pairs(x, slots)
    sizes = [[len(part) for part in experts.storage(slot)] for slot in range(NUM_SLOTS)]
    assert all(size == sizes[0] for size in sizes)
    for one, two in zip(experts.storage(1), experts.storage(5), strict=True):
        assert one.dtype == torch.uint8
        kept = one.clone()
        one.copy_(two)
        two.copy_(kept)
    swapped = slots.clone()
    swapped[slots == 1], swapped[slots == 5] = 5, 1
    assert torch.equal(experts.pairs(x, swapped), before)
