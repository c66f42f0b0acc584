"""The memory of the device: the part that the cache may take, and the wait for memory that other processes free.

On a GPU the largest steps have run before the cache is sized (`rehearsal.py`), so their memory counts as used. On the
host nothing has run: `Model.step_bytes` estimates the memory of steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from eagleray.errors import ConfigError
from eagleray.log import get_logger
from eagleray.process.host_memory import host_total_bytes
from eagleray.worker.timeouts import MEMORY_POLL_SECONDS, MEMORY_SETTLE_SECONDS, MEMORY_TIMEOUT_SECONDS

logger = get_logger(__name__)

CPU_FRACTION = 0.5
"""Fraction of the host's free memory that the cache may take, because other programs use the host too."""

GRAPH_BYTES = 512 * 2**20
"""Memory of a GPU that is kept for captured graphs. They hold the cache's address, so they are captured after it is
allocated; a graph takes about a third of a megabyte, and a model has a few hundred."""

EXPERT_GROUP_BYTES = 512 * 2**20
"""Memory of a GPU that is kept for NCCL's buffers between engines that share experts. They connect when all of them
have started, after their caches are allocated."""

MIN_RETURNED_BYTES = 64 * 2**20
"""Smaller changes of the free memory do not count as memory that is given back."""


def gpu_cache_bytes(
    *,
    free: int,
    total: int,
    utilization: float,
    reserved: int,
    num_tokens: int,
    num_weight_bytes: int,
    num_adapter_bytes: int = 0,
) -> int:
    """Return the bytes that the cache may take of a GPU, after the largest steps have run.

    `free` of `total` bytes are free now, the engine may use the part `utilization` of all, and `reserved` bytes are
    kept for what comes later. Raises `ConfigError` if nothing is left; its message names `num_weight_bytes`, of which
    `num_adapter_bytes` are slots for adapters, and `num_tokens`, those of the largest step.
    """
    in_use = total - free
    available = int(total * utilization) - in_use - reserved
    if available <= 0:
        slots, advice = "", ""
        if num_adapter_bytes:
            slots = f", with slots for adapters of {_gib(num_adapter_bytes)}"
            advice = "`max_loras`, `max_lora_rank`, "
        raise ConfigError(
            f"the model leaves no memory for the cache: the GPU has {_gib(total)}, of which {_gib(free)} are free once "
            f"the weights ({_gib(num_weight_bytes)}{slots}) are loaded and steps of {num_tokens} tokens have run, and "
            f"{_gib(reserved)} are kept; raise `gpu_memory_utilization` (now {utilization:g}), lower "
            f"{advice}`max_num_batched_tokens` or `max_num_seqs`, or divide the model (`tensor_parallel_size`)"
        )
    return available


def host_cache_bytes(*, free: int, step_bytes: int, num_workers: int) -> int:
    """Return the bytes that the cache may take of the host, which `num_workers` workers share: half of what is free
    beside their steps of `step_bytes`. Raises `ConfigError` if nothing is left."""
    available = int((free // num_workers - step_bytes) * CPU_FRACTION)
    if available <= 0:
        raise ConfigError(
            f"no memory is left for the cache: a worker's steps take up to {_gib(step_bytes)}, and {_gib(free)} are "
            f"free on the host, for {num_workers} workers; lower `max_num_batched_tokens` or `max_num_seqs`, set "
            "`kv_cache_memory`, or free memory"
        )
    return available


def check_cache_fits(num_bytes: int, *, total: int, num_workers: int) -> None:
    """Raise `ConfigError` unless caches of `num_bytes` of each of `num_workers` workers fit into the `total` bytes of
    their device."""
    if num_bytes * num_workers > total:
        workers = f" for each of {num_workers} workers" if num_workers > 1 else ""
        raise ConfigError(
            f"a cache of {_gib(num_bytes)}{workers} does not fit: the device has {_gib(total)}; lower "
            "`kv_cache_memory` or `num_kv_blocks`"
        )


def wait_for_memory(
    wanted: int,
    read_free: Callable[[], int],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Wait until `wanted` bytes are free or nothing is given back any longer, and return the free bytes.

    The workers of a killed engine may still hold the memory of a GPU when those of its replacement start.
    """
    free, started = read_free(), clock()
    if free >= wanted:
        return free
    logger.info("waiting until %s of the GPU are free, now %s: others hold the rest", _gib(wanted), _gib(free))
    most, changed = free, started
    while free < wanted and clock() < min(changed + MEMORY_SETTLE_SECONDS, started + MEMORY_TIMEOUT_SECONDS):
        sleep(MEMORY_POLL_SECONDS)
        free = read_free()
        if free >= most + MIN_RETURNED_BYTES:
            most, changed = free, clock()
    logger.info("after %.1f s %s of the GPU's memory are free", clock() - started, _gib(free))
    return free


def wait_for_weights(needed: int, read_free: Callable[[], int], wait: Callable[..., int] = wait_for_memory) -> None:
    """Wait until a GPU has room for weights of `needed` bytes. Raises `ConfigError` if it gets none."""
    free = wait(needed, read_free)
    if free < needed:
        raise ConfigError(
            f"the weights take {_gib(needed)} of each worker, but {_gib(free)} of its GPU are free: end what else uses "
            "it, or divide the model among more workers (`tensor_parallel_size`, `pipeline_parallel_size`)"
        )


def out_of_memory(what: str, advice: str, device: torch.device) -> ConfigError:
    """Return the error for a GPU whose memory has not sufficed for `what`."""
    free, total = torch.cuda.mem_get_info(device)
    return ConfigError(f"the GPU has too little memory for {what}: {_gib(free)} of {_gib(total)} are free; {advice}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def total_bytes(device: torch.device) -> int:
    """Return the memory of the device in bytes, used or not: for the host with its swap, under the container's
    limit."""
    if device.type == "cuda":
        total: int = torch.cuda.mem_get_info(device)[1]
        return total
    return host_total_bytes()
