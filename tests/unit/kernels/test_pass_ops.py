"""Ops of a pass beyond those of a dense model, native and in plain torch: host ops, ops on a shard of the rows, experts
in slots, and traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from eagleray.kernels.backend import HiddenStates, Operation
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.expert_slots import ExpertSlotMap
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.forward_batch import ForwardBatch
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.params import RouterParams
from eagleray.kernels.rope import Rope
from eagleray.kernels.rope_spec import DefaultRope
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.kernels.torch.onednn import OneDnnBackend
from eagleray.parallel.group import SingleRankGroup, TensorParallelGroup
from eagleray.parallel.token_shards import token_shard

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
NUM_EXPERTS, TOP_K, HIDDEN, INNER = 8, 3, 48, 20
MIXTURE = RouterParams(top_k=TOP_K, renormalize=True, round_weights=False)


def native(dtype: torch.dtype) -> CpuBackend:
    return CpuBackend(native_library(), dtype, num_threads=1)


def plain(dtype: torch.dtype) -> TorchBackend:
    return TorchBackend()


def packed(dtype: torch.dtype) -> TorchBackend:
    return OneDnnBackend()


MAKERS = (native, plain, packed)


@dataclass
class Rank:
    """A rank of a group without communication."""

    rank: int
    size: int


def batch_of(num_tokens: int) -> ForwardBatch:
    """A batch for passes without attention, where only the number of tokens matters."""
    numbers = np.arange(num_tokens, dtype=np.int32)
    return ForwardBatch(
        token_ids=numbers,
        positions=numbers,
        slot_mapping=numbers,
        block_table=np.zeros((0, 1), np.int32),
        seq_lens=np.zeros(0, np.int32),
        query_start_loc=np.zeros(1, np.int32),
        num_decodes=0,
    )


class Pass:
    """A pass of `compute`, from hidden states to hidden states."""

    def __init__(
        self,
        kernels: TorchBackend,
        compute: Callable[[HiddenStates], HiddenStates],
        dtype: torch.dtype,
        tp: TensorParallelGroup | None = None,
    ) -> None:
        rope = Rope(DefaultRope(10_000.0), 2, dtype=dtype, device=CPU)
        self._cache = KVCache([], 1)
        self._dtype = kernels.hidden_dtype(dtype)
        self._run = kernels.compile(
            lambda x, caches, context: compute(x),
            rope=rope,
            windows=frozenset(),
            device=CPU,
            tp=tp or SingleRankGroup(),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x.to(self._dtype), batch_of(len(x)), self._cache).clone()


@dataclass
class Layer:
    """A norm, a router and experts."""

    kernels: TorchBackend
    dtype: torch.dtype
    held: range | list[int] = range(NUM_EXPERTS)
    """The expert in each slot."""

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        kernels, dtype = self.kernels, self.dtype
        gate_up = (torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5).to(dtype)
        down = (torch.randn(NUM_EXPERTS, HIDDEN, INNER) / INNER**0.5).to(dtype)
        self.norm = kernels.norm((torch.rand(HIDDEN) + 0.5).to(dtype), 1e-6)
        self.router = kernels.linear(torch.randn(NUM_EXPERTS, HIDDEN).to(dtype), None)
        self.gate_up: list[Operation] = [kernels.gated_linear(gate_up[expert].clone(), None) for expert in self.held]
        self.down: list[Operation] = [kernels.linear(down[expert].clone(), None) for expert in self.held]

    def block(self, **options: Any) -> Callable[[HiddenStates], HiddenStates]:
        """Add the experts' sum to the hidden state, in the pass."""
        experts = self.kernels.experts(MIXTURE, self.gate_up, self.down, **options)

        def compute(hidden: HiddenStates) -> HiddenStates:
            x = self.norm(hidden)
            return self.kernels.add(hidden, experts(x, self.router(x)))

        return compute

    def block_of_the_host(self, trace: ExpertTrace | None = None) -> Callable[[HiddenStates], HiddenStates]:
        """Add the experts' sum to the hidden state, routed and summed up in Python."""
        kernels, products = self.kernels, self.kernels.expert_products(self.gate_up, self.down)

        def mix(x: Tensor, scores: Tensor) -> Tensor:
            ids, weights = kernels.route(scores, MIXTURE)
            if trace is not None:
                trace.record(0, ids)
            return products.weighted_sum(products.pairs(x, ids), weights.float()).to(kernels.hidden_dtype(x.dtype))

        def compute(hidden: HiddenStates) -> HiddenStates:
            x = self.norm(hidden)
            return kernels.add(hidden, kernels.host(mix, [x, self.router(x)], size=HIDDEN))

        return compute


def rows(num_rows: int) -> Tensor:
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(num_rows))


def close(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 0.0, "atol": 1e-4 if dtype == torch.float32 else 0.1}


# ---- host ops


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
def test_host_op_between_native_ops_gets_their_results(
    make: Callable[[torch.dtype], TorchBackend], dtype: torch.dtype
) -> None:
    kernels = make(dtype)
    weight, scale = torch.randn(6, HIDDEN).to(dtype), torch.ones(HIDDEN, dtype=dtype)
    product, norm = kernels.linear(weight.clone(), None), kernels.norm(scale, 1e-6)
    widths = []

    def outer(x: Tensor, products: Tensor) -> Tensor:
        widths.append((tuple(x.shape), tuple(products.shape)))
        return torch.cat((products, x[:, :2]), dim=1)

    def compute(hidden: HiddenStates) -> HiddenStates:
        x = norm(hidden)
        first = kernels.host(outer, [x, product(x)], size=8)
        return kernels.add(first, kernels.host(torch.neg, [first], size=8))

    run = Pass(kernels, compute, dtype)
    for num_rows in (3, 0, 70):
        assert torch.equal(run(rows(num_rows)).float(), torch.zeros(num_rows, 8))
    assert widths == [((n, HIDDEN), (n, 6)) for n in (3, 0, 70)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
def test_host_op_result_is_rounded_for_products(
    make: Callable[[torch.dtype], TorchBackend], dtype: torch.dtype
) -> None:
    kernels = make(dtype)
    weight = torch.randn(6, HIDDEN).to(dtype)
    product, norm = kernels.linear(weight.clone(), None), kernels.norm(torch.ones(HIDDEN, dtype=dtype), 1e-6)
    run = Pass(kernels, lambda x: product(kernels.host(torch.clone, [norm(x)], size=HIDDEN)), dtype)
    expected = Pass(kernels, lambda x: product(norm(x)), dtype)
    assert torch.equal(run(rows(20)), expected(rows(20)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_recording_rounds_hidden_states_for_products(dtype: torch.dtype) -> None:
    kernels = native(dtype)
    weight = torch.randn(6, HIDDEN).to(dtype)
    product = kernels.linear(weight.clone(), None)
    x = rows(20)
    found = Pass(kernels, product, dtype)(x)
    expected = x.to(dtype).double() @ weight.double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


# ---- shards of the rows


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 7, 8, 100])
def test_token_shard_every_row_is_in_one_shard(num_tokens: int, size: int) -> None:
    shares = [token_shard(num_tokens, cast(TensorParallelGroup, Rank(rank, size))) for rank in range(size)]
    assert [row for share in shares for row in share] == list(range(num_tokens))
    longest = -(-num_tokens // size)
    assert all(len(share) <= longest for share in shares)
    assert all(len(share) == longest for share in shares[: num_tokens // longest if longest else 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_program_ops_of_a_shard_compute_its_rows(
    make: Callable[[torch.dtype], TorchBackend], rank: int, dtype: torch.dtype
) -> None:
    kernels, tp = make(dtype), cast(TensorParallelGroup, Rank(rank, 3))
    layer = Layer(kernels, dtype)
    block = layer.block()
    seen = []

    def own_of(x: Tensor) -> Tensor:
        own = token_shard(len(x), tp)
        return x[own.start : own.stop]

    def whole_of(own: Tensor, x: Tensor) -> Tensor:
        seen.append((len(own), len(x)))
        whole = x.clone()
        share = token_shard(len(x), tp)
        whole[share.start : share.stop] = own
        return whole

    def compute(hidden: HiddenStates) -> HiddenStates:
        own = block(kernels.host(own_of, [hidden], size=HIDDEN, is_sequence_sharded=True))
        return kernels.host(whole_of, [own, hidden], size=HIDDEN, is_sequence_sharded=False)

    run, everything = Pass(kernels, compute, dtype, tp), Pass(kernels, block, dtype)
    for num_rows in (7, 1, 0, 200, 2):
        x = rows(num_rows)
        share = token_shard(num_rows, tp)
        expected = x.to(kernels.hidden_dtype(dtype)).clone()
        expected[share.start : share.stop] = everything(x)[share.start : share.stop]
        torch.testing.assert_close(run(x), expected, **close(dtype))
        assert seen[-1] == (len(share), num_rows)
        if isinstance(kernels, CpuBackend):
            assert torch.equal(run(x), expected)


def test_recording_op_with_two_numbers_of_rows_raises() -> None:
    kernels = native(torch.float32)

    def compute(hidden: HiddenStates) -> HiddenStates:
        return kernels.add(hidden, kernels.host(torch.clone, [hidden], size=HIDDEN, is_sequence_sharded=True))

    with pytest.raises(AssertionError):
        Pass(kernels, compute, torch.float32)(rows(3))


# ---- experts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
def test_expert_products_on_host_equal_experts_in_pass(
    make: Callable[[torch.dtype], TorchBackend], dtype: torch.dtype
) -> None:
    kernels = make(dtype)
    layer = Layer(kernels, dtype)
    for num_rows in (1, 30, 0, 700):
        x = rows(num_rows)
        found, expected = (Pass(kernels, block, dtype)(x) for block in (layer.block_of_the_host(), layer.block()))
        torch.testing.assert_close(found, expected, **close(dtype))
        if isinstance(kernels, CpuBackend):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
def test_program_experts_moved_between_ranks_keep_results(
    make: Callable[[torch.dtype], TorchBackend], dtype: torch.dtype
) -> None:
    """Two ranks of six slots each, of which four are for copies; then experts and slot maps change."""
    kernels = make(dtype)
    placements = [
        [[0, 1, 2, 3, 4, 5], [6, 7, 0, 1, 2, 0]],
        [[5, 0, 2, 7, 4, 0], [6, 3, 0, 1, 2, 1]],
    ]
    slots = [no_slots(4) for _ in range(2)]
    fill(slots, placements[0])
    layers = [Layer(kernels, dtype, held) for held in placements[0]]
    passes = [Pass(kernels, layer.block(slots=own), dtype) for layer, own in zip(layers, slots, strict=True)]
    expected = Pass(kernels, Layer(kernels, dtype).block(), dtype)
    for placement in placements:
        move(kernels, layers, dtype, placement)
        fill(slots, placement)
        for num_rows in (1, 40, 0, 600):
            x = rows(num_rows)
            start = x.to(kernels.hidden_dtype(dtype)).float()
            parts = [run(x).float() - start for run in passes]
            torch.testing.assert_close(start + sum(parts), expected(x).float(), **close(dtype))


def no_slots(max_copies: int) -> ExpertSlotMap:
    return ExpertSlotMap(np.full((NUM_EXPERTS, max_copies), -1, np.int32), np.ones(NUM_EXPERTS, np.int32))


def fill(slots: list[ExpertSlotMap], placement: list[list[int]]) -> None:
    """Rewrite the slot maps in place."""
    for each in slots:
        each.table.fill(-1)
        each.num_copies.fill(0)
    for rank, held in enumerate(placement):
        for slot, expert in enumerate(held):
            slots[rank].table[expert, slots[0].num_copies[expert]] = slot
            for each in slots:
                each.num_copies[expert] += 1


def move(kernels: TorchBackend, layers: list[Layer], dtype: torch.dtype, placement: list[list[int]]) -> None:
    """Copy its expert's weights to every slot."""
    every = Layer(kernels, dtype)
    source = kernels.expert_products(every.gate_up, every.down)
    for layer, held in zip(layers, placement, strict=True):
        products = kernels.expert_products(layer.gate_up, layer.down)
        for slot, expert in enumerate(held):
            for to, part in zip(products.storage(slot), source.storage(expert), strict=True):
                to.copy_(part)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recording_added_sums_equal_separate_additions(dtype: torch.dtype) -> None:
    """The outputs of experts and a product are added up before they are added to the hidden state, or each is added."""
    kernels = native(dtype)
    layer = Layer(kernels, dtype)
    experts, shared = (
        kernels.experts(MIXTURE, layer.gate_up, layer.down),
        kernels.linear(torch.eye(HIDDEN, dtype=dtype), None),
    )

    def parts(hidden: HiddenStates) -> tuple[HiddenStates, Callable[[], HiddenStates], Callable[[], HiddenStates]]:
        x = layer.norm(hidden)
        return hidden, lambda: experts(x, layer.router(x)), lambda: shared(x)

    def together(hidden: HiddenStates) -> HiddenStates:
        hidden, mix, product = parts(hidden)
        return kernels.add(hidden, kernels.add(mix(), product()))

    def the_other_way(hidden: HiddenStates) -> HiddenStates:
        hidden, mix, product = parts(hidden)
        return kernels.add(hidden, kernels.add(product(), mix()))

    def one_by_one(hidden: HiddenStates) -> HiddenStates:
        hidden, mix, product = parts(hidden)
        return kernels.add(kernels.add(hidden, mix()), product())

    x = rows(30)
    found = [Pass(kernels, compute, dtype)(x) for compute in (together, the_other_way, one_by_one)]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)


# ---- traces


def make_trace(*, keeps_ids: bool) -> ExpertTrace:
    return ExpertTrace(num_layers=2, num_experts=NUM_EXPERTS, top_k=TOP_K, device=CPU, keeps_ids=keeps_ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("is_mapped", [False, True])
def test_expert_trace_of_pass_equals_routing_in_python(
    make: Callable[[torch.dtype], TorchBackend], is_mapped: bool, dtype: torch.dtype
) -> None:
    """Compare a layer that computes in the pass with one that routes in Python. With a slot map, half of the experts
    are on another rank, but are chosen all the same."""
    kernels = make(dtype)
    layer = Layer(kernels, dtype, list(range(0, NUM_EXPERTS, 2)) if is_mapped else range(NUM_EXPERTS))
    slots = no_slots(1)
    slots.table[::2, 0] = np.arange(4)
    options: dict[str, Any] = {"slots": slots} if is_mapped else {}
    trace, truth, counting = (make_trace(keeps_ids=keeps) for keeps in (True, True, False))
    run = Pass(kernels, layer.block(trace=trace, layer=1, **options), dtype)
    count = Pass(kernels, layer.block(trace=counting, layer=1, **options), dtype)
    route = Pass(kernels, Layer(kernels, dtype).block_of_the_host(truth), dtype)
    for num_rows in (5, 300, 0, 64, 1):
        x = rows(num_rows)
        for each in (run, count, route):
            each(x)
        everything = range(num_rows)
        assert torch.equal(trace.ids(everything, num_rows)[:, 1], truth.ids(everything, num_rows)[:, 0])
        assert torch.equal(trace.ids(everything[::-1], num_rows)[:, 1].flip(0), truth.ids(everything, num_rows)[:, 0])
        for found in (trace, counting):
            assert torch.equal(found.counts[1], truth.counts[0])
            assert (found.counts[0] == 0).all()
    assert trace.counts.sum() == TOP_K * (5 + 300 + 64 + 1)
    assert counting.buffer(0).numel() == 0
