"""Paths of requests as the router matches them. Pure."""

from __future__ import annotations

from starlette._utils import get_route_path


def normalized(path: str, root_path: str) -> str:
    """Return the path without slashes at its end, but with one if there is nothing else behind `root_path`."""
    short = path.rstrip("/")
    return short + "/" if short in ("", root_path) else short


def route_path(path: str, root_path: str) -> str:
    """Return the normalized path without `root_path`, if the path has it."""
    return get_route_path({"path": normalized(path, root_path), "root_path": root_path})
