"""Every tensor-parallel rank of the last stage samples, with the same tokens, which no rank sends to another."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from fake_device import ArgmaxSampler, FakeDevice
from harness import LocalEngine, random_prompt
from random_grammars import grammar_rows, random_grammar, worker_grammars
from ranks import run_ranks, topology

from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.ranking import Ranking
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.messages.steps import StepPlan, StepResult
from eagleray.models.registry import load_model
from eagleray.parallel.groups import Groups
from eagleray.worker.downloads import DownloadQueue, HostDownloads
from eagleray.worker.input_batch import ExpectedTokens, InputBatch, IntArray
from eagleray.worker.runner import Runner
from eagleray.worker.sampler import HostSampler, TokenSampler
from eagleray.worker.sampling_state import SamplingState

CPU = torch.device("cpu")
NUM_ROWS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 4, 64, 4, 17, 385

Tokens = dict[int, int]
"""Token of each row that samples in a step."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary that two or four ranks cannot divide."""
    return make_checkpoint(tmp_path_factory.mktemp("made"), "qwen3", tokenizer=False, vocab_size=VOCAB_SIZE)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def steps_of_engine(
    checkpoint: Path, patch: pytest.MonkeyPatch, sampling: Callable[[random.Random], dict[str, Any]]
) -> tuple[list[StepPlan], list[Tokens]]:
    """Return the plans of an engine with one worker, whose cache is too small for all requests, and the tokens of each
    step that samples."""
    plans, results = [], []
    begin, finish = Runner.begin, Runner.finish

    def record(result: StepResult) -> StepResult:
        results.append(dict(zip(result.rows, result.token_ids, strict=True)))
        return result

    def record_begin(runner: Runner, plan: StepPlan) -> Any:
        plans.append(plan)
        step = begin(runner, plan)
        return record(step) if isinstance(step, StepResult) else step

    def record_finish(runner: Runner, step: Any) -> Any:
        return record(finish(runner, step))

    with patch.context() as context:
        context.setattr(Runner, "begin", record_begin)
        context.setattr(Runner, "finish", record_finish)
        rng = random.Random(0)
        options = {"block_size": BLOCK_SIZE, "num_kv_blocks": NUM_BLOCKS, "max_num_seqs": NUM_ROWS}
        options |= {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 16, "executor": "in-process"}
        with LocalEngine(checkpoint, **options) as engine:
            for index in range(12):
                prompt = random_prompt(index, rng.randint(1, 20), VOCAB_SIZE)
                engine.add(f"r{index}", prompt, max_tokens=rng.randint(1, 16), **sampling(rng))
            engine.run()
            assert engine.core.scheduler.stats().num_preemptions > 0, "the cache is too large for this test"
    return plans, [tokens for tokens in results if tokens]


class RecordingBatch(InputBatch):
    """Notes the tokens that become known in its rows."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.known: list[Tokens] = []

    def set_tokens(self, expected: ExpectedTokens, token_ids: IntArray) -> None:
        self.known.append(dict(zip(expected.rows.tolist(), token_ids.tolist(), strict=True)))
        super().set_tokens(expected, token_ids)


def replay(
    checkpoint: Path,
    plans: Sequence[StepPlan],
    make_sampler: Callable[[], TokenSampler],
    make_downloads: Callable[[], DownloadQueue] = HostDownloads,
    *,
    ahead: int = 0,
    tp: int = 2,
    pp: int = 1,
) -> list[list[Tokens]]:
    """Return the tokens of each step that samples, by rank. `ahead`: steps that begin before the oldest one is
    finished."""

    def work(groups: Groups) -> list[Tokens]:
        options = {"dtype": "auto", "load_format": "auto", "device": CPU, "seed": None, "on_progress": None}
        model = load_model(checkpoint, groups=groups, **options)
        cache = KVCache.allocate(model.cache_shape(BLOCK_SIZE), num_blocks=NUM_BLOCKS, dtype=model.dtype, device=CPU)
        batch = RecordingBatch(num_rows=NUM_ROWS, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)
        runner = Runner(model, cache, batch, make_sampler(), make_downloads())
        unfinished, reported = [], []
        for plan in plans:
            unfinished.append(runner.begin(plan))
            if len(unfinished) > ahead:
                reported.append(runner.finish(unfinished.pop(0)))
        reported += [runner.finish(step) for step in unfinished]
        assert all((result is not None) == groups.mesh.is_sampler for result in reported)
        assert pp > 1 or not groups.tp.bytes_sent["broadcast"], "a rank sent its tokens to another"
        return batch.known

    return run_ranks(work, topology(tp=tp, pp=pp), ranks_sample_alike=True)


def host_sampler() -> TokenSampler:
    return HostSampler(SamplingState(num_rows=NUM_ROWS, vocab_size=VOCAB_SIZE, device=CPU), Ranking())


def random_sampling(rng: random.Random) -> dict[str, Any]:
    return {
        "seed": rng.randrange(1 << 30),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "top_p": rng.choice([0.9, 1.0]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "presence_penalty": rng.choice([0.0, 0.5]),
    }


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (2, 2)])
def test_runner_ranks_that_sample_alike_have_the_tokens_of_one_worker(checkpoint, monkeypatch, tp, pp):
    plans, expected = steps_of_engine(checkpoint, monkeypatch, random_sampling)
    known = replay(checkpoint, plans, host_sampler, tp=tp, pp=pp)
    assert known[-tp:] == [expected] * tp


def test_runner_ranks_that_sample_alike_begin_steps_ahead_without_tokens_of_others(checkpoint, monkeypatch):
    monkeypatch.setattr("eagleray.models.registry.choose_backend", lambda *_, **__: TorchBackend())
    plans, expected = steps_of_engine(checkpoint, monkeypatch, lambda _: {})
    devices: list[FakeDevice] = []

    def make_device() -> FakeDevice:
        devices.append(FakeDevice())
        return devices[-1]

    known = replay(checkpoint, plans, lambda: ArgmaxSampler(NUM_ROWS), make_device, ahead=2)
    assert known == [expected, expected]
    assert [device.most_pending for device in devices] == [3, 3], "every rank runs ahead by itself"


def test_runner_ranks_that_sample_alike_follow_grammars_by_themselves(checkpoint, monkeypatch):
    def some_grammars(rng: random.Random) -> dict[str, Any]:
        return rng.choice([{}, {"grammar": random_grammar("a")}, {"grammar": random_grammar("b")}])

    monkeypatch.setattr("eagleray.models.registry.choose_backend", lambda *_, **__: TorchBackend())
    monkeypatch.setattr("eagleray.worker.worker._grammars_of", lambda _: worker_grammars(VOCAB_SIZE))
    plans, expected = steps_of_engine(checkpoint, monkeypatch, some_grammars)
    known = replay(checkpoint, plans, lambda: ArgmaxSampler(NUM_ROWS, grammar_rows(VOCAB_SIZE)), FakeDevice, ahead=2)
    # Tokens that a grammar waits for become known before those of earlier steps without it.
    assert [sorted(steps, key=str) for steps in known] == [sorted(expected, key=str)] * 2
    assert known[0] != expected
