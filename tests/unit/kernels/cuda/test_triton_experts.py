"""All kernels of a layer with experts together equal plain torch."""

from __future__ import annotations

import pytest
import torch
from quantized_weights import FORMATS, dequantized, random_weight

from eagleray.kernels.cuda.triton.grouped_linear import grouped_gated_linear, grouped_linear
from eagleray.kernels.cuda.triton.routing import DeviceSlotMap, PairTiles, align, align_workspace, route
from eagleray.kernels.cuda.triton.weighted_sum import weighted_sum
from eagleray.kernels.expert_slots import ExpertSlotMap
from eagleray.kernels.params import RouterParams
from eagleray.kernels.torch.experts import compute_experts
from eagleray.kernels.torch.functional import silu_and_mul
from eagleray.kernels.torch.linear import GatedLinear, PlainLinear
from eagleray.kernels.torch.routing import route as route_in_torch

NUM_ROWS, NUM_TOKENS, NUM_EXPERTS, NUM_SLOTS, TOP_K, HIDDEN, INNER = 9, 7, 6, 5, 2, 64, 32


@pytest.mark.parametrize("kind", FORMATS)
def test_layer_of_experts_with_copies_and_absent_experts_equals_torch(kind: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float32
    gate_up = random_weight(kind, (NUM_SLOTS, 2 * INNER, HIDDEN), dtype)
    down = random_weight(kind, (NUM_SLOTS, HIDDEN, INNER), dtype)
    x, scores = torch.randn(NUM_ROWS, HIDDEN) * 0.1, torch.randn(NUM_ROWS, NUM_EXPERTS)
    x[NUM_TOKENS:], scores[NUM_TOKENS:] = torch.nan, torch.nan
    hidden = torch.randn(NUM_ROWS, HIDDEN)
    router = RouterParams(top_k=TOP_K, renormalize=True, round_weights=False)
    # expert 0 has two slots, one of which is on another rank, as is expert 5
    table = torch.tensor([[4, -1], [0, -1], [1, -1], [2, -1], [3, -1], [-1, -1]], dtype=torch.int32)
    num_copies = torch.tensor([2, 1, 1, 1, 1, 1], dtype=torch.int32)

    experts = [
        [PlainLinear(weight.float(), None) for weight in dequantized(stacked, dtype)] for stacked in (gate_up, down)
    ]
    ids, weights = route_in_torch(scores[:NUM_TOKENS], router)
    slots = ExpertSlotMap(table.numpy(), num_copies.numpy()).find(ids)
    assert (slots < 0).any()
    gated = [GatedLinear(product, silu_and_mul) for product in experts[0]]
    expected = hidden[:NUM_TOKENS] + compute_experts(x[:NUM_TOKENS], slots, weights, gated, experts[1])

    own_slots, own_ids = (torch.full((NUM_ROWS, TOP_K), 1 << 30, dtype=torch.int32) for _ in range(2))
    own_weights = torch.full((NUM_ROWS, TOP_K), torch.nan)
    route(
        scores,
        router,
        num_tokens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        dtype=dtype,
        ids=own_ids,
        weights=own_weights,
        slot_map=DeviceSlotMap(table, num_copies),
        slots=own_slots,
    )
    num_pairs = NUM_ROWS * TOP_K
    tiles = PairTiles.empty(num_pairs, NUM_SLOTS, 16, x.device)
    align(own_slots, NUM_SLOTS, tiles, torch.empty(align_workspace(num_pairs, NUM_SLOTS), dtype=torch.int32))
    inner, outputs = (torch.full((num_pairs, size), torch.nan) for size in (INNER, HIDDEN))
    grouped_gated_linear(x, gate_up, None, None, tiles, top_k=TOP_K, out=inner)
    grouped_linear(inner, down, None, tiles, out=outputs)
    before = hidden.clone()
    weighted_sum(outputs.view(NUM_ROWS, TOP_K, HIDDEN), own_weights, own_slots, out=hidden, accumulate=True)
    torch.testing.assert_close(hidden[:NUM_TOKENS], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(hidden[NUM_TOKENS:], before[NUM_TOKENS:])
