"""Experts whose weights are kept as they are stored: their products, and their memory, which moves between ranks."""

from __future__ import annotations

import pytest
import torch
from quantized_weights import FORMATS, dequantized, random_weight
from torch import Tensor

from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.cuda.linear import CudaLinear
from eagleray.kernels.torch.functional import silu_and_mul

HIDDEN, INNER, NUM_SLOTS = 160, 32, 3


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(5)  # a gate below -88 overflows in the interpreter, which is an error there


@pytest.mark.parametrize("kind", FORMATS)
def test_pairs_of_quantized_experts_follow_moved_memory(kind):
    backend, dtype = CudaBackend(torch.float32), torch.float32
    weights = [
        (random_weight(kind, (2 * INNER, HIDDEN), dtype), random_weight(kind, (HIDDEN, INNER), dtype))
        for _ in range(NUM_SLOTS)
    ]
    numbers = [[dequantized(weight, dtype).float() for weight in pair] for pair in weights]
    biases = [torch.randn(HIDDEN) for _ in weights]

    def products(experts):
        gate_up = [backend.gated_linear(weight, torch.zeros(2 * INNER)) for weight, _ in experts]
        down = [backend.linear(weight, bias) for (_, weight), bias in zip(experts, biases, strict=False)]
        return backend.expert_products(gate_up, down)

    def expected(x: Tensor, expert: int) -> Tensor:
        gate_up, down = numbers[expert]
        return silu_and_mul(x @ gate_up.t()) @ down.t() + biases[expert]

    all_experts, other_rank = products(weights), products(weights[:1])
    x, slots = torch.randn(2, HIDDEN), torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    pairs = all_experts.pairs(x, slots)
    torch.testing.assert_close(pairs[0], torch.stack([expected(x[0], 0), expected(x[0], 2)]), atol=0.01, rtol=1e-4)
    torch.testing.assert_close(pairs[1, 0], expected(x[1], 1), atol=0.01, rtol=1e-4)
    assert (pairs[1, 1] == 0).all()

    for kept, moved in zip(all_experts.storage(2), other_rank.storage(0), strict=True):
        assert kept.dtype == torch.uint8 and kept.dim() == 1
        kept.copy_(moved)
    after = all_experts.pairs(x, slots)
    assert torch.equal(after[0, 0], pairs[0, 0]) and torch.equal(after[0, 1], pairs[0, 0])


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_cuda_linear_storage_copied_changes_product_and_stays(kind, is_gated):
    old, new = (
        CudaLinear(random_weight(kind, (2 * INNER, HIDDEN), torch.float32), torch.randn(2 * INNER), is_gated=is_gated)
        for _ in range(2)
    )
    x = torch.randn(3, HIDDEN)
    expected, addresses = new(x).clone(), [part.data_ptr() for part in old.storage()]
    assert not torch.equal(old(x), expected)
    for target, part in zip(old.storage(), new.storage(), strict=True):
        target.copy_(part)
    assert torch.equal(old(x), expected)
    assert [part.data_ptr() for part in old.storage()] == addresses


@pytest.mark.parametrize("kind", FORMATS)
def test_cuda_linear_of_a_tensor_equals_dequantized_product(kind):
    weight, x = random_weight(kind, (2 * INNER, HIDDEN), torch.float32), torch.randn(3, HIDDEN)
    product = x @ dequantized(weight, torch.float32).float().t()
    torch.testing.assert_close(CudaLinear(weight, None)(x), product, atol=0.01, rtol=1e-4)
    gated = CudaLinear(weight, None, is_gated=True)
    torch.testing.assert_close(gated(x), silu_and_mul(product), atol=0.01, rtol=1e-3)
    assert gated(x[:0]).shape == (0, INNER)
