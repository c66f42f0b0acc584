"""Paths of requests as the router matches them. Pure."""

from __future__ import annotations

from starlette._utils import get_route_path


def route_path(path: str, root_path: str) -> str:
    """Return the path without `root_path`, if the path has it, and without a slash at its end."""
    return get_route_path({"path": without_last_slash(path), "root_path": root_path})


def without_last_slash(path: str) -> str:
    """Return the path without a slash at its end, unless it is nothing else."""
    return path[:-1] if len(path) > 1 and path.endswith("/") else path
