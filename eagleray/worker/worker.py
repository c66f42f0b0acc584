"""One device: answers the engine's calls, one `match`.

Driven by an executor's worker group. An exception leaves `handle` as a `WorkerFailure` reply, never as an exception.
"""

from __future__ import annotations

import sys

from tqdm import tqdm

from eagleray.config import Config
from eagleray.config.resolve import checkpoint_dir
from eagleray.errors import ConfigError
from eagleray.identity import WorkerId
from eagleray.log import get_logger
from eagleray.messages.failure import Failure
from eagleray.messages.steps import (
    AllocateCache,
    CacheAllocated,
    Call,
    LoadModel,
    MeasureMemory,
    MemoryMeasured,
    ModelLoaded,
    Reply,
    StepPlan,
    WorkerFailure,
    WorkerReply,
)
from eagleray.models.base import Model
from eagleray.models.cache import KVCache
from eagleray.models.registry import load_model
from eagleray.worker.device import choose_device, set_threads
from eagleray.worker.memory import available_bytes, step_bytes
from eagleray.worker.rows import Rows
from eagleray.worker.runner import Runner
from eagleray.worker.sampling_rows import SamplingRows

__all__ = ["Worker"]

logger = get_logger(__name__)


class Worker:
    """`rank` is the worker's number in its engine."""

    def __init__(self, worker: WorkerId, rank: int, config: Config) -> None:
        self._id = worker
        self._rank = rank
        self._config = config
        self._model: Model | None = None
        self._runner: Runner | None = None

    def handle(self, call: Call) -> Reply:
        """Do what the call asks. The worker must not be used again after a `WorkerFailure`."""
        try:
            body = self._do(call)
        except Exception as error:
            body = WorkerFailure(worker=self._id, cause=Failure.of(error))
        return Reply(call.call_id, self._rank, body)

    def _do(self, call: Call) -> WorkerReply:
        match call.body:
            case StepPlan() as plan:
                assert self._runner is not None, "a step before the cache was allocated"
                return self._runner.step(plan)
            case LoadModel():
                return self._load()
            case MeasureMemory(max_num_batched_tokens):
                return self._measure(max_num_batched_tokens)
            case AllocateCache(num_blocks):
                return self._allocate(num_blocks)
            case _:
                raise NotImplementedError(type(call.body).__name__)

    def _load(self) -> ModelLoaded:
        config = self._config.model
        device = choose_device(self._config.execution.device)
        threads = set_threads(self._config.execution.num_threads)
        with tqdm(desc="loading weights", unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            model = load_model(
                checkpoint_dir(config),
                dtype=config.dtype,
                load_format=config.load_format,
                device=device,
                seed=config.seed,
                on_progress=show,
            )
        self._model = model
        logger.info(
            "loaded %s, %.1f M parameters in %s, on %s with %d threads",
            model.spec.architecture,
            model.num_parameters / 1e6,
            str(model.dtype).removeprefix("torch."),
            device,
            threads,
        )
        return ModelLoaded(
            architecture=model.spec.architecture,
            num_parameters=model.num_parameters,
            vocab_size=model.spec.vocab_size,
            max_model_len=self._max_model_len(model),
            bytes_per_block=KVCache.bytes_per_block(model.spec, self._config.cache.block_size, model.dtype),
            device=device.type,
        )

    def _max_model_len(self, model: Model) -> int:
        wanted = self._config.model.max_model_len
        if wanted is not None and wanted > model.spec.max_model_len:
            raise ConfigError(
                f"option `max_model_len`: {wanted} is longer than the {model.spec.max_model_len} tokens that "
                f"{checkpoint_dir(self._config.model) / 'config.json'} says the model was made for"
            )
        return wanted or model.spec.max_model_len

    def _measure(self, max_num_batched_tokens: int) -> MemoryMeasured:
        assert self._model is not None, "memory is measured after loading"
        model, config = self._model, self._config
        largest_step = step_bytes(
            model.spec,
            model.dtype,
            num_tokens=max_num_batched_tokens,
            num_logits=min(config.scheduling.max_num_seqs, max_num_batched_tokens),
        )
        utilization = config.cache.gpu_memory_utilization
        available = available_bytes(model.device, gpu_memory_utilization=utilization, step_bytes=largest_step)
        return MemoryMeasured(available)

    def _allocate(self, num_blocks: int) -> CacheAllocated:
        assert self._model is not None, "the cache is allocated after loading"
        model, block_size = self._model, self._config.cache.block_size
        num_rows = self._config.scheduling.max_num_seqs
        self._runner = Runner(
            model,
            KVCache.allocate(
                model.spec, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype, device=model.device
            ),
            Rows(num_rows=num_rows, max_model_len=self._max_model_len(model), block_size=block_size),
            SamplingRows(num_rows=num_rows, vocab_size=model.spec.vocab_size, device=model.device),
        )
        return CacheAllocated()
