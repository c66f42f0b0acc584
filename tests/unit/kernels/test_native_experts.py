"""Mixtures of experts equal float64 and plain torch, and each token has the same bits alone and in a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.experts import c_router_params, c_slot_map
from eagleray.kernels.expert_slots import ExpertSlotMap
from eagleray.kernels.params import ClampedSwiglu, RouterParams
from eagleray.kernels.torch.functional import clamped_swiglu

DTYPES = (torch.float32, torch.bfloat16)  # a dtype's number is its index


# ---- groups


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (300, 128, 8), (7, 50, 3), (40, 3, 3)])
def test_group_pairs_sorts_pairs_by_slot(library: ctypes.CDLL, num_tokens: int, num_experts: int, top_k: int) -> None:
    torch.manual_seed(num_tokens)
    ids = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :top_k].int().contiguous()
    ids[ids == 1] = 0  # expert 1 has no tokens, and tokens may have expert 0 twice
    ids[num_tokens // 2 :: 3, 0] = -1  # pairs of other ranks
    offsets = torch.full((num_experts + 1,), -1, dtype=torch.int32)
    tokens, places = (torch.full((num_tokens * top_k,), -1, dtype=torch.int32) for _ in range(2))
    pointers = (x.data_ptr() for x in (offsets, tokens, places))
    library.er_group_pairs(ids.data_ptr(), num_tokens, top_k, num_experts, *pointers)
    pairs = ids.flatten()
    order = pairs.argsort(stable=True)[(pairs < 0).sum() :]
    found = places.flatten()
    assert torch.equal(tokens[: len(order)].long(), order // top_k)
    assert torch.equal(found[order].long(), torch.arange(len(order)))
    assert (found[pairs < 0] == -1).all()
    assert offsets.tolist() == [0, *pairs[pairs >= 0].bincount(minlength=num_experts).cumsum(0).tolist()]


def test_group_pairs_positions_may_overwrite_slots(library: ctypes.CDLL) -> None:
    slots = torch.tensor([[2, -1], [0, 2], [-1, -1]], dtype=torch.int32)
    offsets, tokens = torch.empty(4, dtype=torch.int32), torch.full((6,), -1, dtype=torch.int32)
    library.er_group_pairs(slots.data_ptr(), 3, 2, 3, offsets.data_ptr(), tokens.data_ptr(), slots.data_ptr())
    assert slots.tolist() == [[1, -1], [0, 2], [-1, -1]]
    assert tokens[:3].tolist() == [1, 0, 1]
    assert offsets.tolist() == [0, 1, 1, 3]


# ---- sums


def combine(library: ctypes.CDLL, outputs: Tensor, places: Tensor, weights: Tensor, hidden: Tensor, n: int) -> Tensor:
    result = hidden.clone()
    pointers = (x.data_ptr() for x in (outputs, places, weights))
    sizes = len(places), places.shape[1], outputs.shape[1]
    library.er_combine(*pointers, *sizes, result.data_ptr(), hidden.shape[1], n)
    return result


@pytest.mark.parametrize("size", [1, 37, 256, 700])
def test_combine_sums_outputs_in_order(library: ctypes.CDLL, size: int) -> None:
    torch.manual_seed(size)
    outputs, weights, hidden = torch.randn(40, size), torch.randn(5, 8), torch.randn(5, size + 2)
    places = torch.randperm(40).int().view(5, 8)
    result = combine(library, outputs, places, weights, hidden, 1)
    expected = hidden.double()
    expected[:, :size] += (outputs[places.long()].double() * weights[:, :, None].double()).sum(dim=1)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(result[:, size:], hidden[:, size:])
    for threads in (2, 3):
        assert torch.equal(combine(library, outputs, places, weights, hidden, threads), result)
    for token in range(5):
        row = slice(token, token + 1)
        alone = combine(library, outputs, places[row], weights[row], hidden[row].contiguous(), 2)
        assert torch.equal(alone[0], result[token])
    places[1, 3:], places[2] = -1, -1
    fewer = combine(library, outputs, places, weights, hidden, 2)
    assert torch.equal(fewer[2], hidden[2])
    expected = hidden[1, :size].double() + weights[1, :3].double() @ outputs[places[1, :3].long()].double()
    torch.testing.assert_close(fewer[1, :size].double(), expected, rtol=1e-5, atol=1e-5)


# ---- all together


CLAMP = ClampedSwiglu(alpha=1.7, limit=0.9)


@dataclass(frozen=True)
class Layer:
    """Experts, plain and packed. Experts with biases have clamped gates."""

    library: ctypes.CDLL
    gate: Tensor  # [num_experts, inner, hidden_size]
    up: Tensor
    down: Tensor  # [num_experts, hidden_size, inner]
    top_k: int
    renormalize: bool
    round_weights: bool
    packed: tuple[list[Tensor], list[Tensor]]
    gate_up_bias: Tensor | None = None  # [num_experts, 2 * inner]
    down_bias: Tensor | None = None  # [num_experts, hidden_size]

    def compute(
        self,
        x: Tensor,
        scores: Tensor,
        hidden: Tensor,
        *,
        threads: int = 1,
        max_tokens: int = 1000,
        slots: ExpertSlotMap | None = None,
        experts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `hidden` plus the experts' outputs for x, the ids, and the number of tokens of each expert. `experts`
        has the expert in each slot."""
        n, size = x.shape
        num_experts, inner, _ = self.gate.shape
        dtype = DTYPES.index(x.dtype)
        x, result = F.pad(x, (0, size % 2)), hidden.clone()
        ids, counts = torch.empty(n, self.top_k, dtype=torch.int32), torch.zeros(num_experts, dtype=torch.int64)
        params = RouterParams(top_k=self.top_k, renormalize=self.renormalize, round_weights=self.round_weights)
        held = range(num_experts) if experts is None else experts
        gate_up, down = ((c_void_p * len(held))(*[part[e].data_ptr() for e in held]) for part in self.packed)
        packed = abi.CExperts(len(held), size, inner, ctypes.addressof(gate_up), ctypes.addressof(down))
        packed.epilogue = abi.EPILOGUE_SILU
        if self.gate_up_bias is not None and self.down_bias is not None:
            parts = self.gate_up_bias, self.down_bias
            offsets = [(c_void_p * len(held))(*[part[e].data_ptr() for e in held]) for part in parts]
            packed.gate_up_bias, packed.down_bias = map(ctypes.addressof, offsets)
            packed.epilogue, packed.swiglu = abi.EPILOGUE_CLAMPED_SWIGLU, abi.CClampedSwiglu(CLAMP.alpha, CLAMP.limit)
        memory = self.library.er_experts_scratch_size(packed, self.top_k, max_tokens, dtype)
        scratch = torch.empty(memory, dtype=torch.uint8)
        scratch.fill_(0xFF)  # NaN, however it is read
        told = torch.full((n, 3, self.top_k), 7, dtype=torch.uint8 if num_experts <= 256 else torch.uint16)
        trace = abi.CExpertTrace(told[:, 1].data_ptr(), told.stride(0), int(num_experts > 256))
        routed = abi.CRoutedTokens(scores.data_ptr(), num_experts, result.data_ptr(), size, ids.data_ptr(), trace)
        self.library.er_compute_experts(
            *(c_router_params(params, num_experts), packed, c_slot_map(slots, num_experts)),
            *(x.data_ptr(), x.shape[1], n, routed, counts.data_ptr(), scratch.data_ptr(), max_tokens, dtype, threads),
        )
        assert torch.equal(told[:, 1].long(), ids.long())
        assert (told[:, ::2].long() == 7).all(), "of the other layers nothing is overwritten"
        return result, ids.long(), counts

    def weights(self, scores: Tensor, ids: Tensor) -> Tensor:
        weights = scores.double().softmax(dim=1).gather(1, ids)
        if self.renormalize:
            weights /= weights.sum(dim=1, keepdim=True)
        return weights.to(self.gate.dtype).double() if self.round_weights else weights

    def truth(self, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        """The result in float64, from all experts for all tokens."""
        gate, up, down, x = (tensor.double() for tensor in (self.gate, self.up, self.down, x))
        products = torch.cat([torch.einsum("nh,eih->nei", x, part) for part in (gate, up)], dim=2)
        inner = self.pass_gate(products, self.gate_up_bias)
        offset = 0 if self.down_bias is None else self.down_bias.double()
        share = torch.zeros(len(x), len(gate), dtype=torch.float64).scatter_(1, ids, self.weights(scores, ids))
        return torch.einsum("neh,ne->nh", torch.einsum("nei,ehi->neh", inner, down) + offset, share)

    def pass_gate(self, gate_up: Tensor, bias: Tensor | None) -> Tensor:
        """[.., 2 * inner] -> [.., inner]"""
        if bias is not None:
            return clamped_swiglu((gate_up + bias).to(gate_up.dtype), CLAMP)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def in_torch(self, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        """The result in the model's dtype, summed in the dtype of the weights."""
        outputs = []
        for expert, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            products = torch.cat((F.linear(x, gate), F.linear(x, up)), dim=1)
            inner = self.pass_gate(products, None if self.gate_up_bias is None else self.gate_up_bias[expert])
            offset = None if self.down_bias is None else self.down_bias[expert].to(x.dtype)
            outputs.append(F.linear(inner, down, offset))
        weights = self.weights(scores, ids).to(x.dtype if self.round_weights else torch.float32)
        chosen = torch.stack(outputs)[ids, torch.arange(len(x))[:, None]]  # [num_tokens, top_k, hidden_size]
        return torch.bmm(weights[:, None], chosen.to(weights.dtype))[:, 0].to(x.dtype)


def make_layer(
    library: ctypes.CDLL,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    inner: int,
    dtype: torch.dtype,
    *,
    renormalize: bool = True,
    has_biases: bool = False,
) -> Layer:
    torch.manual_seed(num_experts * hidden_size)
    number = DTYPES.index(dtype)
    gate, up, down = (
        (torch.randn(num_experts, n, k) / k**0.5).to(dtype)
        for n, k in ((inner, hidden_size), (inner, hidden_size), (hidden_size, inner))
    )
    size = library.er_packed_size(2 * (inner + -inner % 16), hidden_size, number)
    gate_up = [torch.empty(size, dtype=dtype) for _ in range(num_experts)]
    for expert, out in enumerate(gate_up):
        rows = gate[expert].data_ptr(), up[expert].data_ptr(), hidden_size, inner, hidden_size
        library.er_pack_gate_up(*rows, out.data_ptr(), number, 1)
    downs = [torch.empty(library.er_packed_size(hidden_size, inner, number), dtype=dtype) for _ in range(num_experts)]
    for expert, out in enumerate(downs):
        library.er_pack(down[expert].data_ptr(), inner, hidden_size, inner, out.data_ptr(), number, 1)
    rounds = dtype == torch.bfloat16 and not renormalize
    biases = [torch.randn(num_experts, n) if has_biases else None for n in (2 * inner, hidden_size)]
    return Layer(library, gate, up, down, top_k, renormalize, rounds, (gate_up, downs), *biases)


def inputs(layer: Layer, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    num_experts, _, hidden_size = layer.gate.shape
    scores = torch.randn(num_tokens, num_experts) * 2
    scores[:, num_experts // 2] -= 1000  # an expert that no token chooses
    return torch.randn(num_tokens, hidden_size).to(layer.gate.dtype), scores, torch.randn(num_tokens, hidden_size)


def check_layer(layer: Layer, num_tokens: int) -> None:
    x, scores, hidden = inputs(layer, num_tokens)
    result, ids, counts = layer.compute(x, scores, hidden)
    assert torch.equal(ids, scores.sort(dim=1, descending=True, stable=True).indices[:, : layer.top_k])
    assert torch.equal(counts, ids.flatten().bincount(minlength=len(counts)))
    truth = layer.truth(x, scores, ids)
    error = (result.double() - hidden.double() - truth).abs()
    if x.dtype == torch.float32:
        assert error.max() < 1e-5 * truth.abs().max()
    else:
        error_in_torch = (layer.in_torch(x, scores, ids).double() - truth).abs()
        assert error.max() < 1.5 * error_in_torch.max()
        assert error.square().mean() < error_in_torch.square().mean()
    for threads, max_tokens in ((2, 1000), (3, 1000), (1, 7), (2, 1)):
        again, ids_again, counts_again = layer.compute(x, scores, hidden, threads=threads, max_tokens=max_tokens)
        assert torch.equal(again, result)
        assert torch.equal(ids_again, ids)
        assert torch.equal(counts_again, counts)
    for first, last in ((0, 1), (num_tokens - 1, num_tokens), (num_tokens // 3, num_tokens // 3 + 5)):
        rows = slice(first, last)
        assert torch.equal(layer.compute(x[rows], scores[rows], hidden[rows].contiguous())[0], result[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 50, 300])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden_size", "inner"),
    [(16, 4, 64, 48), (8, 2, 37, 21), (5, 5, 96, 16), (60, 3, 130, 7), (1, 1, 33, 33), (300, 5, 16, 8)],
)
def test_compute_experts_equals_float64(
    library: ctypes.CDLL,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    inner: int,
    num_tokens: int,
    dtype: torch.dtype,
) -> None:
    check_layer(make_layer(library, num_experts, top_k, hidden_size, inner, dtype), num_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 9, 300])
def test_compute_experts_biases_and_clamped_gates_equal_float64(
    library: ctypes.CDLL, num_tokens: int, dtype: torch.dtype
) -> None:
    for sizes in ((16, 4, 64, 48), (8, 2, 37, 21)):
        check_layer(make_layer(library, *sizes, dtype, has_biases=True), num_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compute_experts_rounded_weights_equal_float64(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    check_layer(make_layer(library, 16, 4, 64, 48, dtype, renormalize=False), 50)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compute_experts_older_processor_equals_float64(other_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    check_layer(make_layer(other_library, 16, 4, 64, 48, dtype), 20)
    check_layer(make_layer(other_library, 8, 2, 37, 21, dtype), 9)


def test_compute_experts_nan_stays_in_its_token(library: ctypes.CDLL) -> None:
    layer = make_layer(library, 8, 2, 64, 32, torch.bfloat16)
    x, scores, hidden = inputs(layer, 20)
    expected = layer.compute(x, scores, hidden)[0]
    x[3], scores[3] = torch.nan, torch.nan
    result = layer.compute(x, scores, hidden)[0]
    others = torch.arange(20) != 3
    assert result[3].isnan().all()
    assert torch.equal(result[others], expected[others])


def test_compute_experts_without_tokens_does_nothing(library: ctypes.CDLL) -> None:
    layer = make_layer(library, 8, 2, 64, 32, torch.float32)
    result, _, counts = layer.compute(*inputs(layer, 0), threads=2)
    assert result.shape == (0, 64)
    assert counts.sum() == 0


# ---- experts on other ranks, and copies

PLACES = ([3, 0, 6, 3], [1, 4, 0, 5], [7, 2, 3, 1])
"""Experts in the slots of three ranks: experts 0 and 1 have two copies, expert 3 has three."""


def slot_maps() -> list[ExpertSlotMap]:
    """The slot map of each rank."""
    maps = [ExpertSlotMap(np.full((8, 3), -1, np.int32), np.zeros(8, np.int32)) for _ in PLACES]
    for rank, experts in enumerate(PLACES):
        for slot, expert in enumerate(experts):
            copy = maps[0].num_copies[expert]
            maps[rank].table[expert, copy] = slot
            for each in maps:
                each.num_copies[expert] += 1
    return maps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 9, 60])
def test_compute_experts_ranks_with_some_experts_sum_to_all(
    library: ctypes.CDLL, num_tokens: int, dtype: torch.dtype
) -> None:
    layer = make_layer(library, 8, 3, 64, 32, dtype)
    x, scores, hidden = inputs(layer, num_tokens)
    whole, ids, counts = layer.compute(x, scores, hidden)
    total = hidden.double()
    for slots, experts in zip(slot_maps(), PLACES, strict=True):
        nothing = torch.zeros_like(hidden)
        part, ids_too, counts_too = layer.compute(x, scores, nothing, slots=slots, experts=experts)
        assert torch.equal(ids_too, ids)
        assert torch.equal(counts_too, counts)
        absent = (slots.find(ids) < 0).all(dim=1)
        assert (part[absent] == 0).all()
        for threads, max_tokens in ((2, 1000), (1, 7), (2, 1)):
            again = layer.compute(
                x, scores, nothing, slots=slots, experts=experts, threads=threads, max_tokens=max_tokens
            )[0]
            assert torch.equal(again, part)
        total += part.double()
    torch.testing.assert_close(total, whole.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compute_experts_all_experts_in_any_slots_have_the_same_bits(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    layer = make_layer(library, 8, 3, 64, 32, dtype)
    x, scores, hidden = inputs(layer, 40)
    experts = [5, 1, 0, 7, 2, 4, 6, 3, 1]
    slots = ExpertSlotMap(np.full((8, 2), -1, np.int32), np.ones(8, np.int32))
    for slot, expert in enumerate(experts):
        slots.table[expert, int(slot == 8)] = slot
    slots.num_copies[1] = 2
    expected = layer.compute(x, scores, hidden)
    found = layer.compute(x, scores, hidden, slots=slots, experts=experts)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
