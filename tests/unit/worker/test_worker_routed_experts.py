"""Routed experts of a plan's `capture_rows`, in any order of the batch, on one rank, on several, and in stages."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks, topology

from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.ranking import Ranking
from eagleray.messages.sampling import Sampling
from eagleray.messages.steps import NewRow, StageRoutedExperts, StepPlan, StepResult
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.group import SingleRankGroup
from eagleray.parallel.groups import Groups
from eagleray.parallel.mesh import Mesh
from eagleray.parallel.token_shards import token_shard
from eagleray.worker.downloads import CudaDownloads, HostDownloads
from eagleray.worker.input_batch import InputBatch, build_inputs, token_indices_of
from eagleray.worker.routed_experts import ExpertsReader
from eagleray.worker.runner import Runner
from eagleray.worker.sampler import HostSampler
from eagleray.worker.sampling_state import SamplingState

NUM_LAYERS, TOP_K, VOCAB_SIZE, NUM_ROWS = 2, 3, 8, 6
CPU = torch.device("cpu")


def experts(token_ids, positions, num_experts):
    """Return the choice of every layer: [num_tokens, num_layers, top_k]."""
    ids = 31 * np.asarray(token_ids)[:, None, None] + 7 * np.asarray(positions)[:, None, None]
    return (ids + 100 * np.arange(NUM_LAYERS)[:, None] + np.arange(TOP_K)) % num_experts


def new_trace(num_experts=300, num_layers=NUM_LAYERS):
    return ExpertTrace(num_layers=num_layers, num_experts=num_experts, top_k=TOP_K, device=CPU, keeps_ids=True)


def record(trace, chosen):
    for layer in range(NUM_LAYERS):
        trace.record(layer, torch.from_numpy(chosen[:, layer]))


class RoutingModel:
    """A model that always samples token 0. `others_work` says whether another engine of the group is busy."""

    def __init__(self, groups=None, *, num_experts=300, others_work=False):
        self.groups = groups or Groups.single()
        self.ranking = Ranking()
        self.trace = new_trace(num_experts)
        self.has_sequence_shards = False
        self.num_experts = num_experts
        self.others_work = others_work
        self.num_passes = self.num_balanced = 0

    def begin_step(self, is_idle, num_tokens):
        assert not (is_idle and num_tokens)
        return self.others_work or not is_idle

    def decode(self, rows, cache, table):
        return None

    def forward(self, batch, cache):
        self.num_passes += 1
        record(self.trace, experts(batch.token_ids, batch.positions, self.num_experts))
        return torch.zeros(batch.num_tokens, 4)

    def logits(self, hidden):
        return torch.zeros(len(hidden), VOCAB_SIZE)

    def rebalance_if_due(self):
        self.num_balanced += 1


def first_stage() -> Groups:
    """Return the groups of rank 0 of two stages."""
    tp = SingleRankGroup()
    return Groups(Mesh(rank=0, pp_size=2), tp, None, ExpertGroup(tp))


def make_rows():
    return InputBatch(num_rows=NUM_ROWS, max_model_len=64, block_size=4)


def make_runner(model):
    state = SamplingState(num_rows=NUM_ROWS, vocab_size=VOCAB_SIZE, device=CPU)
    return Runner(model, None, make_rows(), HostSampler(state, Ranking()), HostDownloads())


def run_step(runner, plan):
    return runner.finish(runner.begin(plan))


def start(row, token_ids):
    return NewRow(
        row=row,
        request_id=str(row),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=0,
        block_ids=list(range(16 * row, 16 * row + 16)),
        sampling=Sampling(seed=0, temperature=0.0),
    )


def plan(step, rows, *, new_rows=(), capture_rows=(), is_idle=False):
    return StepPlan(
        step=step,
        freed_rows=[],
        new_rows=list(new_rows),
        new_blocks=[],
        rows=list(rows),
        num_tokens=list(rows.values()),
        capture_rows=list(capture_rows),
        is_idle=is_idle,
    )


def test_token_indices_of_are_in_requested_order():
    rows = make_rows()
    for row, count in {3: 4, 1: 1, 5: 2, 0: 1}.items():
        rows.add_row(start(row, [1] * count))
    inputs = build_inputs(plan(0, {3: 4, 1: 1, 5: 2, 0: 1}), rows)
    assert inputs.rows.tolist() == [1, 0, 3, 5], "rows of one token come first"
    assert token_indices_of([3, 0], inputs).tolist() == [2, 3, 4, 5, 1]
    assert token_indices_of([5], inputs).tolist() == [6, 7]
    assert token_indices_of([1, 0], inputs).tolist() == [0, 1]


def test_build_inputs_without_rows_is_empty():
    inputs = build_inputs(plan(0, {}), make_rows())
    assert inputs.batch.num_tokens == 0 and inputs.batch.query_start_loc.tolist() == [0]
    assert len(inputs.sampling_indices) == len(inputs.rows) == 0


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (512, np.uint16)])
def test_runner_capture_rows_report_their_experts_and_slots(num_experts, dtype):
    model = RoutingModel(num_experts=num_experts)
    runner = make_runner(model)
    prompts = {4: [5, 6, 7], 2: [1], 0: [2, 3], 1: [4]}
    starts = [start(row, tokens) for row, tokens in prompts.items()]
    first = run_step(runner, plan(0, {4: 3, 2: 1, 0: 1, 1: 1}, new_rows=starts, capture_rows=[4, 0, 1]))
    second = run_step(runner, plan(1, {4: 1, 2: 1, 0: 1, 1: 1}, capture_rows=[4, 2]))
    third = run_step(runner, plan(2, {2: 1, 4: 1}, capture_rows=[2, 4]))
    assert first.routed_experts.dtype == second.routed_experts.dtype == dtype
    assert np.array_equal(first.routed_experts, experts([5, 6, 7, 2, 4], [0, 1, 2, 0, 0], num_experts))
    assert np.array_equal(second.routed_experts, experts([0, 0], [3, 1], num_experts))
    assert np.array_equal(third.routed_experts, experts([0, 0], [2, 4], num_experts))
    expected_tokens = [[(4, 0), (4, 1), (4, 2), (0, 0), (1, 0)], [(4, 3), (2, 1)], [(2, 2), (4, 4)]]
    for result, expected in zip((first, second, third), expected_tokens, strict=True):
        assert result.routed_slots.tolist() == [row * 16 * 4 + position for row, position in expected]
    assert first.any_engine_busy and model.num_balanced == 3


def test_runner_without_capture_rows_reports_no_experts():
    result = run_step(make_runner(RoutingModel()), plan(0, {0: 2}, new_rows=[start(0, [1, 2])]))
    assert result.routed_experts is None and result.routed_slots is None


def test_runner_first_stage_reports_its_layers():
    runner = make_runner(RoutingModel(first_stage()))
    reply = run_step(runner, plan(7, {0: 2, 3: 1}, new_rows=[start(0, [1, 2]), start(3, [4])], capture_rows=[0, 3]))
    assert isinstance(reply, StageRoutedExperts) and reply.step == 7
    assert np.array_equal(reply.routed_experts, experts([1, 2, 4], [0, 1, 0], 300))
    assert run_step(runner, plan(8, {5: 1}, new_rows=[start(5, [1])])) is None


@pytest.mark.parametrize("others_work", [False, True])
def test_runner_idle_step_runs_layers_only_if_others_work(others_work):
    model = RoutingModel(others_work=others_work)
    result = run_step(make_runner(model), plan(0, {}, is_idle=True))
    assert result == StepResult(step=0, rows=[], token_ids=[], any_engine_busy=others_work)
    assert model.num_passes == model.num_balanced == int(others_work)


def test_experts_reader_result_survives_next_pass():
    trace = new_trace()
    reader = ExpertsReader(trace, SingleRankGroup(), has_sequence_shards=False)
    record(trace, experts([1, 2], [0, 1], 300))
    found = reader.read(np.array([1]), 2)
    record(trace, experts([6, 6], [8, 9], 300))
    assert np.array_equal(found, experts([2], [1], 300))


def test_experts_reader_stage_without_moe_layers_is_empty():
    reader = ExpertsReader(new_trace(num_layers=0), SingleRankGroup(), has_sequence_shards=False)
    assert reader.read(np.array([0, 1, 2]), 5).shape == (3, 0, TOP_K)


def read_shards(steps, groups):
    """Return the reports of this rank for steps (num_tokens, indices) of which it routes its shard of the tokens."""
    trace = new_trace()
    reader = ExpertsReader(trace, groups.tp, has_sequence_shards=True)
    reports = []
    for num_tokens, indices in steps:
        own = token_shard(num_tokens, groups.tp)
        record(trace, experts(list(own), [0] * len(own), 300))
        found = reader.read(np.array(indices, dtype=np.int64), num_tokens)
        reports.append(None if found is None else found.numpy())
    return reports


@st.composite
def sharded_steps(draw):
    num_tokens = draw(st.integers(1, 20))
    indices = draw(st.lists(st.integers(0, num_tokens - 1), unique=True, min_size=1))
    return num_tokens, indices


@settings(max_examples=15, deadline=None)
@given(steps=st.lists(sharded_steps(), min_size=1, max_size=20), size=st.integers(2, 3))
def test_experts_reader_shards_are_gathered_in_requested_order(steps, size):
    first, *others = run_ranks(partial(read_shards, steps), topology(tp=size))
    assert all(reports == [None] * len(steps) for reports in others)
    for (_, indices), report in zip(steps, first, strict=True):
        assert report.dtype == np.uint16
        assert np.array_equal(report, experts(indices, [0] * len(indices), 300))


def test_experts_reader_replicated_trace_is_reported_once():
    def read(groups):
        trace = new_trace()
        record(trace, experts([1, 2], [0, 1], 300))
        found = ExpertsReader(trace, groups.tp, has_sequence_shards=False).read(np.array([1]), 2)
        return None if found is None else found.tolist()

    assert run_ranks(read, topology(tp=2)) == [experts([2], [1], 300).tolist(), None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_downloads_of_several_steps_share_no_memory():
    device = torch.device("cuda")
    trace = ExpertTrace(num_layers=NUM_LAYERS, num_experts=300, top_k=TOP_K, device=device, keeps_ids=True)
    reader = ExpertsReader(trace, SingleRankGroup(), has_sequence_shards=False)
    downloads, reports = CudaDownloads(device), []
    for step in range(20):
        chosen = experts(range(50), [step] * 50, 300)
        for layer in range(NUM_LAYERS):
            trace.record(layer, torch.from_numpy(chosen[:, layer]).to(device))
        reports.append((chosen[step:], downloads.begin([reader.read(np.arange(step, 50), 50)])))
    assert all(np.array_equal(expected, download.wait()[0]) for expected, download in reports)
