"""Time limits and intervals of a worker, in seconds, each with its reason."""

from __future__ import annotations

ATTACH_TIMEOUT_SECONDS = 60.0
"""Time to attach to the engine's queue, which exists before the worker is started."""

POLL_INTERVAL_SECONDS = 60.0
"""Time of one wait for a call, after which the next wait begins. A queue that the engine closes ends it at once."""

DEVICE_POLL_SECONDS = 50e-6
"""Time of one wait for a call while a GPU computes a step, after which the worker looks whether it is done."""

SEND_TIMEOUT_SECONDS = 60.0
"""Time to send a reply. The engine reads replies all the time, so one that reads none for so long has failed."""

JOIN_TIMEOUT_SECONDS = 60.0
"""Time to join an expert group. The workers of all engines have opened it by then, so only connections are missing."""

MEMORY_POLL_SECONDS = 0.2
"""Time between two looks at the free memory of a GPU that others may give back."""

MEMORY_SETTLE_SECONDS = 10.0
"""Time without memory that is given back after which no more is expected: the workers of an engine that was killed exit
within 5 s."""

MEMORY_TIMEOUT_SECONDS = 60.0
"""Longest wait for memory that is given back little by little."""

QUIET_SECONDS = 0.2
"""Time without a step before cache pages are requested in advance, so that the steps of one request do not compete with
it for a core."""

STOP_TIMEOUT_SECONDS = 5.0
"""Time for the prefault thread to finish its current page."""

TRANSFER_STOP_SECONDS = 0.5
"""Time for the thread that receives weights to end after its group was closed, before it is left to its time limit."""
