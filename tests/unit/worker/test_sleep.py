"""A worker returns the memory of its weights and its cache to the system, and computes the same when it is awake."""

from __future__ import annotations

import gc
import json
import mmap
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from ranks import run_ranks, topology
from torch import Tensor

from eagleray.config.build import build_config
from eagleray.errors import ConfigError
from eagleray.identity import EngineId, WorkerId
from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.forward_batch import ForwardBatch, PassLimits
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.memory_release import ReleasableStorages, release_pages
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.kernels.torch.onednn import OneDnnBackend
from eagleray.messages.steps import AllocateCache, Call, JoinGroup, LoadModel, OpenGroup, StepPlan
from eagleray.messages.workers import EngineOpened, GroupOpened
from eagleray.models import registry
from eagleray.models.base import Model
from eagleray.models.registry import load_model
from eagleray.parallel.groups import Groups
from eagleray.worker import sleep as sleep_module
from eagleray.worker import worker as worker_module
from eagleray.worker.runner import UnfinishedStep
from eagleray.worker.sleep import SleepableMemory
from eagleray.worker.worker import ServingWorker, Worker

CPU = torch.device("cpu")
BLOCK_SIZE = 16
LEAST = 0.95
"""Least part of the memory that is to be returned."""
NOISE = 4 << 20
"""Bytes by which the memory of the process may grow meanwhile, by a huge page or two of something else."""


def load(directory: Path, seed: int, **options: Any) -> Model:
    return load_model(
        directory, dtype="float32", load_format="dummy", device=CPU, seed=seed, on_progress=None, **options
    )


class Running:
    """A model with a cache of one sequence, and its memory."""

    def __init__(self, model: Model, num_blocks: int = 8) -> None:
        self.model = model
        self.cache = KVCache.allocate(
            model.cache_shape(BLOCK_SIZE), num_blocks=num_blocks, dtype=model.cache_dtype, device=CPU
        )
        self.memory = SleepableMemory(model, self.cache, PassLimits(64, 2, 64), None)
        self.num_prepared = 0
        warm_up = model.warm_up

        def prepare(*arguments: Any) -> None:
            self.num_prepared += 1
            warm_up(*arguments)

        model.warm_up = prepare  # type: ignore[method-assign]

    def logits(self) -> Tensor:
        """Return the hidden states, and the logits where they are gathered, of a prompt and the token behind it."""
        parts = []
        for positions in (np.arange(40, dtype=np.int32), np.arange(40, 41, dtype=np.int32)):
            batch = ForwardBatch(
                token_ids=positions * 7 % 300,
                positions=positions,
                slot_mapping=positions,
                block_table=np.arange(3, dtype=np.int32)[None],
                seq_lens=positions[-1:] + 1,
                query_start_loc=np.array([0, len(positions)], np.int32),
                num_decodes=int(len(positions) == 1),
            )
            self.model.begin_step(False, len(positions))
            hidden = self.model.forward(batch, self.cache).clone()
            logits = self.model.logits(hidden)
            parts += [part.flatten().clone() for part in (hidden, logits) if part is not None]
        return torch.cat(parts)


@torch.inference_mode()
def copy_weights(source: list[Tensor], model: Model) -> None:
    for target, part in zip(model.storage(), source, strict=True):
        target.copy_(part)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("made"), "qwen3", tokenizer=False)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_storage_of_model_holds_all_weights(family: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, family, tokenizer=False)
    running, other = Running(load(directory, 1)), Running(load(directory, 2))
    expected = other.logits()
    assert not torch.equal(running.logits(), expected)
    copy_weights(other.model.storage(), running.model)
    assert torch.equal(running.logits(), expected)


@pytest.mark.parametrize("make", [None, TorchBackend, OneDnnBackend])
def test_sleep_level_2_then_weights_copied_back_gives_equal_logits(
    make: type[TorchBackend] | None, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if make is not None:
        monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: make())
    running = Running(load(checkpoint, 1))
    expected, kept = running.logits(), [part.clone() for part in running.model.storage()]
    addresses = [part.data_ptr() for part in running.model.storage()]
    running.memory.sleep(("kv_cache", "weights"), 2)
    assert not running.memory.is_awake
    assert not any(part.any() for part in (*running.model.storage(), *running.cache.layers))
    running.memory.wake_up(("weights",))
    assert not running.memory.is_awake and running.num_prepared == 0
    copy_weights(kept, running.model)
    running.memory.wake_up(("weights", "kv_cache", "scheduling"))
    assert running.memory.is_awake and running.num_prepared == 1
    assert torch.equal(running.logits(), expected)
    assert [part.data_ptr() for part in running.model.storage()] == addresses


def test_sleep_cache_of_a_draft_model_sleeps_too(checkpoint: Path) -> None:
    running = Running(load(checkpoint, 1))
    shape, dtype = running.model.cache_shape(BLOCK_SIZE), running.model.cache_dtype
    draft_cache = KVCache.allocate(shape, num_blocks=8, dtype=dtype, device=CPU)
    memory = SleepableMemory(running.model, running.cache, PassLimits(64, 2, 64), None, draft_cache=draft_cache)
    for layer in (*running.cache.layers, *draft_cache.layers):
        layer.fill_(1.0)
    memory.sleep(("weights",), 1)
    assert all(layer.all() for layer in draft_cache.layers)
    memory.sleep(("kv_cache",), 1)
    assert not any(layer.any() for layer in (*running.cache.layers, *draft_cache.layers))


def test_sleep_level_1_keeps_weights_and_loses_the_cache(checkpoint: Path) -> None:
    running = Running(load(checkpoint, 1))
    expected = running.logits()
    running.memory.sleep(("kv_cache", "weights"), 1)
    assert not any(layer.any() for layer in running.cache.layers)
    running.memory.wake_up(("kv_cache", "weights"))
    assert torch.equal(running.logits(), expected)


def test_sleep_deeper_drops_weights_that_level_1_kept(checkpoint: Path) -> None:
    running = Running(load(checkpoint, 1))
    assert running.memory.sleep(("weights",), 1) == 0
    assert any(part.any() for part in running.model.storage())
    assert running.memory.sleep(("weights",), 2) > 0
    assert not any(part.any() for part in running.model.storage())


def test_sleep_of_the_steps_alone_keeps_everything(checkpoint: Path) -> None:
    running = Running(load(checkpoint, 1))
    expected = running.logits()
    assert running.memory.sleep(("scheduling",), 2) == 0 and running.memory.is_awake
    running.memory.wake_up(("scheduling",))
    assert running.num_prepared == 0
    assert torch.equal(running.logits(), expected)


def test_sleep_returns_memory_of_weights_and_cache_to_the_system(checkpoint: Path, tmp_path: Path) -> None:
    """A model and a cache of some megabytes, of which small tensors share pages with others."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 8192}
    config = json.loads((checkpoint / "config.json").read_text()) | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    running = Running(load(tmp_path, 1), num_blocks=1200)
    for layer in running.cache.layers:
        layer.fill_(1.0)
    running.logits()
    parts = {part.data_ptr(): part for part in running.model.storage()}.values()  # the head shares the embedding's
    num_bytes = {
        "weights": sum(part.nbytes for part in parts),
        "kv_cache": sum(layer.nbytes for layer in running.cache.layers),
    }
    gc.collect()
    for tag, of_part in num_bytes.items():
        assert of_part > 5 * NOISE
        before = resident_set()
        freed = running.memory.sleep((tag,), 2)  # type: ignore[arg-type]
        assert freed >= LEAST * of_part and before - resident_set() >= LEAST * of_part - NOISE
    assert release_pages([*running.model.storage(), *running.cache.layers]) == 0  # nothing is left


def resident_set() -> int:
    """Return the bytes of memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_sleep_of_storages_frees_passes_first_and_restores_them(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a GPU, with torch's operations on a CPU."""
    monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: TorchBackend())
    running = Running(load(checkpoint, 1))
    running.cache.layers = [layer.clone() for layer in running.cache.layers]
    expected, events = running.logits(), []
    close = running.model.close

    def releasable(tensors: list[Tensor], device: torch.device) -> ReleasableStorages:
        events.append("memory")
        return ReleasableStorages(tensors)

    monkeypatch.setattr(sleep_module, "releasable_memory", releasable)
    monkeypatch.setattr(running.model, "close", lambda: (events.append("passes"), close()))
    num_bytes = running.memory.sleep(("weights", "kv_cache"), 1)
    assert events == ["passes", "memory", "memory"]
    assert num_bytes > sum(layer.nbytes for layer in running.cache.layers)
    running.memory.wake_up(("weights", "kv_cache"))
    assert torch.equal(running.logits(), expected)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_of_weights_frees_adapters_and_keeps_their_contents(
    level: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a GPU, with storages on a CPU."""
    monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: CudaBackend(torch.float32))
    monkeypatch.setattr(sleep_module, "releasable_memory", lambda tensors, device: ReleasableStorages(tensors))
    running = Running(load(checkpoint, 1))
    running.model.enable_adapters(num_slots=2, max_rank=4)
    assert running.model.adapters is not None
    weights, factors = running.model.storage(), running.model.adapters.storage()
    for index, part in enumerate(factors):
        part.fill_(index + 1)
    num_bytes = running.memory.sleep(("weights",), level)
    assert num_bytes >= running.model.adapters.num_bytes + sum(part.nbytes for part in weights) // 2
    assert all(part.untyped_storage().nbytes() == 0 for part in (*weights, *factors))
    monkeypatch.setattr(running.model, "warm_up", lambda *_: None)
    running.memory.wake_up(("weights",))
    assert all((part == index + 1).all() for index, part in enumerate(factors))
    assert any(part.any() for part in weights) == (level == 1)


@pytest.mark.parametrize("tp", [1, 2])
def test_wake_up_without_memory_leaves_all_asleep_and_can_be_repeated(
    tp: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a GPU, of which others have taken memory: the last rank finds too little for the cache."""
    monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: TorchBackend())
    monkeypatch.setattr(sleep_module, "releasable_memory", lambda tensors, device: ReleasableStorages(tensors))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**34))

    def refuse() -> None:
        raise torch.OutOfMemoryError

    def work(groups: Groups) -> None:
        running = Running(load(checkpoint, 1, groups=groups))
        running.cache.layers = [layer.clone() for layer in running.cache.layers]
        tensors = [*running.model.storage(), *running.cache.layers]
        expected = running.logits()
        running.memory.sleep(("weights", "kv_cache"), 1)
        is_last = groups.tp.rank == tp - 1
        with monkeypatch.context() as patch, ExitStack() as stack:
            if is_last:
                patch.setattr(running.memory._asleep["kv_cache"], "restore", refuse)
                stack.enter_context(pytest.raises(ConfigError, match="too little memory for a worker that wakes: 1"))
            running.memory.wake_up(("weights", "kv_cache"))
        assert not running.memory.is_awake and running.num_prepared == 0
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        running.memory.wake_up(("weights", "kv_cache"))
        assert running.memory.is_awake and running.num_prepared == 1
        assert torch.equal(running.logits(), expected)

    run_ranks(work, topology(tp=tp))


class RecordedPrefaulter:
    """Whether pages of the cache are requested."""

    num_open = 0

    def __init__(self, cache: KVCache, runner: object) -> None:
        self.is_open = True
        RecordedPrefaulter.num_open += 1

    def close(self) -> None:
        RecordedPrefaulter.num_open -= self.is_open
        self.is_open = False


def test_serving_worker_asleep_takes_no_step_and_requests_no_pages(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "CachePrefaulter", RecordedPrefaulter)
    opened = EngineOpened(rank=0, topology=topology(), opened=[GroupOpened()])
    worker = Worker(WorkerId(EngineId("test", 0)), 0, build_config(model=str(checkpoint), num_threads=1), topology())
    for body in (OpenGroup("engine"), JoinGroup("engine", 0, [opened]), LoadModel(), AllocateCache(8, 64)):
        worker.handle(Call(1, body))
    state = worker._state
    assert isinstance(state, ServingWorker) and RecordedPrefaulter.num_open == 1

    plan = StepPlan(step=0, freed_rows=[], new_rows=[], new_blocks=[], rows=[], num_tokens=[], is_idle=True)
    state.sleep(("weights", "kv_cache"), 1)
    assert RecordedPrefaulter.num_open == 0
    state.wake_up(("weights",))
    with pytest.raises(RuntimeError, match="was planned for a worker that sleeps"):
        state.begin(plan)
    assert RecordedPrefaulter.num_open == 0
    for _ in range(2):
        state.wake_up(("kv_cache",))
        assert RecordedPrefaulter.num_open == 1
    unfinished = state.begin(plan)
    assert isinstance(unfinished, UnfinishedStep)
    state.finish(unfinished)
    worker.close()
    assert RecordedPrefaulter.num_open == 0
