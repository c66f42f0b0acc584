"""Durations of this package, in seconds, each with its reason."""

from __future__ import annotations

POLL_INTERVAL_SECONDS = 0.05
"""Pause between two looks at the control store, whose own view is some 100 ms old."""

WAIT_SECONDS = 0.2
"""Longest single wait for Ray in a loop that must also react to something else. Ray wakes it at once when an actor
exits or answers."""

PROGRESS_SECONDS = 5.0
"""Interval of log lines about the same wait."""

AUTOSCALER_INTERVAL_SECONDS = 5.0
"""Interval of the reports of Ray's autoscaler."""

AUTOSCALER_REPORT_SECONDS = 8.0
"""Time for an autoscaler's first report, from the first question on."""

PINNED_PLACEMENT_SECONDS = 3.0
"""Time for a group to become ready on nodes that seemed to have room: another program may have been faster."""

PREFLIGHT_SECONDS = 5.0
"""Time for a control store to answer. Ray itself would try for 20 to 80 s."""

RIVAL_EXIT_SECONDS = 5.0
"""Time for an earlier instance of the same name to exit. Ray notices the exit of a driver within a second."""

LOCAL_CLUSTER_STOP_SECONDS = 5.0
"""Time for the killed processes of a local cluster to exit."""

MONITOR_STOP_SECONDS = 5.0
"""Time for the thread of an `ActorMonitor` to exit."""

KILL_SECONDS = 5.0
"""Time for Ray to report killed actors as dead."""

REMOVE_GROUP_SECONDS = 5.0
"""Time for Ray to report a placement group as removed."""

RELEASE_SECONDS = KILL_SECONDS + REMOVE_GROUP_SECONDS
"""Time for everything that an engine has on the cluster to be gone; a process that closes engines must wait longer."""

assert AUTOSCALER_REPORT_SECONDS > AUTOSCALER_INTERVAL_SECONDS, "the first report must fit into the wait for it"
assert MONITOR_STOP_SECONDS > WAIT_SECONDS, "the thread reacts after one wait"
assert PINNED_PLACEMENT_SECONDS > POLL_INTERVAL_SECONDS
