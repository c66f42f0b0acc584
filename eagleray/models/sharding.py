"""The part of a layer that a tensor-parallel rank has, and the checks whether a model can be divided. Pure.

Weights are cut so that each attention and each feed-forward layer ends with one sum over the ranks: every rank has
equally many heads and inner features, and the matching columns of the weight that maps them back to the hidden state.
"""

from __future__ import annotations

from eagleray.errors import ConfigError
from eagleray.models.option_checks import check_num_stages
from eagleray.models.spec import ModelSpec
from eagleray.parallel.group import TensorParallelGroup
from eagleray.parallel.mesh import Mesh


def shard(count: int, tp: TensorParallelGroup) -> range:
    """Return this rank's part of `count`, which must be a multiple of the number of ranks."""
    size = count // tp.size
    return range(tp.rank * size, (tp.rank + 1) * size)


def padded_shard(count: int, tp: TensorParallelGroup) -> range:
    """Return this rank's part of `count` padded to a multiple of the number of ranks. It may end beyond `count`."""
    return shard(-(-count // tp.size) * tp.size, tp)


def kv_heads(total: int, tp: TensorParallelGroup) -> range:
    """Return this rank's key heads of `total`. If these are fewer than the ranks, several ranks have the same one."""
    if total >= tp.size:
        return shard(total, tp)
    head = tp.rank * total // tp.size
    return range(head, head + 1)


def num_kv_heads(total: int, tp_size: int) -> int:
    """Return the number of key heads of each rank."""
    return max(total // tp_size, 1)


def features(heads: range, head_dim: int) -> range:
    """Return the features of these heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def check_fits(spec: ModelSpec, mesh: Mesh, *, has_whole_experts: bool = False) -> None:
    """Raise `ConfigError` if the model cannot be divided over this mesh. `has_whole_experts`: experts are not cut."""
    tp = mesh.tp_size
    check_num_stages(spec.num_layers, mesh.pp_size)
    for misfit in _misfits(spec, tp, has_whole_experts):
        sizes = range(1, spec.num_heads + 1)
        fits = ", ".join(str(size) for size in sizes if not _misfits(spec, size, has_whole_experts))
        raise ConfigError(f"option `tensor_parallel_size`: {tp} does not fit the model's {misfit}; what fits is {fits}")


def check_experts(spec: ModelSpec, *, num_ranks: int, num_redundant: int) -> None:
    """Raise `ConfigError` if the experts cannot be divided among `num_ranks` ranks."""
    if spec.moe is None or not any(spec.moe.layers):
        raise ConfigError(
            f"option `enable_expert_parallel`: the model, {spec.architecture}, has no experts to divide; drop it"
        )
    count = spec.moe.num_experts
    if num_redundant > count * (num_ranks - 1):
        raise ConfigError(
            f"option `num_redundant_experts`: {num_redundant} are more than copies of all {count} experts on all "
            f"{num_ranks} ranks; at most {count * (num_ranks - 1)} make sense"
        )
    if (left := (count + num_redundant) % num_ranks) != 0:
        raise ConfigError(
            f"option `enable_expert_parallel`: {count} experts and {num_redundant} redundant ones cannot be divided "
            f"among {num_ranks} ranks; set `num_redundant_experts` to {num_redundant + num_ranks - left}, or change "
            "`tensor_parallel_size` or `data_parallel_size`"
        )


def _misfits(spec: ModelSpec, tp_size: int, has_whole_experts: bool) -> list[str]:
    """Describe the dimensions of the model that cannot be divided by `tp_size`."""
    kv, misfits = spec.num_kv_heads, []
    if spec.num_heads % tp_size != 0:
        misfits.append(f"{spec.num_heads} attention heads, which it must divide")
    if kv % tp_size != 0 and tp_size % kv != 0:
        misfits.append(f"{kv} key-value heads, of which it must be a divisor or a multiple")
    has_dense = spec.moe is None or not all(spec.moe.layers)
    if has_dense and spec.intermediate_size % tp_size != 0:
        misfits.append(f"intermediate size {spec.intermediate_size}, which it must divide")
    if spec.moe is not None and any(spec.moe.layers):
        if not has_whole_experts and spec.moe.intermediate_size % tp_size != 0:
            misfits.append(f"expert intermediate size {spec.moe.intermediate_size}, which it must divide")
        if spec.moe.shared_intermediate_size % tp_size != 0:
            misfits.append(
                f"shared experts' intermediate size {spec.moe.shared_intermediate_size}, which it must divide"
            )
    return misfits
