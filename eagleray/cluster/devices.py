"""Which GPU a worker uses. Pure.

Ray is told not to rewrite CUDA_VISIBLE_DEVICES: every worker of a node sees what the node's raylet sees, so that
workers can reach each other's memory, and takes the one that Ray has assigned to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagleray.errors import ClusterError


def shown(visible: str | None) -> list[str] | None:
    """CUDA_VISIBLE_DEVICES as a list of ids; None where every GPU is seen."""
    return None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]


def may_have_devices(resources: Mapping[str, float]) -> bool:
    """Whether an actor that takes these resources may use a GPU: a resource of the user's own may stand for one."""
    return not resources.keys() <= {"CPU", "memory"}


def device_index(assigned: Sequence[str], visible: str | None) -> int | None:
    """Position, among the GPUs that the process sees, of the first one that Ray has assigned; None if it assigned none.

    `assigned` are ids as CUDA_VISIBLE_DEVICES has them: numbers, or names of GPUs and their slices.
    """
    if not assigned:
        return None
    names = shown(visible)
    if names is not None and assigned[0] in names:
        return names.index(assigned[0])
    if names is None and assigned[0].isdigit():
        return int(assigned[0])
    raise ClusterError(
        f"Ray assigned GPU {assigned[0]} to a worker, but its process has CUDA_VISIBLE_DEVICES={visible}: do not set "
        "CUDA_VISIBLE_DEVICES in `ray_runtime_env`"
    )
