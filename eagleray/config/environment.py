"""The only place that touches this process's environment variables."""

from __future__ import annotations

import os

__all__ = ["let_waiting_threads_sleep"]

SPINS = "1000"
"""About ten microseconds: enough to bridge two products of a layer, too little to keep a core from others."""


def let_waiting_threads_sleep() -> None:
    """Have OpenMP's threads sleep soon when they wait for each other. Must come before torch is imported.

    By default GNU's spin for milliseconds at each of the hundreds of barriers of a step. As soon as another process
    wants one of the cores (our own API server is one), the thread that spins keeps the one that works from its core:
    measured, steps took up to fifty times as long. Sleeping at once costs a small model half its speed on an idle
    machine. What the user has set is left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
