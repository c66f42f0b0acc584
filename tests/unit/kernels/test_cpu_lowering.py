"""The ops that a CPU runs for a recording: which additions are part of other ops, and which rows begin as zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from eagleray.kernels.backend import HiddenStates
from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.cpu.lowering import lower
from eagleray.kernels.cpu.program import CpuProgram, HostCall, LoweredOps, NativeOp
from eagleray.kernels.forward_batch import PassLimits
from eagleray.kernels.params import AttentionParams, MLAParams, RouterParams
from eagleray.kernels.recording import Recording
from eagleray.kernels.rope import Rope
from eagleray.kernels.rope_spec import DefaultRope
from eagleray.parallel.group import SingleRankGroup

SIZE, INNER, NUM_EXPERTS, HEAD_DIM = 32, 48, 4, 16
CPU = torch.device("cpu")
ROUTER = RouterParams(top_k=2, renormalize=True, round_weights=False)
ATTENTION = AttentionParams(
    num_heads=2, num_kv_heads=1, head_dim=HEAD_DIM, window=None, q_norm=None, k_norm=None, norm_eps=1e-6
)

RANK, PLAIN = 24, 8
MLA = MLAParams(
    num_heads=2,
    plain_dim=PLAIN,
    rotated_dim=HEAD_DIM,
    value_dim=HEAD_DIM,
    scale=0.3,
    norm=torch.ones(RANK),
    norm_eps=1e-6,
    keys=torch.zeros(2, PLAIN, RANK, dtype=torch.bfloat16),
    values=torch.zeros(2, HEAD_DIM, RANK, dtype=torch.bfloat16),
)


class Layers:
    """Operations of a small model in bfloat16."""

    def __init__(self) -> None:
        self.backend = CpuBackend(native_library(), torch.bfloat16, num_threads=1)
        self.norm = self.backend.norm(torch.ones(SIZE), 1e-6)
        self.product = self.linear(SIZE, SIZE)
        self.gated = self.backend.gated_linear(torch.zeros(2 * SIZE, SIZE, dtype=torch.bfloat16), None)
        self.qkv, self.router = self.linear(4 * HEAD_DIM, SIZE), self.linear(NUM_EXPERTS, SIZE)
        self.gate_up = self.backend.gated_linear(torch.zeros(2 * INNER, SIZE, dtype=torch.bfloat16), None)
        self.down = self.linear(SIZE, INNER)
        self.attend = self.backend.self_attention(ATTENTION)
        self.queries, self.latents = self.linear(2 * (PLAIN + HEAD_DIM), SIZE), self.linear(RANK + HEAD_DIM, SIZE)
        self.attend_latents = self.backend.mla_attention(MLA)
        self.experts = self.backend.experts(ROUTER, [self.gate_up] * NUM_EXPERTS, [self.down] * NUM_EXPERTS)
        self.add = self.backend.add

    def linear(self, out_features: int, in_features: int) -> Callable[[HiddenStates], HiddenStates]:
        return self.backend.linear(torch.zeros(out_features, in_features, dtype=torch.bfloat16), None)


@pytest.fixture(scope="module")
def layers() -> Layers:
    return Layers()


def lowered(compute: Callable[[HiddenStates], HiddenStates]) -> LoweredOps:
    recording = Recording(torch.bfloat16)
    recording.finish(compute(recording.begin(SIZE)))
    return lower(recording)


def operations(compute: Callable[[HiddenStates], HiddenStates]) -> list[int | None]:
    return [op.operation if isinstance(op, NativeOp) else None for op in lowered(compute).ops]


def test_lower_addition_after_a_product_is_part_of_it(layers: Layers) -> None:
    done = lowered(lambda hidden: layers.add(hidden, layers.product(layers.norm(hidden))))
    norm, product = done.ops
    assert isinstance(norm, NativeOp) and isinstance(product, NativeOp)
    assert (norm.operation, product.operation) == (abi.OP_NORMALIZE, abi.OP_MULTIPLY)
    assert product.args.epilogue == abi.EPILOGUE_ADD
    assert product.args.out == norm.args.x, "the sum is where the hidden state was"
    assert product.args.x == norm.args.out != norm.args.x


def test_lower_addition_after_a_gated_product_is_an_op(layers: Layers) -> None:
    def compute(hidden: HiddenStates) -> HiddenStates:
        return layers.add(layers.norm(hidden), layers.gated(layers.norm(hidden)))

    assert operations(compute)[-2:] == [abi.OP_MULTIPLY, abi.OP_ADD]


def test_lower_addition_of_a_product_that_is_read_again_is_an_op(layers: Layers) -> None:
    def compute(hidden: HiddenStates) -> HiddenStates:
        product = layers.product(layers.norm(hidden))
        return layers.add(layers.add(hidden, product), product)

    assert operations(compute) == [abi.OP_NORMALIZE, abi.OP_MULTIPLY, abi.OP_ADD, abi.OP_ADD]


def test_lower_addition_of_a_product_to_itself_is_an_op(layers: Layers) -> None:
    def compute(hidden: HiddenStates) -> HiddenStates:
        product = layers.product(layers.norm(hidden))
        return layers.add(product, product)

    assert operations(compute) == [abi.OP_NORMALIZE, abi.OP_MULTIPLY, abi.OP_ADD]


def test_lower_addition_of_an_earlier_product_is_an_op(layers: Layers) -> None:
    def compute(hidden: HiddenStates) -> HiddenStates:
        x = layers.norm(hidden)
        product = layers.product(x)
        return layers.add(layers.product(x), product)

    assert operations(compute) == [abi.OP_NORMALIZE, abi.OP_MULTIPLY, abi.OP_MULTIPLY, abi.OP_ADD]


def test_lower_sum_of_sums_adds_once_in_each_op(layers: Layers) -> None:
    def compute(hidden: HiddenStates) -> HiddenStates:
        x = layers.norm(hidden)
        return layers.add(hidden, layers.add(layers.experts(x, layers.router(x)), layers.product(x)))

    norm, router, clear, experts, product, add = (op for op in lowered(compute).ops if isinstance(op, NativeOp))
    kinds = [op.operation for op in (norm, router, clear, experts, product, add)]
    expected = [abi.OP_NORMALIZE, abi.OP_MULTIPLY, abi.OP_CLEAR, abi.OP_COMPUTE_EXPERTS, abi.OP_MULTIPLY, abi.OP_ADD]
    assert kinds == expected
    assert clear.args.out == experts.args.hidden == product.args.out == add.args.x
    assert add.args.out == norm.args.x


def test_lower_experts_with_an_addition_add_to_rows_that_are_not_cleared(layers: Layers) -> None:
    def compute(hidden: HiddenStates) -> HiddenStates:
        x = layers.norm(hidden)
        return layers.add(hidden, layers.experts(x, layers.router(x)))

    done = lowered(compute)
    norm, router, experts = (op for op in done.ops if isinstance(op, NativeOp))
    kinds = [op.operation for op in (norm, router, experts)]
    assert kinds == [abi.OP_NORMALIZE, abi.OP_MULTIPLY, abi.OP_COMPUTE_EXPERTS]
    assert experts.args.hidden == norm.args.x


def test_lower_addition_after_a_host_op_is_an_op(layers: Layers) -> None:
    def compute(hidden: HiddenStates) -> HiddenStates:
        return layers.add(hidden, layers.backend.host(torch.neg, [layers.product(layers.norm(hidden))], size=SIZE))

    done = lowered(compute)
    assert isinstance(done.ops[-2], HostCall)
    assert operations(compute) == [abi.OP_NORMALIZE, abi.OP_MULTIPLY, None, abi.OP_ADD]


def test_lower_result_of_a_product_that_is_added_before_it_is_returned_stays(layers: Layers) -> None:
    """The result of a pass is a product that was added to other rows as well."""
    recording = Recording(torch.bfloat16)
    hidden = recording.begin(SIZE)
    product = layers.product(layers.norm(hidden))
    layers.add(hidden, product)
    recording.finish(product)
    done = lower(recording)
    assert [op.operation for op in done.ops if isinstance(op, NativeOp)][-1] == abi.OP_ADD


def test_lower_decoder_layers_share_the_buffers_of_one(layers: Layers) -> None:
    cache = torch.zeros(4, 2, 16 * HEAD_DIM, dtype=torch.bfloat16)

    def layer(hidden: HiddenStates) -> HiddenStates:
        hidden = layers.add(hidden, layers.product(layers.attend(layers.qkv(layers.norm(hidden)), cache, 16)))
        return layers.add(hidden, layers.down(layers.gate_up(layers.norm(hidden))))

    of_a_layer = [
        abi.OP_NORMALIZE, abi.OP_MULTIPLY, abi.OP_ATTEND, abi.OP_MULTIPLY,
        abi.OP_NORMALIZE, abi.OP_MULTIPLY, abi.OP_MULTIPLY,
    ]  # fmt: skip
    assert operations(layer) == of_a_layer
    assert operations(lambda hidden: layer(layer(hidden))) == 2 * of_a_layer
    for depth in (1, 3):
        done = lowered(lambda hidden, depth=depth: _repeat(layer, hidden, depth))
        assert len(done.buffers.shapes) == 5  # normed rows and attention's queries share one


def test_lower_latent_attention_is_an_op(layers: Layers) -> None:
    cache = torch.zeros(4, 16, RANK + HEAD_DIM, dtype=torch.bfloat16)

    def compute(hidden: HiddenStates) -> HiddenStates:
        x = layers.norm(hidden)
        return layers.add(
            hidden, layers.product(layers.attend_latents(layers.queries(x), layers.latents(x), cache, 16))
        )

    expected = [abi.OP_NORMALIZE, abi.OP_MULTIPLY, abi.OP_MULTIPLY, abi.OP_ATTEND_MLA, abi.OP_MULTIPLY]
    assert operations(compute) == expected


@pytest.mark.parametrize("kind", ["plain", "latent"])
def test_num_bytes_is_the_memory_that_reserve_allocates(layers: Layers, kind: str) -> None:
    plain_cache = torch.zeros(4, 2, 16 * HEAD_DIM, dtype=torch.bfloat16)
    latent_cache = torch.zeros(4, 16, RANK + HEAD_DIM, dtype=torch.bfloat16)

    def compute(hidden: HiddenStates) -> HiddenStates:
        x = layers.norm(hidden)
        if kind == "plain":
            attended = layers.attend(layers.qkv(x), plain_cache, 16)
        else:
            attended = layers.attend_latents(layers.queries(x), layers.latents(x), latent_cache, 16)
        x = layers.norm(layers.product(attended))
        return layers.add(hidden, layers.experts(x, layers.router(x)))

    rope = Rope(DefaultRope(10_000.0), HEAD_DIM, dtype=torch.bfloat16, device=CPU)
    program = CpuProgram(layers.backend.library, lowered(compute), rope=rope, num_threads=2, tp=SingleRankGroup())
    for limits in (PassLimits(5, 5, 9), PassLimits(700, 8, 300)):
        program.reserve(limits)
        tensors = [*program._rows, *program._scratch, *program._tables]
        assert 0 <= sum(tensor.nbytes for tensor in tensors) - program.num_bytes(limits) < 512
        rows = [buffer.data_ptr() for buffer in program._rows]
        program.reserve(limits)
        assert [buffer.data_ptr() for buffer in program._rows] == rows


def _repeat(layer: Callable[[HiddenStates], HiddenStates], hidden: HiddenStates, depth: int) -> HiddenStates:
    for _ in range(depth):
        hidden = layer(hidden)
    return hidden
