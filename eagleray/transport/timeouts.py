"""Durations of the transport, in seconds, each with its reason."""

from __future__ import annotations

HEARTBEAT_INTERVAL_SECONDS = 1.0
"""Longest interval of heartbeats; it is a quarter of the limit if that is shorter."""

HEARTBEAT_LATE_SECONDS = 1.0
"""Delay of a heartbeat loop that shows that the process itself was stopped."""

FIRST_HEARTBEAT_SECONDS = 3.0
"""Least time for the first reply, because a starting process is busy."""

HEARTBEAT_STOP_SECONDS = 5.0
"""Time for a heartbeat thread to end, which is at most one interval away."""

assert HEARTBEAT_INTERVAL_SECONDS < FIRST_HEARTBEAT_SECONDS and HEARTBEAT_INTERVAL_SECONDS < HEARTBEAT_STOP_SECONDS

DOORBELL_SPIN_SECONDS = 100e-6
"""Time to poll before sleeping: a reply often arrives at once, and waking up takes 30 us."""

DOORBELL_SLEEP_SECONDS = 0.5
"""Longest sleep without a check."""

CHECK_INTERVAL_SECONDS = 0.1
"""Interval at which the wait for peers calls its `check`."""

UNLOCKED_DIR_SECONDS = 5.0
"""Age below which an unlocked directory is kept, because its owner may be about to lock it."""

EMPTY_DIR_SECONDS = 60.0
"""Age below which an empty directory is kept if it was made by a version of eagleray without locks."""
