"""Check that Ray Data is installed, in a version whose interface the stages use."""

from __future__ import annotations

import importlib
import re

MIN_RAY = (2, 60)
"""First version with the tested interface: `ActorPoolStrategy(max_concurrent_calls_per_actor=…)`, `repartition` with
`strict`, and checkpoints that commit files in two phases."""

HELP = 'pip install "eagleray[data]"'


def check() -> None:
    """Raise `ImportError` with a sentence if Ray Data is missing or too old."""
    try:
        ray = importlib.import_module("ray")
        for name in ("pyarrow", "ray.data"):
            importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"`eagleray.data` needs Ray Data, which cannot be imported ({error}): {HELP}") from error
    check_version(ray.__version__)


def check_version(version: str) -> None:
    """Raise `ImportError` for a version of Ray that is too old, or cannot be parsed."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < MIN_RAY:
        least = ".".join(map(str, MIN_RAY))
        raise ImportError(f"`eagleray.data` needs Ray {least} or newer, but Ray {version} is installed: {HELP}")
