"""The only place that touches this process's environment variables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

API_KEY_VARIABLE = "EAGLERAY_API_KEY"

SPINS = "1000"
"""About ten microseconds: enough to bridge two products of a layer, too little to keep a core from others."""


def limit_openmp_spinning() -> None:
    """Have OpenMP's threads sleep soon when they wait for each other. Must come before torch is imported.

    By default GNU's spin for milliseconds at each of the hundreds of barriers of a step. As soon as another process
    wants one of the cores (our own API server is one), the thread that spins keeps the one that works from its core:
    measured, steps took up to fifty times as long. Sleeping at once costs a small model half its speed on an idle
    machine. What the user has set is left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def see_devices(names: Sequence[str]) -> None:
    """Have this process and its children see these GPUs alone; without names, what they see anyway. Must come before
    torch is imported."""
    if names:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def take_api_keys() -> str | None:
    """The value of EAGLERAY_API_KEY, which no child of this process gets; None if it is not set."""
    return os.environ.pop(API_KEY_VARIABLE, None)


@dataclass(frozen=True)
class BuildSettings:
    """What the user's environment says about compiling."""

    cache_directory: Path | None
    """Where to keep what was compiled; None if the user has no home."""
    compiler: str | None
    """The C++ compiler to use, with its arguments; None: one that is found."""


def build_settings() -> BuildSettings:
    """EAGLERAY_CACHE_DIR, else the user's cache directory as the XDG specification has it; and CXX."""
    chosen, shared = os.environ.get("EAGLERAY_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    if chosen:
        cache_directory: Path | None = Path(chosen).expanduser().absolute()
    elif os.path.isabs(shared):  # the specification: a relative one is to be ignored
        cache_directory = Path(shared, "eagleray")
    else:
        home = Path(os.path.expanduser("~"))
        cache_directory = home / ".cache" / "eagleray" if home.is_absolute() else None
    return BuildSettings(cache_directory=cache_directory, compiler=os.environ.get("CXX", "").strip() or None)
