"""Start of an engine: load the model, size the cache, make the scheduler and the engine core."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from eagleray.config.resolve import cache_bytes, expert_engines, steps_in_flight
from eagleray.config.sections import Config
from eagleray.config.speculation import Speculation, speculation
from eagleray.engine.core import EngineCore
from eagleray.engine.waves import Waves
from eagleray.errors import ConfigError
from eagleray.executor.executor import Executor
from eagleray.hub.pooling import find_pooling
from eagleray.hub.prepare import fetch_model
from eagleray.log import get_logger
from eagleray.messages.membership import EngineInfo, ProcessInfo, RoutingInfo
from eagleray.messages.steps import (
    AllocateCache,
    CallDone,
    JoinGroup,
    LoadModel,
    MeasureMemory,
    MemoryMeasured,
    ModelLoaded,
    OpenGroup,
    WorkerCall,
    WorkerReply,
)
from eagleray.messages.workers import EngineOpened, GroupOpened
from eagleray.scheduler.history_drafter import HistoryDrafter
from eagleray.scheduler.model_drafter import ModelDrafter
from eagleray.scheduler.scheduler import Scheduler
from eagleray.scheduler.speculation import Drafter

logger = get_logger(__name__)

Body = TypeVar("Body", bound=WorkerReply)

MAX_SLOTS = 2**31 - 1
"""Upper limit for the slots of a cache (blocks times block size), because kernels count them in 32 bits."""

DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
"""On a CPU a step of 512 tokens already runs at the speed of the matrix products, and running requests wait for it."""


@dataclass(frozen=True)
class StartedEngine:
    core: EngineCore
    info: EngineInfo


def start_engine(
    config: Config,
    executor: Executor,
    *,
    deadline: float,
    in_placement_group: bool = False,
    expert_group_size: int | None = None,
) -> StartedEngine:
    """Start an engine. `deadline` is a time of the monotonic clock; `in_placement_group`: this program runs in a
    placement group of Ray; `expert_group_size`: see `EngineSpec`.

    Raises `CheckpointError` or `ConfigError` for mistakes of the user, `WorkerFailed` or `WorkerLost` for failures.
    """

    def call(body: WorkerCall, reply: type[Body]) -> list[Body]:
        return executor.call(body, reply, timeout=max(0.0, deadline - time.monotonic()))

    opened = call(OpenGroup("engine"), GroupOpened)
    call(JoinGroup("engine", 0, [EngineOpened(rank=0, topology=executor.topology, opened=opened)]), CallDone)
    loaded = call(LoadModel(expert_group_size), ModelLoaded)
    check_kernels(loaded)
    routing = _routing(config, loaded)
    # Small files. The workers may have fetched them to other nodes only.
    fetch_model(config.model, timeout=config.execution.startup_timeout, with_weights=False)
    pooling = find_pooling(config.model)
    if pooling is not None:
        what = f"{len(pooling.labels)} labels" if pooling.labels else "embeddings"
        logger.info("a pooling model: %s, pooling %s, activation %s", what, pooling.method, pooling.activation)
    model = loaded[0]
    drafts = speculation(config.scheduling.speculative_config)
    if drafts is not None and pooling is not None:
        raise ConfigError("option `speculative_config`: a pooling model generates no tokens; leave the option out")
    budget = config.scheduling.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[model.device]
    num_blocks = config.cache.num_kv_blocks
    if num_blocks is None:
        available = cache_bytes(config.cache)
        if available is None:
            measured = call(MeasureMemory(budget), MemoryMeasured)
            room = [reply.available_bytes for reply in measured]
        else:
            room = [available] * len(loaded)
        fits = min(size // worker.bytes_per_block for size, worker in zip(room, loaded, strict=True))
        num_blocks = _useful_blocks(config, model, fits)
        if available is not None and num_blocks < fits:
            _explain_cut(config, model, num_blocks)
    if config.model.max_model_len == "auto":
        model = _fitting_length(config, model, num_blocks)
    bytes_per_block = max(worker.bytes_per_block for worker in loaded)
    _check_cache(config, model, num_blocks, bytes_per_block)
    call(AllocateCache(num_blocks, budget), CallDone)
    block_size = config.cache.block_size
    num_whole = num_blocks // _blocks_of_one_sequence(config, model)
    logger.info(
        "cache: %d blocks of %d tokens, %.2f GiB per worker: %d tokens, %d request%s of the full length of %d",
        num_blocks,
        block_size,
        num_blocks * bytes_per_block / 2**30,
        num_blocks * block_size,
        num_whole,
        "" if num_whole == 1 else "s",
        model.max_model_len,
    )
    scheduler = Scheduler(
        max_num_seqs=config.scheduling.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=model.max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        # The cache holds keys and values only, and such a model needs the hidden states of every token.
        enable_prefix_caching=config.cache.enable_prefix_caching and not (pooling and pooling.needs_all_tokens),
        policy=config.scheduling.scheduling_policy,
        num_stages=config.parallel.pipeline_parallel_size,
        vocab_size=model.vocab_size,
        routing=routing,
        num_adapter_slots=config.lora.num_slots,
        pools=pooling is not None,
        drafter=None if drafts is None else make_drafter(drafts),
    )
    info = EngineInfo(
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        block_size=block_size,
        num_kv_blocks=num_blocks,
        has_experts=_has_experts(loaded),
        pooling=pooling,
        hidden_size=model.hidden_size,
        routing=routing,
        cache_bytes=num_blocks * sum(worker.bytes_per_block for worker in loaded),
        process=ProcessInfo.current(),
        workers=tuple(worker.process for worker in loaded if worker.process is not None),
    )
    shares_experts = expert_engines(config) > 1
    depth = steps_in_flight(config, device=model.device, in_placement_group=in_placement_group)
    if config.execution.async_scheduling and depth == config.parallel.pipeline_parallel_size:
        logger.info("`async_scheduling` has nothing to do here: the engine's own thread computes on the CPU")
    core = EngineCore(
        scheduler,
        executor,
        depth=depth,
        watchdog_timeout=config.recovery.watchdog_timeout,
        waves=Waves(depth=depth) if shares_experts else None,
        least_tokens=budget if shares_experts else 0,
    )
    return StartedEngine(core, info)


def make_drafter(options: Speculation) -> Drafter[Any]:
    """Return the drafter of the method."""
    return ModelDrafter(options) if options.has_model else HistoryDrafter(options)


def _useful_blocks(config: Config, model: ModelLoaded, num_blocks: int) -> int:
    """Cap the number of blocks at what all rows of full length use, so that a small model does not take half of the
    memory."""
    return min(num_blocks, config.scheduling.max_num_seqs * _blocks_of_one_sequence(config, model))


def _explain_cut(config: Config, model: ModelLoaded, num_blocks: int) -> None:
    logger.info(
        "`kv_cache_memory` %s is more than `max_num_seqs` %d requests of %d tokens can use: the cache has %d blocks",
        config.cache.kv_cache_memory,
        config.scheduling.max_num_seqs,
        model.max_model_len,
        num_blocks,
    )


def _fitting_length(config: Config, model: ModelLoaded, num_blocks: int) -> ModelLoaded:
    """Return the facts about the model with a length of which one sequence fits into the cache."""
    fits = num_blocks * config.cache.block_size
    if fits >= model.max_model_len:
        return model
    logger.info("`max_model_len` auto: %d tokens, which the cache has room for", fits)
    return msgspec.structs.replace(model, max_model_len=fits)


def _blocks_of_one_sequence(config: Config, model: ModelLoaded) -> int:
    return -(-model.max_model_len // config.cache.block_size)


def check_kernels(loaded: list[ModelLoaded]) -> None:
    """Raise `ConfigError` unless all workers use the same kernels, since the tensors they exchange must match."""
    kinds = {worker.kernels for worker in loaded}
    if len(kinds) > 1:
        ranks = "; ".join(
            f"{kind}: rank {', '.join(str(rank) for rank, worker in enumerate(loaded) if worker.kernels == kind)}"
            for kind in sorted(kinds)
        )
        raise ConfigError(
            f"the workers compute with different kernels ({ranks}): install the same C++ compiler on every node"
        )


def _has_experts(loaded: list[ModelLoaded]) -> bool:
    return any(worker.top_k > 0 for worker in loaded)


def _routing(config: Config, loaded: list[ModelLoaded]) -> RoutingInfo | None:
    """Return the shape of routed experts if they are enabled. Raises `ConfigError` if the model has no experts."""
    if not config.model.enable_return_routed_experts:
        return None
    if not _has_experts(loaded):
        raise ConfigError(
            f"option `enable_return_routed_experts`: the model ({loaded[0].architecture}) has no experts; leave it out"
        )
    stages = loaded[:: config.parallel.tensor_parallel_size]  # the first rank of each
    return RoutingInfo(
        num_layers=sum(stage.num_moe_layers for stage in stages),
        num_experts=max(stage.num_experts for stage in stages),
        top_k=max(stage.top_k for stage in stages),
        layers=stages[0].layers_with_experts,
        num_model_layers=stages[0].num_layers,
    )


def _check_cache(config: Config, model: ModelLoaded, num_blocks: int, bytes_per_block: int) -> None:
    """Raise `ConfigError` unless one sequence of `max_model_len` tokens fits; the message says what would."""
    if num_blocks * config.cache.block_size > MAX_SLOTS:
        raise ConfigError(
            f"a cache of {num_blocks} blocks of {config.cache.block_size} tokens has more than {MAX_SLOTS:,} slots: "
            "lower `num_kv_blocks` or `kv_cache_memory`"
        )
    needed = _blocks_of_one_sequence(config, model)
    if num_blocks < needed:
        fits = num_blocks * config.cache.block_size
        shorter = f"set `max_model_len` to at most {fits}, or " if fits else ""
        raise ConfigError(
            f"the cache has room for {num_blocks} blocks, {fits} tokens, but one sequence of {model.max_model_len} "
            f"tokens needs {needed} blocks: {shorter}give the cache more: `kv_cache_memory` of "
            f"{-(-needed * bytes_per_block // 2**20)}MiB, or `num_kv_blocks` of {needed}"
        )
