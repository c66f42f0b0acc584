"""One device: answers the engine's calls, one `match`.

Driven by an executor's worker group. An exception leaves `handle` as an `Ended` reply, never as an exception.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import msgspec
import numpy as np
import torch
from tqdm import tqdm

from eagleray.config.resolve import checkpoint_dir, engine_index, engines_on_host, expert_dispatch
from eagleray.config.sections import Config
from eagleray.errors import ConfigError, ExpertGroupBroken, InvalidRequest
from eagleray.identity import WorkerId
from eagleray.kernels.kv_cache import KVCache
from eagleray.log import get_logger
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.steps import (
    AllocateCache,
    CacheAllocated,
    Call,
    CallExtension,
    EngineOpened,
    ExpertGroupOpened,
    ExtensionReturned,
    GroupsJoined,
    GroupsOpened,
    JoinExpertGroup,
    JoinGroups,
    LoadModel,
    LoadNullModel,
    MeasureMemory,
    MemoryMeasured,
    ModelLoaded,
    OpenExpertGroup,
    OpenGroups,
    ReadExpertLoad,
    Reply,
    StepBroken,
    StepPlan,
    WorkerExpertLoad,
    WorkerReply,
)
from eagleray.messages.workers import Topology
from eagleray.models.base import Model
from eagleray.models.moe.layout import ExpertOptions
from eagleray.models.registry import load_model
from eagleray.parallel.groups import Groups, OpenedGroups
from eagleray.parallel.mesh import EnginePosition, Mesh
from eagleray.worker.cores import set_threads
from eagleray.worker.device import choose_device
from eagleray.worker.extension import Extension
from eagleray.worker.input_batch import InputBatch
from eagleray.worker.memory import available_bytes, step_bytes, total_bytes
from eagleray.worker.null import NullRunner
from eagleray.worker.prefault import CachePrefaulter
from eagleray.worker.runner import Runner
from eagleray.worker.sampling_state import SamplingState

logger = get_logger(__name__)

JOIN_SECONDS = 60.0
"""Engines that share experts are told of each other when all are there: what is left is to connect."""


class Worker:
    """`rank` is the worker's number in its engine; `mesh` is its place; `device` and `model` are there once opened and
    loaded. A worker extension may use these four."""

    device: torch.device
    model: Model

    def __init__(
        self, worker: WorkerId, rank: int, config: Config, topology: Topology, *, device_index: int | None = None
    ) -> None:
        self.rank = rank
        self.mesh = Mesh(rank=rank, tp_size=topology.tensor_parallel_size, pp_size=topology.pipeline_parallel_size)
        self._id = worker
        self._config = config
        self._topology = topology
        self._device_index = device_index
        self._opened: OpenedGroups | None = None
        self._groups: Groups | None = None
        self._runner: Runner | NullRunner | None = None
        self._pages: CachePrefaulter | None = None
        self._extension: Extension | None = None
        self._has_failed = False
        self._broken: str | None = None  # why no step can be taken, until a group of engines is joined

    def handle(self, call: Call) -> Reply | None:
        """Do what the call asks. None: the step's result is another rank's to tell, or this worker has failed before
        and does nothing any more."""
        if self._has_failed:
            return None
        try:
            body = self._do(call)
        except Exception as error:
            self._has_failed = True
            body = Ended(self._id, Failure.of(error))
        return None if body is None else Reply(call.call_id, self.rank, body)

    def close(self) -> None:
        """Leave the groups."""
        for holder in (self._pages, self._groups, self._opened):
            if holder is not None:
                holder.close()

    def _do(self, call: Call) -> WorkerReply | None:
        match call.body:
            case StepPlan() as plan:
                return self._step(plan)
            case OpenGroups():
                return self._open()
            case JoinGroups(opened):
                return self._join(opened)
            case LoadModel():
                return self._load()
            case LoadNullModel():
                return self._load_null()
            case MeasureMemory(max_num_batched_tokens):
                return self._measure(max_num_batched_tokens)
            case AllocateCache(num_blocks):
                return self._allocate(num_blocks)
            case CallExtension(method, arguments):
                return self._call_extension(method, arguments)
            case OpenExpertGroup(epoch):
                return self._open_expert_group(epoch)
            case JoinExpertGroup(epoch, members):
                return self._join_expert_group(epoch, members)
            case ReadExpertLoad():
                return self._read_expert_load()

    def _step(self, plan: StepPlan) -> WorkerReply | None:
        """A step that breaks, because an engine that shares the experts is gone, leaves this worker well."""
        assert self._runner is not None, "a step before the cache was allocated"
        if self._broken is None:
            try:
                with nullcontext() if self._pages is None else self._pages.step(plan):
                    return self._runner.step(plan)
            except ExpertGroupBroken as error:
                self._broken = str(error)
                logger.warning("%s was not completed: %s", plan.label, error)
        return StepBroken(step=plan.step, cause=self._broken)

    def _open(self) -> GroupsOpened:
        execution = self._config.execution
        self.device = choose_device(execution.device, self._device_index)
        threads = set_threads(
            execution.num_threads, num_workers=self._num_workers_on_host(), index=self._index_on_host()
        )
        logger.debug("computes on %s with %d threads", self.device, threads)
        parallel, engines = self._config.parallel, EnginePosition()
        if parallel.enable_expert_parallel:
            engines = EnginePosition(rank=self._id.engine.rank, size=parallel.data_parallel_size)
        self._opened = OpenedGroups.open(mesh=self.mesh, topology=self._topology, device=self.device, engines=engines)
        return self._opened.opened

    def _join(self, opened: list[GroupsOpened]) -> GroupsJoined:
        assert self._opened is not None, "groups are joined after they were opened"
        self._groups = self._opened.join(opened, timeout=self._config.execution.startup_timeout)
        return GroupsJoined()

    def _open_expert_group(self, epoch: int) -> ExpertGroupOpened:
        assert self._groups is not None, "the engine's own groups are joined first"
        self._broken = f"the group of epoch {epoch} that shares the experts is not joined yet"
        return self._groups.experts.open(epoch)

    def _join_expert_group(self, epoch: int, members: list[EngineOpened]) -> GroupsJoined:
        """If a member is gone by now the next step says so."""
        assert self._groups is not None, "a group is joined after it was opened"
        stage = [
            msgspec.structs.replace(member, opened=[member.opened[rank] for rank in self.mesh.tp_ranks])
            for member in members
        ]
        self._groups.experts.join(epoch, stage, timeout=JOIN_SECONDS)
        try:
            self.model.on_group_formed()
            self._broken = None
        except ExpertGroupBroken as error:
            self._broken = str(error)
        return GroupsJoined()

    def _read_expert_load(self) -> WorkerExpertLoad:
        """Ranks that have the same tokens count the same: the first one says it."""
        trace = self.model.trace
        if trace is None or (self.mesh.tp_rank > 0 and not self.model.has_sequence_shards):
            return WorkerExpertLoad(np.zeros((0, 0), dtype=np.int64))
        return WorkerExpertLoad(trace.counts.cpu().numpy().copy())

    def _load(self) -> ModelLoaded:
        assert self._groups is not None, "the model is loaded after the groups were joined"
        config = self._config.model
        is_shown = self.rank == 0 and sys.stderr.isatty()
        with tqdm(desc="loading weights", unit="B", unit_scale=True, disable=not is_shown) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            self.model = load_model(
                checkpoint_dir(config),
                dtype=config.dtype,
                load_format=config.load_format,
                device=self.device,
                seed=config.seed,
                on_progress=show,
                groups=self._groups,
                deterministic=config.deterministic,
                experts=self._expert_options(),
                total_memory=total_bytes(self.device),
            )
        model = self.model
        logger.info(
            "loaded %s, %.1f M parameters in %s, on %s with %d threads",
            model.spec.architecture,
            model.num_parameters / 1e6,
            str(model.dtype).removeprefix("torch."),
            self.device,
            torch.get_num_threads(),
        )
        if self._config.execution.worker_extension_cls is not None:
            self._extension = Extension.load(self._config.execution.worker_extension_cls, self)
        return ModelLoaded(
            architecture=model.spec.architecture,
            num_parameters=model.num_parameters,
            vocab_size=model.spec.vocab_size,
            max_model_len=self._max_model_len(model),
            bytes_per_block=KVCache.bytes_per_block(model.cache_shape(self._config.cache.block_size), model.dtype),
            device=self.device.type,
            kernels=self.model.kernels_name,
            num_moe_layers=0 if model.trace is None else model.trace.num_layers,
            num_experts=0 if model.spec.moe is None else model.spec.moe.num_experts,
            top_k=0 if model.spec.moe is None else model.spec.moe.top_k,
        )

    def _expert_options(self) -> ExpertOptions:
        parallel = self._config.parallel
        return ExpertOptions(
            dispatch=expert_dispatch(self._config) if parallel.enable_expert_parallel else None,
            num_redundant=parallel.num_redundant_experts,
            balance_interval=parallel.eplb_step_interval if parallel.enable_eplb else None,
            keeps_ids=self._config.model.enable_return_routed_experts,
        )

    def _load_null(self) -> CacheAllocated:
        self._runner = NullRunner(is_sampler=self.mesh.is_sampler)
        return CacheAllocated()

    def _max_model_len(self, model: Model) -> int:
        wanted = self._config.model.max_model_len
        if wanted is not None and wanted > model.spec.max_model_len:
            raise ConfigError(
                f"option `max_model_len`: {wanted} is longer than the {model.spec.max_model_len} tokens that "
                f"{checkpoint_dir(self._config.model) / 'config.json'} says the model was made for"
            )
        return wanted or model.spec.max_model_len

    def _measure(self, max_num_batched_tokens: int) -> MemoryMeasured:
        model, config = self.model, self._config
        largest_step = step_bytes(
            model.spec,
            model.dtype,
            num_tokens=max_num_batched_tokens,
            num_logits=min(config.scheduling.max_num_seqs, max_num_batched_tokens),
            mesh=self.mesh,
            num_exchanging=self._config.parallel.data_parallel_size if model.exchanges_tokens else 0,
        )
        utilization = config.cache.gpu_memory_utilization
        available = available_bytes(model.device, gpu_memory_utilization=utilization, step_bytes=largest_step)
        if self.device.type == "cpu":  # a memory that all workers of the node share
            available //= self._num_workers_on_host()
        return MemoryMeasured(available)

    def _num_workers_on_host(self) -> int:
        """That share its cores and its memory."""
        return len(self._topology.local_ranks(self.rank)) * engines_on_host(self._config)

    def _index_on_host(self) -> int:
        """This worker's number among them."""
        local = self._topology.local_ranks(self.rank)
        return engine_index(self._config, self._id.engine.rank) * len(local) + local.index(self.rank)

    def _allocate(self, num_blocks: int) -> CacheAllocated:
        model, block_size = self.model, self._config.cache.block_size
        num_rows = self._config.scheduling.max_num_seqs
        cache = KVCache.allocate(
            model.cache_shape(block_size), num_blocks=num_blocks, dtype=model.dtype, device=model.device
        )
        self._pages = CachePrefaulter(cache)
        self._runner = Runner(
            model,
            cache,
            InputBatch(num_rows=num_rows, max_model_len=self._max_model_len(model), block_size=block_size),
            SamplingState(num_rows=num_rows, vocab_size=model.spec.vocab_size, device=model.device),
        )
        return CacheAllocated()

    def _call_extension(self, method: str, arguments: bytes) -> ExtensionReturned:
        if self._extension is None:
            message = "no worker extension: set the option `worker_extension_cls` to `module:Class`"
            return ExtensionReturned(failure=Failure.of(InvalidRequest(message)))
        return self._extension.call(method, arguments)
