"""The trace of the experts that passes chose."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagleray.kernels.expert_trace import ExpertTrace

CPU = torch.device("cpu")


def make(num_experts: int = 8, *, keeps_ids: bool = True, num_layers: int = 3) -> ExpertTrace:
    return ExpertTrace(num_layers=num_layers, num_experts=num_experts, top_k=2, device=CPU, keeps_ids=keeps_ids)


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, torch.uint8), (256, torch.uint8), (257, torch.uint16)])
def test_expert_trace_dtype_is_the_smallest_that_fits(num_experts: int, dtype: torch.dtype) -> None:
    trace = make(num_experts)
    trace.record(1, torch.tensor([[num_experts - 1, 0]], dtype=torch.int32))
    found = trace.ids([0], 1)
    assert found.dtype == trace.dtype == dtype
    assert found.numpy().tolist() == [[[0, 0], [num_experts - 1, 0], [0, 0]]]


def test_expert_trace_has_counts_of_all_passes_and_ids_of_the_last() -> None:
    trace = make()
    address = trace.counts.data_ptr()
    passes = [torch.randint(0, 8, (3, rows, 2)) for rows in (5, 200, 1, 0, 70)]
    for chosen in passes:
        for layer in range(3):
            trace.record(layer, chosen[layer])
        everything = trace.ids(range(chosen.shape[1]), chosen.shape[1])
        assert torch.equal(everything.long(), chosen.transpose(0, 1))
    expected = [torch.cat([chosen[layer] for chosen in passes]).flatten().bincount(minlength=8) for layer in range(3)]
    assert torch.equal(trace.counts, torch.stack(expected))
    assert trace.counts.data_ptr() == address
    assert torch.equal(trace.ids(np.array([3, 0, 3]), 70).long(), passes[-1].transpose(0, 1)[[3, 0, 3]])
    assert trace.ids(torch.tensor([], dtype=torch.int64), 70).shape == (0, 3, 2)


def test_expert_trace_next_pass_leaves_returned_ids() -> None:
    trace = make()
    trace.record(0, torch.tensor([[1, 2]]))
    ids = trace.ids([0], 1)
    trace.record(0, torch.tensor([[3, 4]]))
    assert ids[0, 0].tolist() == [1, 2]


def test_expert_trace_reserve_keeps_ids_and_memory() -> None:
    trace = make()
    trace.record(0, torch.tensor([[1, 2]]))
    trace.reserve(1000)
    assert trace.buffer(2).shape[0] >= 1000
    assert trace.ids([0], 1)[0, 0].tolist() == [1, 2]
    address = trace.buffer(2).data_ptr()
    trace.reserve(10)
    assert trace.buffer(2).data_ptr() == address


def test_expert_trace_without_ids_keeps_counts_alone() -> None:
    trace = make(keeps_ids=False)
    trace.reserve(100)
    trace.record(0, torch.tensor([[1, 2]]))
    assert trace.buffer(0).numel() == 0
    assert trace.counts.sum() == 2


def test_expert_trace_too_many_experts_for_ids_raises() -> None:
    make(70_000, keeps_ids=False)
    with pytest.raises(AssertionError):
        make(65_536)
