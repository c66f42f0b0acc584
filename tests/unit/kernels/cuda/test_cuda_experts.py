"""Expert products of NVIDIA GPUs for code that routes and sums up itself, and the memory of their weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.cuda.experts import CudaExperts
from eagleray.kernels.params import ClampedSwiglu
from eagleray.kernels.torch.backend import TorchBackend

NUM_SLOTS, HIDDEN, INNER = 5, 24, 20


class Made:
    """Products of both backends with the same weights."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, bias: bool = False, clamp: ClampedSwiglu | None = None):
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

        gate_up = [(random(2 * INNER, HIDDEN), random(2 * INNER) if bias else None) for _ in range(NUM_SLOTS)]
        down = [(random(HIDDEN, INNER), random(HIDDEN) if bias else None) for _ in range(NUM_SLOTS)]
        self.cuda, plain = CudaBackend(dtype), TorchBackend()
        self.gate_up = [self.cuda.gated_linear(weight.clone(), offset, clamp) for weight, offset in gate_up]
        self.down = [self.cuda.linear(weight.clone(), offset) for weight, offset in down]
        self.found = self.cuda.expert_products(self.gate_up, self.down)
        self.expected = plain.expert_products(
            [plain.gated_linear(weight, offset, clamp) for weight, offset in gate_up],
            [plain.linear(weight, offset) for weight, offset in down],
        )


def random_pairs(n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(n)
    slots = torch.randint(-1, NUM_SLOTS, (n, k), dtype=torch.int32)
    return torch.randn(n, HIDDEN).to(dtype), slots, torch.rand(n, k)


@pytest.mark.parametrize("n", [0, 1, 9])
@pytest.mark.parametrize("options", [{}, {"bias": True, "clamp": ClampedSwiglu(1.7, 0.5)}])
def test_expert_products_pairs_and_sums_equal_plain_torch(n: int, options) -> None:
    made, (x, slots, weights) = Made(**options), random_pairs(n, 3)
    torch.testing.assert_close(made.found.pairs(x, slots), made.expected.pairs(x, slots), atol=1e-5, rtol=1e-5)
    found, expected = (products.sums(x, slots, weights) for products in (made.found, made.expected))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_expert_products_in_float16_return_float32() -> None:
    made, (x, slots, weights) = Made(dtype=torch.float16), random_pairs(6, 2, torch.float16)
    found, expected = (products.sums(x, slots, weights) for products in (made.found, made.expected))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)


def test_expert_products_swapped_storage_and_slots_keep_outputs() -> None:
    made, (x, slots, weights) = Made(bias=True), random_pairs(7, 2)
    before = made.found.sums(x, slots, weights)
    for one, other in zip(made.found.storage(1), made.found.storage(4), strict=True):
        assert one.dtype == torch.uint8 and one.dim() == 1
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
    swapped = torch.where(slots == 1, 4, torch.where(slots == 4, 1, slots))
    assert torch.equal(made.found.sums(x, swapped, weights), before)
    assert not torch.equal(made.found.sums(x, slots, weights), before)


def test_expert_products_made_twice_share_their_weights() -> None:
    made = Made()
    again = made.cuda.expert_products(made.gate_up, made.down)
    assert isinstance(again, CudaExperts)
    for slot in range(NUM_SLOTS):
        pairs = zip(made.found.storage(slot), again.storage(slot), strict=True)
        assert all(one.data_ptr() == other.data_ptr() for one, other in pairs)
        assert made.down[slot].weight.weight.data_ptr() == made.found.storage(slot)[1].data_ptr()  # type: ignore[attr-defined]
