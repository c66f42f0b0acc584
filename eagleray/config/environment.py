"""Access to this process's environment variables, in this module only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "EAGLERAY_"
"""Beginning of the names of eagleray's variables."""

API_KEY_VARIABLE = "EAGLERAY_API_KEY"
ADMIN_API_KEY_VARIABLE = "EAGLERAY_ADMIN_API_KEY"
VLLM_API_KEY_VARIABLE = "VLLM_API_KEY"
"""Variable that counts as `API_KEY_VARIABLE` if that is not set."""

SPINS = "1000"
"""Spins of OpenMP's threads, about ten microseconds: enough to bridge two products of a layer, too short to keep a core
from others."""


def limit_openmp_spinning() -> None:
    """Have OpenMP's threads sleep soon when they wait for each other. Call before torch is imported.

    By default GNU's threads spin for milliseconds at each of the hundreds of barriers of a step. As soon as another
    process wants one of the cores (our own API server is one), a spinning thread keeps a working one from its core:
    steps were measured to take up to fifty times as long. Sleeping at once costs a small model half its speed on an
    idle machine. A user's own setting is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def see_devices(names: Sequence[str]) -> None:
    """Restrict this process and its children to these GPUs; without names, leave the visible devices unchanged. Call
    before torch is imported."""
    if names:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def take_variable(variable: str) -> str | None:
    """Remove the variable from the environment, so that no child inherits it, and return its value or None."""
    return os.environ.pop(variable, None)


def prefixed_variables(prefix: str) -> dict[str, str]:
    """Return the variables whose names begin with this."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class BuildSettings:
    """Settings of the user's environment for the kernels of CPUs."""

    cache_directory: Path | None
    """Directory of compiled kernels; None if the user has no home."""
    compiler: str | None
    """C++ compiler with its arguments; None to search for one."""
    kernels: str | None = None
    """Name of the variant of the kernels; None to choose one."""


def build_settings() -> BuildSettings:
    """Read EAGLERAY_CACHE_DIR, else the user's cache directory of the XDG specification; CXX; EAGLERAY_CPU_KERNELS."""
    chosen, shared = os.environ.get("EAGLERAY_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    if chosen:
        cache_directory: Path | None = Path(chosen).expanduser().absolute()
    elif os.path.isabs(shared):  # the XDG specification has relative paths ignored
        cache_directory = Path(shared, "eagleray")
    else:
        home = Path(os.path.expanduser("~"))
        cache_directory = home / ".cache" / "eagleray" if home.is_absolute() else None
    return BuildSettings(
        cache_directory=cache_directory,
        compiler=os.environ.get("CXX", "").strip() or None,
        kernels=os.environ.get("EAGLERAY_CPU_KERNELS", "").strip() or None,
    )
