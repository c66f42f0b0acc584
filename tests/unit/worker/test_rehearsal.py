"""The largest steps run without a cache of the real size, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks, topology

from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.choose import choose_backend
from eagleray.kernels.forward_batch import ForwardBatch, PassLimits
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.models.base import Model
from eagleray.models.moe.layout import ExpertOptions
from eagleray.models.registry import load_model
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.group import RehearsalGroup, SingleRankGroup
from eagleray.parallel.groups import Groups
from eagleray.parallel.mesh import EnginePosition, Mesh
from eagleray.worker.rehearsal import decode_lens, prompt_lens, rehearse
from eagleray.worker.startup import sampler_of

CPU = torch.device("cpu")
LIMITS = PassLimits(num_tokens=40, num_rows=6, num_positions=32)
FAMILIES = ["qwen3", "gpt_oss", "qwen3_moe", "deepseek_v3"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(directory: Path, groups: Groups | None = None, **options: Any) -> Model:
    groups = Groups.single() if groups is None else groups
    defaults: dict[str, Any] = {"dtype": "auto", "load_format": "auto", "device": CPU, "seed": None}
    return load_model(directory, on_progress=None, groups=groups, **defaults, **options)


def batches_of(model: Model, patch: pytest.MonkeyPatch) -> list[ForwardBatch]:
    """Return the batches of a rehearsal."""
    seen, forward = [], Model.forward

    def record(self: Model, batch: ForwardBatch, cache: Any) -> torch.Tensor:
        seen.append(batch)
        return forward(self, batch, cache)

    patch.setattr(Model, "forward", record)
    rehearse(model, sampler_of(model, LIMITS.num_rows), LIMITS, block_size=8, num_logprobs=3)
    return seen


@pytest.mark.parametrize("kernels", [choose_backend, lambda *_, **__: TorchBackend()], ids=["cpu", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rehearse_runs_largest_steps_and_counts_no_experts(
    family: str, kernels: KernelBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagleray.models.registry.choose_backend", kernels)
    model = load(make_checkpoint(tmp_path, family, tokenizer=False))
    prompts, decodes = batches_of(model, monkeypatch)
    assert (prompts.num_tokens, decodes.num_tokens) == (40, 6)
    assert prompts.seq_lens.tolist() == [32, 32] and decodes.num_decodes == 6
    assert max(prompts.slot_mapping) < 8
    assert model.trace is None or int(model.trace.counts.sum()) == 0


def test_rehearse_of_ranks_and_stages_ends(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)

    def work(groups: Groups) -> bool:
        model = load(checkpoint, groups)
        rehearse(model, sampler_of(model, LIMITS.num_rows), LIMITS, block_size=8, num_logprobs=3)
        return True

    assert all(run_ranks(work, topology(tp=2, pp=2), ranks_sample_alike=True))


@pytest.mark.parametrize("dispatch", ["all-gather", "all-to-all"])
def test_rehearse_with_experts_of_other_engines_needs_no_other_engine(
    dispatch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most tokens that can reach this rank: every engine has as many as this one."""
    tp = SingleRankGroup()
    experts = ExpertGroup(tp, engines=EnginePosition(rank=1, size=2))
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    model = load(checkpoint, Groups(Mesh(), tp, None, experts), experts=ExpertOptions(dispatch=dispatch))
    most, gather = [], RehearsalGroup.all_gather

    def all_gather(self: RehearsalGroup, x: torch.Tensor, counts: Any) -> torch.Tensor:
        most.append(sum(counts))
        return gather(self, x, counts)

    monkeypatch.setattr(RehearsalGroup, "all_gather", all_gather)
    rehearse(model, sampler_of(model, LIMITS.num_rows), LIMITS, block_size=8, num_logprobs=3)
    assert max(most) == (80 if dispatch == "all-gather" else 2)
    assert experts._group is None, "the real group is still to be joined"


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 60))
def test_lens_of_largest_steps_stay_within_the_limits(num_tokens: int, num_rows: int, num_positions: int) -> None:
    limits = PassLimits(max(num_tokens, num_rows), num_rows, num_positions)
    for query_lens, seq_lens in (prompt_lens(limits), decode_lens(limits)):
        assert 0 < len(query_lens) == len(seq_lens) <= num_rows and sum(query_lens) <= limits.num_tokens
        assert all(0 < count <= end <= num_positions for count, end in zip(query_lens, seq_lens, strict=True))
        ones = query_lens.count(1)
        assert query_lens[:ones] == [1] * ones, "rows of one token come first"
    assert sum(prompt_lens(limits)[0]) == min(limits.num_tokens, num_rows * num_positions)
    assert len(decode_lens(limits)[0]) == num_rows


# ---- the estimate on CPUs


@pytest.mark.parametrize("family", FAMILIES)
def test_step_bytes_grow_with_tokens_and_rows(family: str, tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, family, tokenizer=False))
    few = model.step_bytes(PassLimits(64, 8, 64), 8)
    assert few > 64 * model.spec.hidden_size * model.dtype.itemsize
    more_rows = model.step_bytes(PassLimits(64, 64, 64), 8)
    assert more_rows - few >= 56 * model.spec.vocab_size * 4
    more_tokens = model.step_bytes(PassLimits(512, 8, 64), 8)
    assert more_tokens - few > 448 * model.spec.hidden_size * model.dtype.itemsize


def test_step_bytes_of_a_rank_are_fewer_than_of_the_whole_model(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3", tokenizer=False)

    def step_bytes(groups: Groups) -> int:
        return load(checkpoint, groups).step_bytes(PassLimits(64, 64, 64), 8)

    whole = step_bytes(Groups.single())
    first, second = run_ranks(step_bytes, topology(tp=2))
    assert second < first < whole


def test_step_bytes_grow_with_the_engines_that_exchange_tokens(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)

    def step_bytes(num_engines: int) -> int:
        tp = SingleRankGroup()
        groups = Groups(Mesh(), tp, None, ExpertGroup(tp, engines=EnginePosition(rank=0, size=num_engines)))
        model = load(checkpoint, groups, experts=ExpertOptions(dispatch="all-gather"))
        return model.step_bytes(PassLimits(64, 8, 64), 8)

    assert step_bytes(1) < step_bytes(2) < step_bytes(4)
