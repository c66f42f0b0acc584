"""The memory that the cache may take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from eagleray.errors import ConfigError
from eagleray.models.sharding import num_kv_heads
from eagleray.models.spec import ModelSpec
from eagleray.parallel.mesh import Mesh

CPU_FRACTION = 0.5
"""Fraction of the host's free memory that the cache may take, because other programs use the host too."""

WHOLE_MODEL = Mesh()


def available_bytes(device: torch.device, *, gpu_memory_utilization: float, step_bytes: int) -> int:
    """Return the bytes that the cache may take, once the weights are loaded.

    On a GPU: the part of its memory that the engine may use, less the memory in use and less `step_bytes`, the need of
    the largest step. On the host: half of the free memory, under the container's limit if there is one.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        available = int(total * gpu_memory_utilization) - (total - free) - step_bytes
        if available <= 0:
            raise ConfigError(
                f"the model leaves no memory for the cache: the GPU has {total / 2**30:.1f} GiB, "
                f"{free / 2**30:.1f} GiB are free, a step needs {step_bytes / 2**30:.1f} GiB; raise "
                f"`gpu_memory_utilization` (now {gpu_memory_utilization}) or lower `max_num_batched_tokens`"
            )
        return available
    return int((_host_free() - step_bytes) * CPU_FRACTION)


def total_bytes(device: torch.device) -> int:
    """Return the memory of the device in bytes, used or not: for the host with its swap, under the container's
    limit."""
    if device.type == "cuda":
        total: int = torch.cuda.mem_get_info(device)[1]
        return total
    return min([_meminfo("MemTotal") + _meminfo("SwapTotal"), *(limit for limit, _ in _cgroup_limits())])


def step_bytes(
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    num_tokens: int,
    num_logits: int,
    mesh: Mesh = WHOLE_MODEL,
    num_exchanging: int = 0,
) -> int:
    """Return an upper estimate of the bytes that a step takes beside weights and cache, on the worker at `mesh`.

    For each token, a few copies of its hidden state and of the widest activation of a layer, of which the worker has
    its shard; in a pipeline, hidden states that the next stage has not received yet. For each row that samples, a few
    copies of its float32 logits, where they are gathered. `num_exchanging` is the number of engines that send each
    other tokens for their experts, this one included; the tokens of all may reach one worker, and the outputs of each
    token's experts.
    """
    tp = mesh.tp_size
    if (mla := spec.mla) is not None:
        heads = mla.query_dim + mla.qk_nope_head_dim + mla.v_head_dim
        attention = spec.num_heads // tp * heads + mla.cached_size
    else:
        attention = (spec.num_heads // tp + 2 * num_kv_heads(spec.num_kv_heads, tp)) * spec.head_dim
    experts = spec.moe.top_k * spec.moe.intermediate_size if spec.moe else 0
    widest = max(attention, 2 * spec.intermediate_size // tp, 2 * experts // tp)
    hidden_states = 4 if mesh.is_last_stage else 5 + mesh.pp_size
    per_token = (hidden_states * spec.hidden_size + 3 * widest) * dtype.itemsize
    if spec.moe is not None:
        per_exchanged = 2 * dtype.itemsize + (2 + spec.moe.top_k) * 4
        per_token += num_exchanging * spec.hidden_size * per_exchanged
    vocab_size = spec.vocab_size if mesh.is_sampler else spec.vocab_size // tp if mesh.is_last_stage else 0
    return num_tokens * per_token + num_logits * vocab_size * 4 * 4


def _host_free() -> int:
    """Return the bytes that this process could still take, in the smaller of host and cgroup."""
    return max(0, min([_meminfo("MemAvailable"), *(limit - used for limit, used in _cgroup_limits())]))


def _meminfo(name: str) -> int:
    """Return an entry of /proc/meminfo, which describes the whole host, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield the bytes that the container may use and does use, by cgroups of version 2 and 1, where there is a
    limit."""
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = Path(limit_file).read_text().strip(), Path(used_file).read_text().strip()
        except OSError:
            continue
        if limit != "max":
            yield int(limit), int(used)
