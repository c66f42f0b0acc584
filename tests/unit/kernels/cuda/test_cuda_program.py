"""The program of NVIDIA GPUs, interpreted on a CPU: its modes agree, its memory stays in place, and it reads nothing
back from the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from weakref import WeakSet

import numpy as np
import pytest
import torch
from cuda_passes import (
    CPU,
    DECODES,
    INNER,
    LIMITS,
    LONG,
    MIXED,
    NO_ROWS,
    NUM_EXPERTS,
    ROUTER,
    SIZE,
    Layers,
    Pass,
    Rows,
    batch_of,
    cuda_pass,
)
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from eagleray.kernels.backend import HiddenStates
from eagleray.kernels.cuda import program as program_module
from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.cuda.graphs import CudaGraphCapture, GraphCapture
from eagleray.kernels.cuda.linear import CudaLinear
from eagleray.kernels.expert_slots import LayerExpertSlots
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.forward_batch import PassLimits
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.parallel.group import TensorParallelGroup
from eagleray.parallel.token_shards import token_shard


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module, "TOKEN_BUCKETS", (8, 16))
    monkeypatch.setattr(program_module, "DECODE_BUCKETS", (1, 2, 4))


@pytest.fixture
def multiply_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have products of rows that do not depend on the number of rows, as the processor's library does not."""

    def multiply(self: CudaLinear, x: Tensor, out: Tensor) -> None:
        for row in range(len(x)):
            out[row] = self.weight @ x[row]
            if self.bias is not None:
                out[row] += self.bias

    monkeypatch.setattr(CudaLinear, "multiply", multiply)


# ---- modes


@pytest.mark.parametrize(
    ("rows", "window"),
    [
        *((rows, 5) for rows in (DECODES, MIXED, [(4, 1)])),
        (DECODES, None),
        *(pytest.param(rows, None, marks=pytest.mark.grid) for rows in (MIXED, LONG, [(4, 1)])),
        pytest.param(LONG, 5, marks=pytest.mark.grid),
    ],
)
def test_run_batch_padded_to_its_bucket_has_the_bits_of_the_list(
    rows: Rows, window: int | None, multiply_by_row
) -> None:
    padded, plain = (cuda_pass(captures=captures, window=window).fill() for captures in (True, False))
    batch = batch_of(rows)
    assert torch.equal(padded.run(batch), plain.run(batch))
    for found, expected in zip(padded.cache.layers, plain.cache.layers, strict=True):
        assert torch.equal(found, expected)


def test_run_decodes_as_pieces_have_the_bits_of_one_graph(multiply_by_row, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = cuda_pass(captures=True).fill(), cuda_pass(captures=True).fill()
    expected = whole.run(batch_of(DECODES))
    monkeypatch.setattr(program_module, "DECODE_BUCKETS", ())
    assert torch.equal(pieces.run(batch_of(DECODES)), expected)
    assert whole.program._decode_plans and not pieces.program._decode_plans


@pytest.mark.parametrize("rows", [DECODES, MIXED])
def test_run_equals_plain_torch(rows: Rows) -> None:
    backend = TorchBackend()
    expected = Pass(backend, Layers(backend).model).fill()
    found = cuda_pass(captures=True).fill()
    batch = batch_of(rows)
    torch.testing.assert_close(found.run(batch), expected.run(batch), atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(found.cache.layers, expected.cache.layers, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_run_decodes_read_tokens_that_the_device_has(multiply_by_row) -> None:
    run = cuda_pass(captures=True).fill()
    last_tokens = torch.tensor([7, 3, 11, 2])
    known = batch_of(DECODES)
    known = replace(known, token_ids=np.array([7, 3, 11], np.int32))
    expected = run.run(known)
    assert torch.equal(run.run(batch_of(DECODES, last_tokens=last_tokens)), expected)
    last_tokens[1] = 30  # the same graph, other tokens
    assert not torch.equal(run.run(batch_of(DECODES, last_tokens=last_tokens))[1], expected[1])


@pytest.mark.grid  # interpreted kernels take seconds
def test_run_batch_beyond_the_reserved_memory_grows(multiply_by_row) -> None:
    small, large = cuda_pass(captures=True).fill(), cuda_pass(captures=True).fill()
    small.program.reserve(PassLimits(num_tokens=2, num_rows=1, num_positions=4))
    large.program.reserve(PassLimits(num_tokens=64, num_rows=16, num_positions=64))
    for rows in ([(1, 1)], MIXED, DECODES):
        assert torch.equal(small.run(batch_of(rows)), large.run(batch_of(rows)))


def test_run_hidden_states_of_a_previous_stage() -> None:
    x, batch = torch.randn(11, SIZE), batch_of([(0, 11)])

    def made(kernels: TorchBackend | CudaBackend) -> Pass:
        layers = Layers(kernels)
        return Pass(kernels, lambda hidden, caches, context: layers.dense(hidden, caches[0], context))

    found, expected = made(CudaBackend(torch.float32)), made(TorchBackend())
    torch.testing.assert_close(found.run(batch, x), expected.run(batch, x), atol=1e-5, rtol=1e-5)


# ---- capture


class Watched(GraphCapture):
    """Runs what it captures once before, as a capture of CUDA graphs, and counts captures and repetitions."""

    def __init__(self) -> None:
        self.captured = 0
        self.repeated = 0

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        self.captured += 1

        def repeat() -> None:
            self.repeated += 1
            function()

        return repeat

    def renew(self) -> None:
        pass


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched()
    monkeypatch.setattr(program_module, "CallCapture", lambda: watched)
    return watched


def test_capture_writes_no_cache_and_counts_no_tokens(watched: Watched) -> None:
    trace = ExpertTrace(num_layers=1, num_experts=NUM_EXPERTS, top_k=2, device=CPU, keeps_ids=True)
    run = cuda_pass(captures=True, trace=trace).fill()
    before = [layer.clone() for layer in run.cache.layers]
    run.program.reserve(PassLimits(num_tokens=16, num_rows=4, num_positions=40))
    assert run.program.capture() == 5
    assert watched.captured == 3 + 2 * 3  # one graph for decodes, and what lies around two attentions
    assert all(torch.equal(layer, old) for layer, old in zip(run.cache.layers, before, strict=True))
    assert trace.counts.sum() == 0


def test_run_after_capture_captures_nothing_and_uses_the_graphs(watched: Watched) -> None:
    run = cuda_pass(captures=True).fill()
    last_tokens = torch.zeros(4, dtype=torch.int64)
    run.program.reserve(PassLimits(num_tokens=16, num_rows=4, num_positions=40))
    run.program.capture(last_tokens)
    captured = watched.captured
    for rows, repeated in ((DECODES, 1), (MIXED, 3), (LONG, 0)):
        watched.repeated = 0
        run.run(batch_of(rows, last_tokens=last_tokens))
        assert (watched.captured, watched.repeated) == (captured, repeated)


@pytest.mark.grid  # interpreted kernels take seconds
def test_run_with_another_tensor_of_last_tokens_captures_again(watched: Watched) -> None:
    run = cuda_pass(captures=True).fill()
    first, second = torch.full((4,), 1), torch.full((4,), 2)
    results = [run.run(batch_of(DECODES, last_tokens=tokens)) for tokens in (first, second)]
    assert watched.captured == 2
    assert not torch.equal(*results)


class PooledGraph:
    """A CUDA graph that replays nothing. As in torch, a pool of memory is alive while a graph has it, and cannot be
    used again afterwards."""

    pools: ClassVar[dict[int, WeakSet[PooledGraph]]]
    """Graphs of every pool that was ever used."""

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert pool not in self.pools or self.pools[pool], "the graphs of this pool are all freed"
        self.pools.setdefault(pool, WeakSet()).add(self)

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> dict[int, WeakSet[PooledGraph]]:
    numbers, stream = count(), SimpleNamespace(wait_stream=lambda other: None)
    PooledGraph.pools = {}
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PooledGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(program_module, "CallCapture", CudaGraphCapture)
    return PooledGraph.pools


@pytest.mark.grid  # interpreted kernels take seconds
def test_capture_after_graphs_were_dropped_uses_new_memory(pools: dict[int, WeakSet[PooledGraph]]) -> None:
    program = cuda_pass(captures=True).program
    program.reserve(PassLimits(num_tokens=8, num_rows=2, num_positions=8))
    program.capture(torch.zeros(4, dtype=torch.int64))
    program.capture(torch.zeros(4, dtype=torch.int64))
    program.reserve(PassLimits(num_tokens=16, num_rows=4, num_positions=40))
    program.capture()
    assert [len(graphs) for graphs in pools.values()] == [0, 0, 3 + 2 * 3]


# ---- memory


@pytest.mark.grid  # interpreted kernels take seconds
def test_run_buffers_stay_in_place_over_steps_and_modes() -> None:
    run = cuda_pass(captures=True).fill()
    program = run.program
    program.reserve(LIMITS)
    seen: list[dict[Any, int]] = []
    for rows in (DECODES, MIXED, LONG, [(1, 1)], MIXED):
        batch = batch_of(rows)
        result = run.forward(batch.token_ids, batch, run.cache)
        sizes = program._memory.plan.sizes  # type: ignore[union-attr]
        frame = program._frame(sizes)
        addresses = {value: frame[value].data_ptr() for value in program._lowered.buffers.numbers}
        assert result.data_ptr() == addresses[program._lowered.recording.result]
        seen.append(addresses)
    assert all(addresses == seen[0] for addresses in seen)


def test_num_bytes_is_the_memory_that_is_allocated() -> None:
    program = cuda_pass(captures=True).program
    program.reserve(LIMITS)
    memory = program._memory
    assert memory is not None
    tensors = memory.buffers, memory.scratch, memory.metadata.whole, memory.cos, memory.sin
    allocated = sum(tensor.nbytes for tensor in tensors)
    assert 0 <= allocated - program.num_bytes(LIMITS) <= 1024
    assert program.num_bytes(replace(LIMITS, num_tokens=2000)) > 2 * program.num_bytes(LIMITS)


def test_launches_do_not_write_outside_of_their_rows(multiply_by_row) -> None:
    """Rows of a buffer behind a batch's bucket, and the memory behind each buffer, keep their numbers."""
    run = cuda_pass(captures=True).fill()
    program = run.program
    program.reserve(LIMITS)
    memory = program._memory
    assert memory is not None
    run.run(batch_of(DECODES))
    memory.buffers.fill_(255)  # NaN
    run.run(batch_of(DECODES))
    for place, end, spec in zip(
        memory.plan.buffer_places, memory.plan.buffer_places[1:], memory.plan.buffer_specs(4), strict=False
    ):
        used = int(np.prod(spec.shape)) * spec.dtype.itemsize
        assert (memory.buffers[place + used : end] == 255).all()


@pytest.mark.parametrize("rows", [DECODES, MIXED, LONG])
def test_run_reads_nothing_back_and_allocates_nothing_large(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that do nothing, only Python's side of a step is left: it may not read the device."""
    run = cuda_pass(captures=True).fill()
    run.run(batch_of(rows))

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a step waits for the device")

    launched: list[object] = []

    class Idle:
        def __init__(self, *arguments: object) -> None: ...

        def __call__(self, *arguments: object, **options: object) -> None: ...

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: launched.append(self) or Idle())
    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(Tensor, name, refuse)
    for name in ("empty", "zeros", "ones", "full", "cat", "stack", "arange", "tensor"):
        monkeypatch.setattr(torch, name, refuse)
    batch = batch_of(rows)
    run.forward(batch.token_ids, batch, run.cache)
    assert launched


# ---- experts


def test_run_padded_tokens_are_not_traced(multiply_by_row) -> None:
    traces = [ExpertTrace(num_layers=1, num_experts=NUM_EXPERTS, top_k=2, device=CPU, keeps_ids=True) for _ in range(2)]
    padded, plain = (cuda_pass(captures=i == 0, trace=trace).fill() for i, trace in enumerate(traces))
    for rows in (DECODES, MIXED):
        batch = batch_of(rows)
        padded.run(batch)
        plain.run(batch)
        num_rows = batch.num_tokens
        assert torch.equal(*(trace.counts for trace in traces))
        assert torch.equal(*(trace.ids(None, num_rows) for trace in traces))
    assert traces[0].counts.sum() == 2 * (3 + 12)


def test_run_experts_moved_between_slots_keep_results() -> None:
    backend = CudaBackend(torch.float32)
    layers = Layers(backend)
    gate_up = [backend.gated_linear(layers.random(2 * INNER, SIZE), None) for _ in range(NUM_EXPERTS)]
    down = [backend.linear(layers.random(SIZE, INNER), None) for _ in range(NUM_EXPERTS)]
    slots = LayerExpertSlots(np.arange(NUM_EXPERTS), num_experts=NUM_EXPERTS, rank=0, num_ranks=1)
    experts = backend.experts(ROUTER, gate_up, down, slots=slots.local_map)
    products = backend.expert_products(gate_up, down)

    def compute(hidden: HiddenStates, caches: Any, context: Any) -> HiddenStates:
        x = layers.norms[0](hidden)
        return backend.add(hidden, experts(x, layers.router(x)))

    run, x = Pass(backend, compute), torch.randn(6, SIZE)
    expected = run.run(batch_of([(0, 6)]), x)
    first, last = (products.storage(slot) for slot in (0, 3))
    for one, other in zip(first, last, strict=True):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
    assert not torch.allclose(run.run(batch_of([(0, 6)]), x), expected)
    slots.assign(np.array([3, 1, 2, 0]))
    torch.testing.assert_close(run.run(batch_of([(0, 6)]), x), expected)


# ---- host operations


class Doubling:
    """A rank of two that have the same parts."""

    def __init__(self, rank: int, *, is_capturable: bool = False) -> None:
        self.rank, self.size, self.is_capturable = rank, 2, is_capturable
        self.seen: list[int] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return x.mul_(2) if self.is_capturable else x * 2


@pytest.mark.parametrize("is_capturable", [False, True])
@pytest.mark.parametrize("rows", [DECODES, MIXED])
def test_run_sums_over_ranks_between_graphs_or_within(rows: Rows, is_capturable: bool) -> None:
    group = Doubling(0, is_capturable=is_capturable)
    tp = cast(TensorParallelGroup, group)

    def made(kernels: TorchBackend | CudaBackend) -> Pass:
        layers = Layers(kernels)

        def compute(token_ids: HiddenStates, caches: Any, context: Any) -> HiddenStates:
            hidden = kernels.all_reduce(layers.embed(token_ids), tp)
            attended = layers.attend(layers.qkv(layers.norms[0](hidden)), caches[0], context)
            hidden = kernels.add(hidden, kernels.all_reduce(layers.project(attended), tp))
            return layers.norms[1](hidden)

        return Pass(kernels, compute, tp).fill()

    found, expected = made(CudaBackend(torch.float32)), made(TorchBackend())
    batch = batch_of(rows)
    wanted = expected.run(batch)
    group.seen.clear()
    torch.testing.assert_close(found.run(batch), wanted, atol=1e-5, rtol=1e-5)
    buckets = program_module.DECODE_BUCKETS if rows is DECODES else program_module.TOKEN_BUCKETS
    bucket = program_module.bucket_of(batch.num_tokens, buckets)
    assert bucket != batch.num_tokens, "there is padding"
    assert set(group.seen) == {bucket if is_capturable else batch.num_tokens}


@pytest.mark.parametrize("rank", [0, 1])
def test_run_operations_of_a_shard_compute_its_rows(rank: int) -> None:
    """Host functions get the rows of real tokens alone, also on a rank whose shard has none."""
    tp, seen = cast(TensorParallelGroup, Doubling(rank)), []

    def own_of(x: Tensor) -> Tensor:
        own = token_shard(len(x), tp)
        return x[own.start : own.stop]

    def whole_of(own: Tensor, x: Tensor) -> Tensor:
        seen.append((len(own), len(x)))
        whole, shard = x.clone(), token_shard(len(x), tp)
        whole[shard.start : shard.stop] = own
        return whole

    def made(kernels: TorchBackend | CudaBackend) -> Pass:
        layers = Layers(kernels)

        def compute(hidden: HiddenStates, caches: Any, context: Any) -> HiddenStates:
            own = kernels.host(own_of, [hidden], size=SIZE, is_sequence_sharded=True)
            own = kernels.add(own, layers.down(layers.gate_up(layers.norms[0](own))))
            return kernels.host(whole_of, [own, hidden], size=SIZE, is_sequence_sharded=False)

        return Pass(kernels, compute, tp)

    found, expected = made(CudaBackend(torch.float32)), made(TorchBackend())
    for batch in (batch_of([(0, 5)]), batch_of([(0, 1)]), NO_ROWS, batch_of([(0, 8)])):
        x = torch.randn(batch.num_tokens, SIZE)
        torch.testing.assert_close(found.run(batch, x), expected.run(batch, x), atol=1e-5, rtol=1e-5)
        assert seen[-1] == seen[-2] == (len(token_shard(batch.num_tokens, tp)), batch.num_tokens)
