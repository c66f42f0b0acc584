"""Whether engines that are processes find room on this host beside those that run.

Each engine needs GPUs of its own, if there are some. Its memory is estimated, and refused only if it cannot be had: a
further engine takes what the smallest one that runs has taken. Where the size of its cache follows the free memory,
that is counted without the cache, of which an unknown part has been touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable

from eagleray.config.resolve import first_device, local_ranks
from eagleray.config.sections import CacheConfig, Config
from eagleray.messages.membership import EngineInfo
from eagleray.process.host_gpus import num_visible_gpus
from eagleray.process.host_memory import host_free_bytes, own_bytes

LEAST_ENGINE_BYTES = 128 * 2**20
"""Memory that an engine of the smallest model takes, with the libraries that it loads."""


def explain_memory_shortage(
    num_added: int,
    infos: Collection[EngineInfo],
    cache: CacheConfig,
    *,
    read_free: Callable[[], int] = host_free_bytes,
    read_own: Callable[[Iterable[int]], int] = own_bytes,
) -> str | None:
    """Return why `num_added` engines more do not fit into the free memory of this host, or None if they may fit.

    `infos`: properties of the engines that run. `read_own` returns the bytes that processes have for themselves.
    """
    has_fixed_cache = cache.num_kv_blocks is not None or cache.kv_cache_memory is not None
    sizes = []
    for info in infos:
        processes = [process for process in (info.process, *info.workers) if process is not None]
        size = read_own(process.pid for process in processes)
        sizes.append(size if has_fixed_cache else size - info.cache_bytes)
    needed, free = num_added * max(LEAST_ENGINE_BYTES, min(sizes, default=0)), read_free()
    if needed <= free:
        return None
    engines = "1 engine" if num_added == 1 else f"{num_added} engines"
    part = "" if has_fixed_cache else " without caches"
    return (
        f"{engines} more would take about {_gib(needed)} of memory{part}, judged by those that run, but "
        f"{_gib(free)} are free on this host: ask for fewer engines, free memory"
        f"{', or lower `kv_cache_memory` or `num_kv_blocks` in a new start' if has_fixed_cache else ''}"
    )


def explain_gpu_shortage(
    num_added: int, ranks: Collection[int], config: Config, *, count_gpus: Callable[[], int] = num_visible_gpus
) -> str | None:
    """Return why `num_added` engines more have no GPUs of their own beside those of `ranks`, or None if they have, or
    compute without GPUs."""
    if config.execution.device == "cpu" or config.execution.executor in ("ray", "ray-graph"):
        return None
    free = (rank for rank in itertools.count(local_ranks(config)[0]) if rank not in ranks)
    highest = max([*ranks, *itertools.islice(free, num_added)])
    world_size, count = config.parallel.world_size, count_gpus()
    needed = first_device(config, highest) + world_size
    if count == 0 or needed <= count:
        return None
    engines = "1 engine" if num_added == 1 else f"{num_added} engines"
    return f"{engines} more would need {needed} GPUs with those that run, but this host has {count}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
