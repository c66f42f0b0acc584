"""The sampler of a device in steps that begin before the host knows the tokens of the ones before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from fake_device import FakeDevice
from msgspec.structs import replace
from random_grammars import random_grammar, worker_grammars

from eagleray.kernels.cuda.ranking import DeviceRanking
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.ranking import Ranking
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.messages.sampling import Sampling
from eagleray.messages.steps import NewRow, StepPlan, StepResult
from eagleray.models.base import Model
from eagleray.models.registry import load_model
from eagleray.worker.device_sampler import DeviceSampler
from eagleray.worker.downloads import HostDownloads
from eagleray.worker.input_batch import InputBatch
from eagleray.worker.runner import Runner
from eagleray.worker.sampler import HostSampler
from eagleray.worker.startup import sampler_of

CPU = torch.device("cpu")
VOCAB_SIZE = 384
BLOCK_SIZE = 4


class DeviceBackend(TorchBackend):
    """Plain torch, with the ranking of a GPU."""

    @property
    def ranking(self) -> Ranking:
        return DeviceRanking()


def load(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, backend: TorchBackend) -> Model:
    monkeypatch.setattr("eagleray.models.registry.choose_backend", lambda *_, **__: backend)
    return load_model(checkpoint, dtype="auto", load_format="auto", device=CPU, seed=None, on_progress=None)


def make_runner(model: Model, downloads: FakeDevice | HostDownloads) -> Runner:
    cache = KVCache.allocate(model.cache_shape(BLOCK_SIZE), num_blocks=64, dtype=model.dtype, device=CPU)
    rows = InputBatch(num_rows=4, max_model_len=64, block_size=BLOCK_SIZE)
    return Runner(model, cache, rows, sampler_of(model, 4, grammars=worker_grammars(VOCAB_SIZE)), downloads)


def new_row(row: int, prompt: list[int], sampling: Sampling) -> NewRow:
    return NewRow(
        row=row,
        request_id=str(row),
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        num_computed_tokens=0,
        block_ids=list(range(16 * row, 16 * row + 16)),
        sampling=sampling,
    )


def plan(step: int, rows: dict[int, int], *new_rows: NewRow, freed_rows: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(
        step=step,
        freed_rows=list(freed_rows),
        new_rows=list(new_rows),
        new_blocks=[],
        rows=list(rows),
        num_tokens=list(rows.values()),
    )


WORDS = tuple((first, second) for first in range(0, VOCAB_SIZE, 2) for second in (3, 5))[:256]
PLANS = [
    plan(
        0,
        {0: 5, 1: 3, 2: 2},
        new_row(0, [1, 2, 3, 4, 5], Sampling(seed=1, top_p=0.8, temperature=0.7, logprobs=2, prompt_logprobs=1)),
        new_row(1, [7, 8, 9], Sampling(seed=2, top_k=20, bad_words=WORDS, frequency_penalty=1.5)),
        new_row(2, [6, 6], Sampling(seed=3, temperature=0.0, repetition_penalty=3.0)),
    ),
    plan(1, {0: 1, 1: 1, 2: 1}),
    plan(2, {0: 1, 2: 1, 3: 2}, new_row(3, [30, 31, 32], Sampling(seed=0, logprobs=0)), freed_rows=(1,)),
    plan(3, {2: 1, 3: 1, 1: 2}, new_row(1, [50, 51], Sampling(seed=5, presence_penalty=2.0, temperature=2.0))),
    plan(4, {1: 1, 3: 1, 2: 1, 0: 1}),
    plan(5, {0: 1, 1: 1, 2: 1, 3: 1}),
]
"""Requests with features whose state depends on tokens, a chunk of a prompt, and a row that another request gets."""


def with_grammars(step: StepPlan) -> StepPlan:
    """Return the same step, in which every new row has a grammar."""
    new_rows = [
        replace(new, sampling=replace(new.sampling, grammar=random_grammar(new.request_id))) for new in step.new_rows
    ]
    return replace(step, new_rows=new_rows)


def choices(result: StepResult) -> tuple[object, ...]:
    """Return tokens by row, and reported tokens; log-probabilities are rounded."""
    reports = {
        row: (report.token_ids, [round(value, 4) for value in report.logprobs], report.rank)
        for row, report in result.logprobs.items()
    }
    return dict(zip(result.rows, result.token_ids, strict=True)), reports, result.failures


@pytest.mark.parametrize("has_grammars", [False, True])
def test_device_sampler_in_steps_begun_ahead_gives_the_tokens_of_the_host(has_grammars, tmp_path, monkeypatch):
    plans = [with_grammars(step) for step in PLANS] if has_grammars else PLANS
    checkpoint = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    plain = load(monkeypatch, checkpoint, TorchBackend())
    assert isinstance(sampler_of(plain, 4), HostSampler)
    host = make_runner(plain, HostDownloads())
    expected = [host.finish(host.begin(step)) for step in plans]

    model = load(monkeypatch, checkpoint, DeviceBackend())
    assert isinstance(sampler_of(model, 4), DeviceSampler)
    device = FakeDevice(may_wait=has_grammars)
    runner = make_runner(model, device)
    steps = [runner.begin(step) for step in plans]
    assert has_grammars or not any(step.is_done for step in steps)
    results = []
    for step in steps:
        if not step.is_done:
            device.complete()
        results.append(runner.finish(step))
    assert [choices(result) for result in results] == [choices(result) for result in expected]
    assert [len(result.rows) for result in results] == [3, 3, 2, 3, 4, 4]
    scored, wanted = results[0].prompt_logprobs[0], expected[0].prompt_logprobs[0]
    assert scored.token_ids.tolist() == wanted.token_ids.tolist()
