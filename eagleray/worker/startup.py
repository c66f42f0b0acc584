"""States of a worker before it serves: set up, opened, joined, loaded. Each state is made from the one before.

Owned and driven by `Worker`. An object of a state has everything that its methods need.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from eagleray.config.resolve import (
    engine_index,
    engines_on_host,
    expert_dispatch,
    logprobs_limit,
    max_model_len,
    option_that_needs_invariance,
)
from eagleray.config.sections import Config, ModelConfig
from eagleray.config.speculation import MAX_DRAFT_TOKENS, speculation
from eagleray.errors import ConfigError
from eagleray.hub.draft_model import fetch_draft_model
from eagleray.hub.locate import checkpoint_dir
from eagleray.hub.model_json import config_file, read_config
from eagleray.hub.pooling import find_pooling
from eagleray.hub.prepare import fetch_model
from eagleray.identity import WorkerId
from eagleray.kernels.backend import KernelUnavailable
from eagleray.kernels.choose import AttentionBackend
from eagleray.kernels.cuda.ranking import DeviceRanking
from eagleray.kernels.forward_batch import PassLimits
from eagleray.kernels.kv_cache import KVCache
from eagleray.log import get_logger, has_bars
from eagleray.messages.membership import ProcessInfo
from eagleray.messages.steps import ModelLoaded
from eagleray.messages.workers import GroupOpened, Topology
from eagleray.models.base import Model
from eagleray.models.config_file import ConfigFile
from eagleray.models.moe.layout import ExpertOptions
from eagleray.models.registry import load_model
from eagleray.parallel.groups import Groups, OpenedGroups, listen_address
from eagleray.parallel.mesh import EnginePosition, Mesh
from eagleray.process.host_memory import host_free_bytes
from eagleray.worker.device import choose_device, set_threads
from eagleray.worker.draft_files import check_draft_model
from eagleray.worker.extension import Extension
from eagleray.worker.grammar_rows import GrammarRows
from eagleray.worker.grammars import WorkerGrammars
from eagleray.worker.loading_bar import LoadingBar
from eagleray.worker.logprobs import RAW_LOGPROBS, ScoreKind
from eagleray.worker.memory import (
    EXPERT_GROUP_BYTES,
    GRAPH_BYTES,
    gpu_cache_bytes,
    host_cache_bytes,
    out_of_memory,
    total_bytes,
    wait_for_memory,
    wait_for_weights,
)
from eagleray.worker.rehearsal import rehearse
from eagleray.worker.sampler import HostSampler, IdleSampler, TokenSampler
from eagleray.worker.sampling_state import SamplingState

logger = get_logger(__name__)

MASK_THREADS = 4
"""Number of threads that compute the masks of grammars beside a GPU, which leaves the cores of the host free."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """First state: the worker has its coordinates and options and holds no resources."""

    worker: WorkerId
    rank: int
    """Number of the worker in its engine."""
    mesh: Mesh
    config: Config
    topology: Topology
    device_index: int | None = None
    """Number of its GPU on this node; None for the current one."""

    def num_workers_on_host(self) -> int:
        """Return how many workers share the cores and the memory of this host."""
        return len(self.topology.local_ranks(self.rank)) * engines_on_host(self.config)

    def index_on_host(self) -> int:
        """Return this worker's number among the workers of the host."""
        local = self.topology.local_ranks(self.rank)
        return engine_index(self.config, self.worker.engine.rank) * len(local) + local.index(self.rank)

    def close(self) -> None:
        """Do nothing, since nothing is open."""


class OpenedWorker:
    """Second state: the device is chosen, and the resources that other ranks need to join are open."""

    def __init__(self, setup: WorkerSetup) -> None:
        execution, parallel = setup.config.execution, setup.config.parallel
        self.setup = setup
        self.device = choose_device(execution.device, setup.device_index)
        threads = set_threads(
            execution.num_threads, num_workers=setup.num_workers_on_host(), index=setup.index_on_host()
        )
        logger.debug("computes on %s with %d threads", self.device, threads)
        if self.device.type == "cuda" and setup.worker.engine.incarnation > 0:
            share = setup.config.cache.gpu_memory_utilization
            wait_for_memory(int(total_bytes(self.device) * share), partial(_free_bytes, self.device))
        engines = EnginePosition()
        if parallel.enable_expert_parallel:
            engines = EnginePosition(rank=setup.worker.engine.rank, size=parallel.data_parallel_size)
        self._groups = OpenedGroups(
            mesh=setup.mesh,
            topology=setup.topology,
            device=self.device,
            engines=engines,
            needs_store=execution.worker_extension_cls is not None,  # a mixin gets torch's default process group
        )

    @property
    def opened(self) -> GroupOpened:
        """Handles that the other ranks need to join."""
        return self._groups.opened

    def join(self, opened: Sequence[GroupOpened]) -> JoinedWorker:
        """Join the groups of the engine, given the handles of its workers, by rank."""
        groups = self._groups.join(opened, timeout=self.setup.config.execution.startup_timeout)
        return JoinedWorker(self.setup, self.device, groups)

    def close(self) -> None:
        self._groups.close()


@dataclass(frozen=True, slots=True)
class JoinedWorker:
    """Third state: the ranks of the engine are connected."""

    setup: WorkerSetup
    device: torch.device
    groups: Groups

    def close(self) -> None:
        """Leave the groups."""
        self.groups.close()


class LoadedWorker:
    """Fourth state: the model is loaded, and the worker extension is made, which sees this object.

    A worker extension that gets the worker may use `rank`, `mesh`, `device` and `model`. `expert_group_size`: see
    `LoadModel`.
    """

    def __init__(self, joined: JoinedWorker, expert_group_size: int | None = None) -> None:
        self.setup = joined.setup
        self.rank = joined.setup.rank
        self.mesh = joined.setup.mesh
        self.device = joined.device
        self.groups = joined.groups
        self._gets_experts = expert_group_size is not None
        if expert_group_size is not None:  # its place in the group is not known yet
            self.groups.experts.set_position(EnginePosition(size=expert_group_size))
        # nothing to do on the host of the program that started the engines, which has fetched it
        timeout = self.setup.config.execution.startup_timeout
        fetch_model(self.setup.config.model, timeout=timeout, with_weights=True)
        drafts = self._find_drafts()
        self.model = self._load_with_kernels()
        self.draft_model = None if drafts is None else self._load_draft_model(drafts)
        """The draft model, or the layer that drafts; None without one, and on ranks that do not report what a step
        samples."""
        config = self.setup.config.model
        self.max_model_len = max_model_len(config, self.model.spec.max_model_len, config_file(config))
        path = self.setup.config.execution.worker_extension_cls
        self.extension = Extension.load(path, self, open_default_group=self._open_default_group)

    def describe(self) -> ModelLoaded:
        """Return the facts about the model that the engine needs."""
        model, moe = self.model, self.model.spec.moe
        return ModelLoaded(
            architecture=model.spec.architecture,
            num_parameters=model.num_parameters,
            vocab_size=model.spec.vocab_size,
            max_model_len=self.max_model_len,
            bytes_per_block=self.bytes_per_block,
            device=self.device.type,
            kernels=model.kernels_name,
            num_moe_layers=0 if model.trace is None else model.trace.num_layers,
            layers_with_experts=()
            if moe is None
            else tuple(i for i, has_experts in enumerate(moe.layers) if has_experts),
            num_layers=model.spec.num_layers,
            num_experts=0 if moe is None else moe.num_experts,
            top_k=0 if moe is None else moe.top_k,
            hidden_size=model.spec.hidden_size,
            process=ProcessInfo.current(),
        )

    @property
    def bytes_per_block(self) -> int:
        """Memory of one cache block over all layers of this worker, with those of the draft model."""
        models = [self.model] if self.draft_model is None else [self.model, self.draft_model]
        block_size = self.setup.config.cache.block_size
        return sum(KVCache.bytes_per_block(model.cache_shape(block_size), model.cache_dtype) for model in models)

    def available_bytes(self, max_num_batched_tokens: int) -> int:
        """Return the memory that this worker's cache may take, beside steps of up to this many tokens. On a GPU these
        are run once, together with the other ranks."""
        model, config = self.model, self.setup.config
        limits = self.limits(max_num_batched_tokens)
        if self.device.type != "cuda":
            num_drafts = MAX_DRAFT_TOKENS if config.scheduling.speculative_config else 0
            step_bytes = model.step_bytes(limits, config.cache.block_size, num_drafts=num_drafts)
            step_bytes += 0 if model.adapters is None else model.adapters.num_bytes
            if self.draft_model is not None:
                step_bytes += self.draft_model.step_bytes(limits, config.cache.block_size)
            num_workers = self.setup.num_workers_on_host()
            return host_cache_bytes(free=host_free_bytes(), step_bytes=step_bytes, num_workers=num_workers)
        gc.collect()
        torch.cuda.empty_cache()  # what loading took besides the weights
        num_weight_bytes = torch.cuda.memory_allocated(self.device)
        sampler = sampler_of(model, limits.num_rows, ScoreKind.of(config.model.logprobs_mode))
        try:
            rehearse(
                model,
                sampler,
                limits,
                block_size=config.cache.block_size,
                num_logprobs=logprobs_limit(config.model, model.spec.vocab_size),
            )
        except torch.OutOfMemoryError as error:
            advice = "lower `max_num_batched_tokens` or `max_num_seqs`, or divide the model (`tensor_parallel_size`)"
            raise out_of_memory(f"steps of {limits.num_tokens} tokens", advice, self.device) from error
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return gpu_cache_bytes(
            free=free,
            total=total,
            utilization=config.cache.gpu_memory_utilization,
            reserved=GRAPH_BYTES + (EXPERT_GROUP_BYTES if self.groups.experts.spans_engines else 0),
            num_tokens=limits.num_tokens,
            num_weight_bytes=num_weight_bytes,
            num_adapter_bytes=0 if model.adapters is None else model.adapters.num_bytes,
        )

    def limits(self, max_num_batched_tokens: int) -> PassLimits:
        """Return the limits of the engine's steps."""
        num_rows = self.setup.config.scheduling.max_num_seqs
        return PassLimits(max(max_num_batched_tokens, num_rows), num_rows, self.max_model_len)

    def close(self) -> None:
        """Leave the groups."""
        self.model.close()  # before the groups, see there
        if self.draft_model is not None:
            self.draft_model.close()
        self.groups.close()

    def _open_default_group(self) -> None:
        """Make torch's default process group over the ranks of the engine."""
        host = listen_address(self.rank, self.setup.topology)
        timeout = self.setup.config.execution.startup_timeout
        self.groups.open_default(host=host, device=self.device, timeout=timeout)

    def _load_with_kernels(self) -> Model:
        """Load the model with kernels that run here: plain torch if others were not asked for and fail."""
        option = self.setup.config.execution.attention_backend
        model = self._load(option)
        try:
            model.try_kernels()
            return model
        except KernelUnavailable as error:
            if option != "auto":
                raise ConfigError(
                    f"option `attention_backend`: {option} cannot be used here, because {error}"
                ) from error
            # as text, because a log record that kept the error would keep the model
            logger.warning("computing with plain torch, which is several times slower: %s", str(error))
        model.close()
        del model
        gc.collect()  # the weights must be freed before they are loaded again, in another form
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._load("torch")

    def _load(self, attention_backend: AttentionBackend) -> Model:
        config = self.setup.config.model
        bar = LoadingBar(is_shown=self.rank == 0 and has_bars())
        with contextlib.closing(bar):
            model = load_model(
                checkpoint_dir(config),
                config=ConfigFile(config_file(config), read_config(config), is_changed=bool(config.hf_overrides)),
                dtype=config.dtype,
                load_format=config.load_format,
                device=self.device,
                seed=config.seed,
                on_progress=bar.show,
                groups=self.groups,
                invariant_for=option_that_needs_invariance(self.setup.config),
                experts=self._expert_options(),
                total_memory=total_bytes(self.device),
                wait_for_memory=self._wait_for_weights if self.device.type == "cuda" else None,
                attention_backend=attention_backend,
                quantization=config.quantization,
                kv_cache_dtype=self.setup.config.cache.kv_cache_dtype,
                pooling=find_pooling(config),
            )
        lora = self.setup.config.lora
        if lora.enable_lora:
            try:
                model.enable_adapters(num_slots=lora.num_slots, max_rank=lora.max_lora_rank)
            except torch.OutOfMemoryError as error:
                what = f"{lora.num_slots} slots for adapters of rank {lora.max_lora_rank}"
                advice = "lower `max_loras` or `max_lora_rank`, or divide the model (`tensor_parallel_size`)"
                raise out_of_memory(what, advice, self.device) from error
        logger.info(
            "loaded %s, %.1f M parameters in %s%s, on %s with %d thread%s",
            model.spec.architecture,
            model.num_parameters / 1e6,
            "" if config.quantization is None else f"{config.quantization} and ",
            str(model.dtype).removeprefix("torch."),
            self.device,
            torch.get_num_threads(),
            "" if torch.get_num_threads() == 1 else "s",
        )
        return model

    def _find_drafts(self) -> ModelConfig | None:
        """Return the configuration from which this rank loads the draft model, or that of the model for its layer that
        drafts; None if it has neither. Raises `ConfigError` if it cannot draft for the model."""
        options = speculation(self.setup.config.scheduling.speculative_config)
        if options is None or not options.has_model or not self.mesh.is_sampler:
            return None
        model = self.setup.config.model
        if not options.model:
            return model
        draft = fetch_draft_model(model, options, timeout=self.setup.config.execution.startup_timeout)
        check_draft_model(draft, model)
        return draft

    def _load_draft_model(self, config: ModelConfig) -> Model:
        """Load the whole draft model, or layer, whatever part of the model this rank has."""
        is_layer = config is self.setup.config.model
        directory = checkpoint_dir(config)
        try:
            model = load_model(
                directory,
                config=ConfigFile(config_file(config), read_config(config)),
                dtype=config.dtype,
                load_format=config.load_format,
                device=self.device,
                seed=config.seed,
                on_progress=None,
                total_memory=total_bytes(self.device),
                attention_backend=self.setup.config.execution.attention_backend,
                quantization=config.quantization,
                drafts=is_layer,
            )
        except ConfigError as error:
            name = "the layer that drafts" if is_layer else f"the draft model {directory}"
            raise ConfigError(f"{name} (`speculative_config`): {error}") from None
        logger.info(
            "loaded %s %s, %s, %.1f M parameters in %s%s",
            "the layer for drafts of" if is_layer else "the draft model",
            directory,
            model.spec.architecture,
            model.num_parameters / 1e6,
            "" if config.quantization is None else f"{config.quantization} and ",
            str(model.dtype).removeprefix("torch."),
        )
        return model

    def _wait_for_weights(self, needed: int) -> None:
        wait_for_weights(needed, partial(_free_bytes, self.device))

    def _expert_options(self) -> ExpertOptions:
        config = self.setup.config
        parallel = config.parallel
        return ExpertOptions(
            dispatch=expert_dispatch(config) if parallel.enable_expert_parallel else None,
            num_redundant=parallel.num_redundant_experts,
            balance_interval=parallel.eplb_step_interval if parallel.enable_eplb else None,
            keeps_ids=config.model.enable_return_routed_experts,
            gets_experts=self._gets_experts,
        )


def _free_bytes(device: torch.device) -> int:
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def sampler_of(
    model: Model,
    num_rows: int,
    reported_kind: ScoreKind = RAW_LOGPROBS,
    grammars: WorkerGrammars | None = None,
) -> TokenSampler[Any]:
    """Return the sampler of the device that computes the model. Ranks that do not sample need none on a GPU, and those
    of a pooling model none anywhere."""
    if model.spec.pools:
        return IdleSampler()
    vocab_size = model.spec.vocab_size
    is_on_device = model.groups.is_sampling and isinstance(model.ranking, DeviceRanking)
    rows = None
    if grammars is not None:
        rows = GrammarRows(grammars, vocab_size=vocab_size, num_threads=MASK_THREADS if is_on_device else 1)
    if is_on_device:
        from eagleray.worker.device_sampler import DeviceSampler  # needs Triton, which GPUs alone have

        return DeviceSampler(
            num_rows=num_rows, vocab_size=vocab_size, device=model.device, reported_kind=reported_kind, grammars=rows
        )
    state = SamplingState(num_rows=num_rows, vocab_size=vocab_size, device=model.device)
    return HostSampler(state, model.ranking, reported_kind, rows)
