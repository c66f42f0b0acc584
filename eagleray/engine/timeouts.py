"""Time limits of an engine, in seconds, each with its reason. The watchdog's and the loop's intervals are with their
users."""

from __future__ import annotations

ATTACH_TIMEOUT_SECONDS = 30.0
"""Time from the engine's `Bound` to the supervisor's `Attach`, which is sent at once."""

FAILURE_REPORT_SECONDS = 1.0
"""Time for a hung engine to send the cause before it exits."""

LEAVE_MARGIN_SECONDS = 10.0
"""Time beyond the heartbeat timeout for workers to return from a step that the exit of another engine has broken."""

RESTART_MARGIN_SECONDS = 60.0
"""Time beyond the start of a missing engine: the longest delay between two restarts (30 s), and reserve."""
