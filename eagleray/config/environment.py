"""The only place that touches this process's environment variables."""

from __future__ import annotations

import os

__all__ = ["let_waiting_threads_sleep"]


def let_waiting_threads_sleep() -> None:
    """Have OpenMP's threads sleep while they wait for each other. Must come before torch is imported.

    By default they spin, for a millisecond at each of the hundreds of barriers of a step. As soon as another process
    wants one of the cores (our own API server is one), the thread that spins keeps the one that works from its core:
    measured, a step of a small model took fifty times as long. What the user has set is left alone.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
