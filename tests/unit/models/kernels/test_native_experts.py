"""Routing, and the sums of experts, against float64 and plain torch; each token alone against it in any company."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

SIGNATURES = {
    "er_route": (c_void_p, *[c_int64] * 4, c_int, c_void_p, c_void_p, c_int, c_int),
    "er_group": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p),
    "er_combine": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int),
    "er_compute_experts": (
        *(c_void_p, c_int64, c_void_p, c_void_p, c_void_p, *[c_int64] * 4, c_int, c_int),
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int),
    ),
    "er_pack": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int, c_int),
    "er_pack_gate_up": (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int, c_int),
}
SIZES = {"er_packed_size": (c_int64, c_int64, c_int), "er_experts_scratch_size": (*[c_int64] * 5, c_int)}
DTYPES = (torch.float32, torch.bfloat16)  # a dtype's number is its place


SOURCES = ("experts.cpp", "product.cpp")


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, signature in (SIGNATURES | SIZES).items():
        getattr(library, name).argtypes = signature
    for name in SIZES:
        getattr(library, name).restype = c_int64
    return library


# ---- routing


def route(
    library: ctypes.CDLL,
    scores: Tensor,
    top_k: int,
    *,
    renormalize: bool,
    dtype: torch.dtype = torch.float32,
    threads: int = 1,
) -> tuple[Tensor, Tensor]:
    n, num_experts = scores.shape
    ids, weights = torch.empty(n, top_k, dtype=torch.int32), torch.empty(n, top_k)
    arguments = scores.data_ptr(), scores.stride(0), n, num_experts, top_k, renormalize
    library.er_route(*arguments, ids.data_ptr(), weights.data_ptr(), DTYPES.index(dtype), threads)
    return ids.long(), weights


def route_in_torch(scores: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """In float64; equal scores by id."""
    ids = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.double().softmax(dim=1).gather(1, ids)
    return ids, weights / weights.sum(dim=1, keepdim=True) if renormalize else weights


def check_route(library: ctypes.CDLL, num_experts: int, top_k: int, *, renormalize: bool) -> None:
    torch.manual_seed(num_experts)
    scores = (torch.randn(50, num_experts + 3) * 3)[:, :num_experts]
    scores[10:] = scores[10:].bfloat16().float()  # many equal ones
    scores[20:30] = scores[20:30].round()
    scores[30] = 1.5
    scores[31] = torch.where(torch.arange(num_experts) % 2 == 0, -0.0, 0.0)
    scores[32, 1:] = -torch.inf
    scores[33] *= 100
    ids, weights = route(library, scores, top_k, renormalize=renormalize)
    expected_ids, expected_weights = route_in_torch(scores, top_k, renormalize)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=2e-6, atol=1e-30)
    rounded = route(library, scores, top_k, renormalize=renormalize, dtype=torch.bfloat16)[1]
    torch.testing.assert_close(rounded, weights.bfloat16().float(), rtol=0, atol=1e-37)
    for threads in (2, 3):
        ids_too, weights_too = route(library, scores, top_k, renormalize=renormalize, threads=threads)
        assert torch.equal(ids_too, ids)
        assert torch.equal(weights_too, weights)
    for row in range(len(scores)):
        assert torch.equal(route(library, scores[row : row + 1], top_k, renormalize=renormalize)[1][0], weights[row])


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8), (37, 5), (5, 5), (1, 1), (17, 16), (512, 10)])
def test_route(library: ctypes.CDLL, num_experts: int, top_k: int, renormalize: bool) -> None:
    check_route(library, num_experts, top_k, renormalize=renormalize)


def test_route_on_another_processor(other_library: ctypes.CDLL) -> None:
    check_route(other_library, 37, 5, renormalize=True)


def test_scores_that_are_no_numbers(library: ctypes.CDLL) -> None:
    scores = torch.randn(6, 20)
    expected = route(library, scores, 4, renormalize=True)
    scores[1, 3] = torch.nan
    scores[2, 4] = torch.inf
    scores[3] = -torch.inf
    scores[4] = torch.nan
    ids, weights = route(library, scores, 4, renormalize=True)
    assert weights[1:5].isnan().all()
    assert torch.equal(weights[::5], expected[1][::5])
    assert torch.equal(ids[::5], expected[0][::5])
    assert ids[1, 0] == 3
    assert ids[2, 0] == 4
    assert ids[3:5].tolist() == [[0, 1, 2, 3]] * 2


# ---- groups


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (300, 128, 8), (7, 50, 3), (40, 3, 3)])
def test_group(library: ctypes.CDLL, num_tokens: int, num_experts: int, top_k: int) -> None:
    torch.manual_seed(num_tokens)
    ids = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :top_k].int().contiguous()
    ids[ids == 1] = 0  # an expert without tokens, and tokens that chose one twice
    offsets = torch.full((num_experts + 1,), -1, dtype=torch.int32)
    tokens, places = (torch.full((num_tokens * top_k,), -1, dtype=torch.int32) for _ in range(2))
    pointers = (x.data_ptr() for x in (offsets, tokens, places))
    library.er_group(ids.data_ptr(), num_tokens, top_k, num_experts, *pointers)
    pairs = ids.flatten()
    order = pairs.argsort(stable=True)
    assert torch.equal(tokens.long(), order // top_k)
    assert torch.equal(places.argsort(), order)
    assert offsets.tolist() == [0, *pairs.bincount(minlength=num_experts).cumsum(0).tolist()]


# ---- sums


def combine(library: ctypes.CDLL, outputs: Tensor, places: Tensor, weights: Tensor, hidden: Tensor, n: int) -> Tensor:
    result = hidden.clone()
    pointers = (x.data_ptr() for x in (outputs, places, weights))
    sizes = len(places), places.shape[1], outputs.shape[1]
    library.er_combine(*pointers, *sizes, result.data_ptr(), hidden.shape[1], n)
    return result


@pytest.mark.parametrize("size", [1, 37, 256, 700])
def test_combine(library: ctypes.CDLL, size: int) -> None:
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


# ---- all together


@dataclass(frozen=True)
class Layer:
    """Experts, plain and packed."""

    library: ctypes.CDLL
    gate: Tensor  # [num_experts, inner, hidden_size]
    up: Tensor
    down: Tensor  # [num_experts, hidden_size, inner]
    top_k: int
    renormalize: bool
    round_weights: bool
    packed: tuple[list[Tensor], list[Tensor]]

    def compute(
        self, x: Tensor, scores: Tensor, hidden: Tensor, *, threads: int = 1, max_tokens: int = 1000
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`hidden` plus what the experts make of x, the ids, and how many tokens each expert had."""
        n, size = x.shape
        num_experts, inner, _ = self.gate.shape
        dtype = DTYPES.index(x.dtype)
        x, result = F.pad(x, (0, size % 2)), hidden.clone()
        ids, counts = torch.empty(n, self.top_k, dtype=torch.int32), torch.zeros(num_experts, dtype=torch.int64)
        sizes = num_experts, self.top_k, size, inner
        scratch = torch.empty(self.library.er_experts_scratch_size(*sizes, max_tokens, dtype), dtype=torch.uint8)
        scratch.fill_(0xFF)  # NaN, however it is read
        gate_up, down = ((c_void_p * num_experts)(*[w.data_ptr() for w in weights]) for weights in self.packed)
        self.library.er_compute_experts(
            *(x.data_ptr(), n, scores.data_ptr(), gate_up, down, *sizes, self.renormalize, self.round_weights),
            *(result.data_ptr(), ids.data_ptr(), counts.data_ptr(), scratch.data_ptr(), max_tokens, dtype, threads),
        )
        return result, ids.long(), counts

    def weights(self, scores: Tensor, ids: Tensor) -> Tensor:
        weights = scores.double().softmax(dim=1).gather(1, ids)
        if self.renormalize:
            weights /= weights.sum(dim=1, keepdim=True)
        return weights.to(self.gate.dtype).double() if self.round_weights else weights

    def truth(self, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        """In float64, all experts for all tokens."""
        gate, up, down, x = (tensor.double() for tensor in (self.gate, self.up, self.down, x))
        inner = F.silu(torch.einsum("nh,eih->nei", x, gate)) * torch.einsum("nh,eih->nei", x, up)
        share = torch.zeros(len(x), len(gate), dtype=torch.float64).scatter_(1, ids, self.weights(scores, ids))
        return torch.einsum("nei,ehi,ne->nh", inner, down, share)

    def in_torch(self, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        """In the model's dtype; the sum in that of the weights."""
        parts = zip(self.gate, self.up, self.down, strict=True)
        outputs = [F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for gate, up, down in parts]
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
    return Layer(library, gate, up, down, top_k, renormalize, rounds, (gate_up, downs))


def inputs(layer: Layer, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    num_experts, _, hidden_size = layer.gate.shape
    scores = torch.randn(num_tokens, num_experts) * 2
    scores[:, num_experts // 2] -= 1000  # nobody's choice, where there is a choice
    return torch.randn(num_tokens, hidden_size).to(layer.gate.dtype), scores, torch.randn(num_tokens, hidden_size)


def check_layer(layer: Layer, num_tokens: int) -> None:
    x, scores, hidden = inputs(layer, num_tokens)
    result, ids, counts = layer.compute(x, scores, hidden)
    assert torch.equal(ids, route_in_torch(scores, layer.top_k, False)[0])
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
    [(16, 4, 64, 48), (8, 2, 37, 21), (5, 5, 96, 16), (60, 3, 130, 7), (1, 1, 33, 33)],
)
def test_experts(
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
def test_weights_that_are_rounded(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    check_layer(make_layer(library, 16, 4, 64, 48, dtype, renormalize=False), 50)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_on_another_processor(other_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    check_layer(make_layer(other_library, 16, 4, 64, 48, dtype), 20)
    check_layer(make_layer(other_library, 8, 2, 37, 21, dtype), 9)


def test_a_broken_token_is_no_other_tokens_business(library: ctypes.CDLL) -> None:
    layer = make_layer(library, 8, 2, 64, 32, torch.bfloat16)
    x, scores, hidden = inputs(layer, 20)
    expected = layer.compute(x, scores, hidden)[0]
    x[3], scores[3] = torch.nan, torch.nan
    result = layer.compute(x, scores, hidden)[0]
    others = torch.arange(20) != 3
    assert result[3].isnan().all()
    assert torch.equal(result[others], expected[others])


def test_no_tokens(library: ctypes.CDLL) -> None:
    layer = make_layer(library, 8, 2, 64, 32, torch.float32)
    result, _, counts = layer.compute(*inputs(layer, 0), threads=2)
    assert result.shape == (0, 64)
    assert counts.sum() == 0
