"""Updates of weights through `OwnsWeights.storage`: every kind of operation, on every backend, in passes that were
compiled before the update, and at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagleray.kernels.backend import Forward, HiddenStates, KernelBackend, OwnsWeights
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.forward_batch import ForwardBatch
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.params import AttentionParams, ClampedSwiglu, MLAParams, RouterParams
from eagleray.kernels.rope import Rope
from eagleray.kernels.rope_spec import DefaultRope
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.kernels.torch.onednn import OneDnnBackend

CPU = torch.device("cpu")
VOCAB, SIZE, INNER, HEAD_DIM, RANK, NUM_EXPERTS, BLOCK_SIZE = 24, 16, 20, 16, 32, 3, 4

BACKENDS: dict[str, Callable[[], KernelBackend]] = {
    "torch": TorchBackend,
    "onednn": OneDnnBackend,
    "cpu": lambda: CpuBackend(native_library(), torch.float32, num_threads=1),
    "cpu bfloat16": lambda: CpuBackend(native_library(), torch.bfloat16, num_threads=1),
    "cuda": lambda: CudaBackend(torch.float32),
}
DTYPES = {"cpu bfloat16": torch.bfloat16}
all_backends = pytest.mark.parametrize("name", BACKENDS)


class Operations:
    """An operation of every kind, whose weights follow from a seed."""

    def __init__(self, backend: KernelBackend, dtype: torch.dtype, seed: int) -> None:
        self.generator, self.dtype, self.backend = torch.Generator().manual_seed(seed), dtype, backend
        random, vector = self.random, self.vector
        self.embed, self.head = backend.tied_embedding(random(VOCAB, SIZE), 0)
        self.other_embed = backend.embedding(random(VOCAB, SIZE), 0)
        self.norm = backend.norm(vector(SIZE), 1e-6)
        self.qkv = backend.linear(random(4 * HEAD_DIM, SIZE), random(4 * HEAD_DIM))
        self.attend = backend.self_attention(
            AttentionParams(
                num_heads=2,
                num_kv_heads=1,
                head_dim=HEAD_DIM,
                window=None,
                q_norm=vector(HEAD_DIM),
                k_norm=vector(HEAD_DIM),
                norm_eps=1e-6,
                sinks=vector(2),
            )
        )
        self.project = backend.linear(random(SIZE, 2 * HEAD_DIM), None)
        self.queries = backend.linear(random(2 * (SIZE + HEAD_DIM), SIZE), None)
        self.latents = backend.linear(random(RANK + HEAD_DIM, SIZE), None)
        self.attend_latents = backend.mla_attention(
            MLAParams(
                num_heads=2,
                plain_dim=SIZE,
                rotated_dim=HEAD_DIM,
                value_dim=HEAD_DIM,
                scale=0.3,
                norm=vector(RANK),
                norm_eps=1e-6,
                keys=random(2, SIZE, RANK),
                values=random(2, HEAD_DIM, RANK),
            )
        )
        clamp = ClampedSwiglu(alpha=1.7, limit=7.0)
        self.gate_up = backend.gated_linear(random(2 * INNER, SIZE), random(2 * INNER), clamp)
        self.down = backend.linear(random(SIZE, INNER), random(SIZE))
        self.router = backend.exact_linear(random(NUM_EXPERTS, SIZE))
        self.expert_gate_up = [
            backend.gated_linear(random(2 * INNER, SIZE), random(2 * INNER)) for _ in range(NUM_EXPERTS)
        ]
        self.expert_down = [backend.linear(random(SIZE, INNER), None) for _ in range(NUM_EXPERTS)]
        bias = torch.rand(NUM_EXPERTS, generator=self.generator) / 8
        router = RouterParams(top_k=2, renormalize=True, round_weights=False, scoring="sigmoid", correction_bias=bias)
        self.experts = backend.experts(router, self.expert_gate_up, self.expert_down)
        self.products = backend.expert_products(self.expert_gate_up, self.expert_down)

    def random(self, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=self.generator) / shape[-1] ** 0.5).to(self.dtype)

    def vector(self, size: int) -> Tensor:
        return (0.5 + torch.rand(size, generator=self.generator)).to(self.dtype)

    @property
    def owners(self) -> dict[str, OwnsWeights]:
        named = {name: part for name, part in vars(self).items() if name != "products" and hasattr(part, "storage")}
        experts = zip(self.expert_gate_up, self.expert_down, strict=True)
        return named | {f"expert {i} {j}": part for i, pair in enumerate(experts) for j, part in enumerate(pair)}

    def dense(self, token_ids: HiddenStates, caches: Any, context: Any) -> HiddenStates:
        """A pass with the usual attention, both feed-forward layers and both embeddings."""
        add = self.backend.add
        hidden = add(self.embed(token_ids), self.other_embed(token_ids))
        hidden = add(hidden, self.project(self.attend(self.qkv(self.norm(hidden)), caches[0], context)))
        hidden = add(hidden, self.down(self.gate_up(self.norm(hidden))))
        x = self.norm(hidden)
        return add(hidden, self.experts(x, self.router(x)))

    def latent(self, token_ids: HiddenStates, caches: Any, context: Any) -> HiddenStates:
        """A pass with multi-head latent attention."""
        x = self.norm(self.embed(token_ids))
        return self.project(self.attend_latents(self.queries(x), self.latents(x), caches[0], context))


class Pass:
    """A compiled pass of `dense` or `latent`."""

    def __init__(self, operations: Operations, kind: str) -> None:
        backend = operations.backend
        block = backend.cache_block(BLOCK_SIZE, 1, HEAD_DIM, operations.dtype)
        if kind == "latent":
            block = backend.mla_cache_block(BLOCK_SIZE, RANK + HEAD_DIM)
        self.cache = KVCache([torch.zeros((5, *block), dtype=operations.dtype)], BLOCK_SIZE)
        rope = Rope(DefaultRope(10_000.0), HEAD_DIM, dtype=operations.dtype, device=CPU)
        compute = getattr(operations, kind)
        self.forward: Forward = backend.compile(compute, rope=rope, windows=frozenset({None}), device=CPU)

    def run(self, *batches: ForwardBatch) -> list[Tensor]:
        """Return the hidden states of the batches, by default of a prompt and of the token behind it."""
        return [self.forward(batch.token_ids, batch, self.cache).clone() for batch in batches or (PROMPT, NEXT)]


def batch_of(cached: int, token_ids: list[int]) -> ForwardBatch:
    """A batch of one row."""
    positions = np.arange(cached, cached + len(token_ids), dtype=np.int32)
    return ForwardBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        slot_mapping=BLOCK_SIZE + positions,
        block_table=np.array([[1, 2, 3]], np.int32),
        seq_lens=positions[-1:] + 1,
        query_start_loc=np.array([0, len(token_ids)], np.int32),
        num_decodes=int(len(token_ids) == 1),
    )


PROMPT, NEXT = batch_of(0, [3, 17, 8, 2, 11, 5, 20, 13, 0, 9]), batch_of(10, [23])


def make(name: str, seed: int) -> Operations:
    return Operations(BACKENDS[name](), DTYPES.get(name, torch.float32), seed)


def copy_storage(source: OwnsWeights, target: OwnsWeights) -> None:
    for old, new in zip(target.storage(), source.storage(), strict=True):
        assert old.dtype == new.dtype == torch.uint8 and old.dim() == new.dim() == 1
        old.copy_(new)


def addresses(operations: Operations) -> list[int]:
    return [part.data_ptr() for owner in operations.owners.values() for part in owner.storage()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@all_backends
@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_storage_copied_between_passes_gives_the_other_weights_results(name: str, kind: str) -> None:
    operations, other = make(name, 1), make(name, 2)
    run, expected = Pass(operations, kind), Pass(other, kind).run()
    before, places = run.run(), addresses(operations)
    assert not equal(before, expected)
    for owner, new in zip(operations.owners.values(), other.owners.values(), strict=True):
        copy_storage(new, owner)
    assert equal(run.run(), expected)
    assert equal(Pass(operations, kind).run(), expected)
    assert addresses(operations) == places


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "cuda"])  # whose interpreter takes seconds
def test_storage_of_each_operation_is_read_by_the_next_pass(name: str) -> None:
    """Copy operation by operation: every one changes the result of a pass that it is a part of."""
    operations, other = make(name, 1), make(name, 2)
    passes = [Pass(operations, kind) for kind in ("dense", "latent")]
    results = [run.run(PROMPT) for run in passes]
    shared = {part.data_ptr() for part in operations.head.storage()}
    for which, owner in operations.owners.items():
        if which == "head" and shared == {part.data_ptr() for part in operations.embed.storage()}:
            continue  # overwritten as the embedding
        assert owner.storage(), which
        copy_storage(other.owners[which], owner)
        after = [run.run(PROMPT) for run in passes]
        if which != "head":
            assert not all(map(equal, after, results)), which
        results = after


@all_backends
def test_storage_copied_changes_products_that_are_computed_at_once(name: str) -> None:
    operations, other = make(name, 1), make(name, 2)
    x = operations.random(3, SIZE)
    slots = torch.tensor([[0, 2], [1, -1], [2, 1]], dtype=torch.int32)
    for which in ("head", "gate_up", "router"):
        one, two = (getattr(each, which) for each in (operations, other))
        expected = two(x).clone()
        assert not torch.equal(one(x), expected)
        copy_storage(two, one)
        assert torch.equal(one(x), expected)
    expected = other.products.pairs(x, slots)
    assert not torch.equal(operations.products.pairs(x, slots), expected)
    for slot in range(NUM_EXPERTS):
        for old, new in zip(operations.products.storage(slot), other.products.storage(slot), strict=True):
            old.copy_(new)
    assert torch.equal(operations.products.pairs(x, slots), expected)


@all_backends
def test_storage_of_experts_is_that_of_their_operations(name: str) -> None:
    operations = make(name, 1)
    for slot, pair in enumerate(zip(operations.expert_gate_up, operations.expert_down, strict=True)):
        parts = [part for operation in pair for part in operation.storage()]
        found = [part.data_ptr() for part in operations.products.storage(slot)]
        assert found == [part.data_ptr() for part in parts]


@all_backends
def test_storage_of_strided_weights_is_contiguous(name: str) -> None:
    backend, dtype = BACKENDS[name](), DTYPES.get(name, torch.float32)
    weight, vector = torch.randn(SIZE, INNER).to(dtype).t(), torch.randn(2 * INNER).to(dtype)[::2]
    contiguous, strided = (
        backend.linear(matrix, bias) for matrix, bias in ((weight.contiguous(), vector.contiguous()), (weight, vector))
    )
    x = torch.randn(2, SIZE).to(dtype)
    expected = contiguous(x).clone()
    assert torch.equal(strided(x), expected)
    assert all(map(torch.equal, strided.storage(), contiguous.storage()))
    for operation in (backend.norm(vector, 1e-6), backend.embedding(weight, 0)):
        assert all(part.is_contiguous() for part in operation.storage())


def test_storage_of_a_packed_weight_outlives_its_operation() -> None:
    backend, weight = OneDnnBackend(), torch.randn(64, 64)
    memory = backend.linear(weight.clone(), None).storage()
    others = [backend.linear(torch.zeros(64, 64), None) for _ in range(20)]
    target = others[0]
    for old, new in zip(target.storage(), memory, strict=True):
        old.copy_(new)
    x = torch.randn(3, 64)
    assert torch.equal(target(x), backend.linear(weight, None)(x))
