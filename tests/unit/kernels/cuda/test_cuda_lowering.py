"""The operations that launches for NVIDIA GPUs merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagleray.kernels.backend import HiddenStates
from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.cuda.launch import LaunchKind, LoweredLaunches
from eagleray.kernels.cuda.lowering import AddExperts, AddNorm, fuse, lower
from eagleray.kernels.params import AttentionParams, RouterParams
from eagleray.kernels.recording import AddOp, ExpertsOp, LinearOp, NormOp, Recording

SIZE, INNER, NUM_EXPERTS, HEAD_DIM = 16, 24, 4, 16
CPU = torch.device("cpu")
ATTENTION = AttentionParams(
    num_heads=2, num_kv_heads=1, head_dim=HEAD_DIM, window=None, q_norm=None, k_norm=None, norm_eps=1e-6
)

Compute = Callable[[HiddenStates], HiddenStates]


class Model:
    """Operations of a small model in bfloat16."""

    def __init__(self) -> None:
        self.backend = CudaBackend(torch.bfloat16)
        self.add = self.backend.add
        self.norm = self.backend.norm(torch.ones(SIZE), 1e-6)
        self.product = self.linear(SIZE, SIZE)
        self.qkv, self.router = self.linear(4 * HEAD_DIM, SIZE), self.linear(NUM_EXPERTS, SIZE)
        self.exact_router = self.backend.exact_linear(torch.zeros(NUM_EXPERTS, SIZE, dtype=torch.bfloat16))
        self.project = self.linear(SIZE, 2 * HEAD_DIM)
        self.attend = self.backend.self_attention(ATTENTION)
        self.gate_up, self.down = self.gated(), self.linear(SIZE, INNER)
        router = RouterParams(top_k=2, renormalize=True, round_weights=False)
        gate_up, down = (
            [make() for _ in range(NUM_EXPERTS)] for make in (self.gated, lambda: self.linear(SIZE, INNER))
        )
        self.choose = self.backend.experts(router, gate_up, down)

    def linear(self, out_features: int, in_features: int) -> Any:
        return self.backend.linear(torch.zeros(out_features, in_features, dtype=torch.bfloat16), None)

    def gated(self) -> Any:
        return self.backend.gated_linear(torch.zeros(2 * INNER, SIZE, dtype=torch.bfloat16), None)

    def experts(self, x: HiddenStates) -> HiddenStates:
        return self.choose(x, self.router(x))

    def layer(self, hidden: HiddenStates) -> HiddenStates:
        cache = torch.zeros(4, 16, 2, HEAD_DIM, dtype=torch.bfloat16)
        hidden = self.add(hidden, self.project(self.attend(self.qkv(self.norm(hidden)), cache, 16)))
        return self.add(hidden, self.down(self.gate_up(self.norm(hidden))))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def record(compute: Compute) -> Recording:
    recording = Recording(torch.bfloat16)
    recording.finish(compute(recording.begin(SIZE)))
    return recording


def kinds(compute: Compute) -> list[type]:
    return [type(op) for op in fuse(record(compute))]


def lowered(compute: Compute) -> LoweredLaunches:
    return lower(record(compute), CPU)


def test_fuse_addition_before_a_norm_is_part_of_it(model: Model) -> None:
    assert kinds(lambda x: model.norm(model.add(x, model.product(model.norm(x))))) == [NormOp, LinearOp, AddNorm]


def test_fuse_addition_before_a_norm_of_another_value_stays(model: Model) -> None:
    def compute(x: HiddenStates) -> HiddenStates:
        first, product = model.product(model.norm(x)), model.product(model.norm(x))
        model.add(x, product)
        return model.norm(first)

    assert kinds(compute)[-2:] == [AddOp, NormOp]


def test_fuse_experts_before_an_addition_add_to_its_total(model: Model) -> None:
    def compute(x: HiddenStates) -> HiddenStates:
        return model.norm(model.add(x, model.experts(model.norm(x))))

    assert kinds(compute) == [NormOp, LinearOp, AddExperts, NormOp]


def test_fuse_experts_before_an_addition_to_their_result_stay(model: Model) -> None:
    def compute(hidden: HiddenStates) -> HiddenStates:
        x = model.norm(hidden)
        shared = model.product(x)
        return model.add(hidden, model.add(model.experts(x), shared))

    assert kinds(compute)[-3:] == [ExpertsOp, AddOp, AddOp]


def test_fuse_experts_whose_result_is_read_again_stay(model: Model) -> None:
    def compute(hidden: HiddenStates) -> HiddenStates:
        out = model.experts(model.norm(hidden))
        return model.add(model.add(hidden, out), out)

    assert kinds(compute)[-3:] == [ExpertsOp, AddOp, AddOp]


def test_lower_decoder_layer_makes_nine_launches(model: Model) -> None:
    """Norm, product, cache write, attention, product, addition with norm, product, gate, product."""
    done = lowered(lambda hidden: model.layer(model.layer(hidden)))
    assert [launch.kind for launch in done.launches].count(LaunchKind.ATTENTION) == 2
    assert len(done.launches) == 2 * 9 + 1  # the last addition has no norm behind it


def test_lower_addition_and_norm_keep_the_hidden_state_in_its_buffer(model: Model) -> None:
    recording = record(lambda hidden: model.layer(model.layer(hidden)))
    done = lower(recording, CPU)
    assert recording.source is not None
    assert done.buffers.numbers[recording.source] == done.buffers.numbers[recording.result]


def test_lower_exact_product_of_rounded_rows_computes_in_float32(model: Model) -> None:
    done = lowered(lambda hidden: model.exact_router(model.norm(hidden)))
    copied = done.launches[1].access.writes[0]
    assert copied.is_float32 and done.recording.result.is_float32
