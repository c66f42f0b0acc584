"""What the calling program is in, so that an engine that it asks for can be put there too."""

from __future__ import annotations

import sys

from eagleray.messages.workers import RayContext

__all__ = ["current"]


def current() -> RayContext | None:
    """The cluster and the placement group of this program, if it has connected to Ray already. Never imports Ray.

    To be asked in the user's program: the engine's process, its child, is in no placement group.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    from ray.util import get_current_placement_group

    group = get_current_placement_group()
    return RayContext(
        address=ray.get_runtime_context().gcs_address,
        placement_group=None if group is None else group.id.hex(),
    )
