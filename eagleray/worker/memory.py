"""How much memory there is for the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from eagleray.errors import ConfigError
from eagleray.models.sharding import num_kv_heads
from eagleray.models.spec import ModelSpec
from eagleray.parallel.mesh import Mesh

CPU_SHARE = 0.5
"""Part of the host's free memory that the cache may take: other programs live there too."""

WHOLE_MODEL = Mesh()


def available_bytes(device: torch.device, *, gpu_memory_utilization: float, step_bytes: int) -> int:
    """Bytes that the cache may take now that the weights are loaded.

    On a GPU: the part of its memory that the engine may use, less what is in use and less `step_bytes`, what the
    largest step takes for itself. On the host: half of what is free, under the container's limit if there is one.
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
    return int((_host_free() - step_bytes) * CPU_SHARE)


def total_bytes(device: torch.device) -> int:
    """Bytes of memory that the device has, used or not: of the host with its swap, under the container's limit."""
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
    """Upper estimate of what a step takes beside weights and cache, on the worker at this place of the mesh.

    For each token, a few copies of its hidden state and of the widest activation of a layer, of which the worker has
    its share; in a pipeline, hidden states that the next stage has not fetched yet. For each row that samples, a few
    copies of its float32 logits, where they come together. `num_exchanging`: engines that send each other rows for
    their experts, this one included; the rows of all may come to one worker, and the outputs of each row's experts.
    """
    tp = mesh.tp_size
    if (latent := spec.mla) is not None:
        heads = latent.query_dim + latent.qk_nope_head_dim + latent.v_head_dim
        attention = spec.num_heads // tp * heads + latent.cached_size
    else:
        attention = (spec.num_heads // tp + 2 * num_kv_heads(spec.num_kv_heads, tp)) * spec.head_dim
    experts = spec.moe.top_k * spec.moe.intermediate_size if spec.moe else 0
    widest = max(attention, 2 * spec.intermediate_size // tp, 2 * experts // tp)
    hidden_states = 4 if mesh.is_last_stage else 5 + mesh.pp_size
    per_token = (hidden_states * spec.hidden_size + 3 * widest) * dtype.itemsize
    if spec.moe is not None:
        per_row = 2 * dtype.itemsize + (2 + spec.moe.top_k) * 4
        per_token += num_exchanging * spec.hidden_size * per_row
    vocab_size = spec.vocab_size if mesh.is_sampler else spec.vocab_size // tp if mesh.is_last_stage else 0
    return num_tokens * per_token + num_logits * vocab_size * 4 * 4


def _host_free() -> int:
    """Bytes that this process could still take, in the smaller of host and cgroup."""
    return max(0, min([_meminfo("MemAvailable"), *(limit - used for limit, used in _cgroup_limits())]))


def _meminfo(name: str) -> int:
    """Bytes that /proc/meminfo says of the whole host."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Bytes that the container may use and does use, by cgroups of version 2 and 1; nothing where there is no limit."""
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
