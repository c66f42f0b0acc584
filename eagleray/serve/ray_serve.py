"""Import of Ray Serve, which is an optional part of Ray, with errors that say what to install."""

from __future__ import annotations

from typing import Any

import ray

from eagleray.errors import ConfigError

MIN_RAY = (2, 56)
"""First version of Ray whose `serve.ingress` takes an application that the replica builds."""


def import_serve() -> Any:
    """Return the module `ray.serve`. Raises `ConfigError` if it is not installed, or Ray is too old."""
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < MIN_RAY:
        least = ".".join(str(part) for part in MIN_RAY)
        raise ConfigError(
            f"eagleray.serve needs Ray {least} or newer, but Ray {ray.__version__} is installed: "
            f"pip install 'ray[serve]>={least}', on every node of the cluster"
        )
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(
            f"eagleray.serve needs Ray Serve, which cannot be imported here ({error}): pip install 'eagleray[serve]', "
            "on every node of the cluster"
        ) from None
    return serve
