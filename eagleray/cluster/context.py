"""Ray context of the calling program, so that an engine that it asks for can be placed there too."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from eagleray.cluster.bundles import held_in_group
from eagleray.cluster.environment import ALL_DEVICES, inheritable
from eagleray.messages.workers import RayCaller, RayContext


def current_ray_context() -> RayContext | None:
    """Return the cluster, placement group and runtime_env of this program, or None if it has not connected to Ray.

    Never imports Ray. Called in the user's program, because the engine's process, its child, is in no placement group.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from ray.util import get_current_placement_group

    group = get_current_placement_group()
    return RayContext(
        address=ray.get_runtime_context().gcs_address,
        runtime_env=inheritable(_resolved_runtime_env(ray)),
        placement_group=None if group is None else group.id.hex(),
        group_bundles=[] if group is None else group.bundle_specs,
        caller=None if group is None else _find_caller(ray, group.id.hex()),
        devices=_assigned_devices(ray),
    )


def inherited_variables() -> dict[str, str]:
    """Return the variables that the actors of this process, which is connected to Ray, get from its own runtime_env."""
    import ray

    variables: dict[str, str] = _resolved_runtime_env(ray).get("env_vars", {})
    return variables


def _find_caller(ray: Any, group_id: str) -> RayCaller:
    context = ray.get_runtime_context()
    held = {
        name: sum(amount for _, amount in assigned)
        for name, assigned in context.worker.core_worker.resource_ids().items()
    }
    actor = context.get_actor_id()
    kind = f"actor {actor[:8]}" if actor else "a task"
    return RayCaller(
        name=f"{context.get_task_name() or 'the calling program'} ({kind}, process {os.getpid()})",
        held=held_in_group(held, group_id),
    )


def _assigned_devices(ray: Any) -> list[str]:
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE or not any(os.environ.get(name) for name in ALL_DEVICES):
        return []
    return [str(name) for name in context.get_accelerator_ids().get("GPU", [])]


def _resolved_runtime_env(ray: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ray.get_runtime_context().get_runtime_env_string() or "{}")
    return found
