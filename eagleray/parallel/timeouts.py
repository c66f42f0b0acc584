"""Durations of the groups of ranks, each with its reason."""

from __future__ import annotations

OPERATION_TIMEOUT_SECONDS = 600.0
"""An operation waits this long for the other ranks, which may be in a long step. The engine notices a rank that has
exited much earlier."""

STORE_BIND_TIMEOUT_SECONDS = 30.0
"""Rank 0 waits this long for the connection to its own store, which is in the same process."""

SPIN_SECONDS = 0.001
"""A rank that waits for another spins this long before it sleeps: ranks compute the same, so the others are usually
only microseconds away."""

SLEEP_SECONDS = 50e-6
"""A rank that has spun in vain sleeps this long between two looks at the other's counter."""

POLL_INTERVAL_SECONDS = 0.05
"""A waiting rank checks this often whether the others still run, which takes system calls."""

CONNECTION_CHECK_SECONDS = 0.5
"""A rank that waits for ranks of other hosts checks this often whether they are connected, by sending them bytes."""

assert SLEEP_SECONDS < POLL_INTERVAL_SECONDS, "a sleeping rank wakes in time for the next check"
assert POLL_INTERVAL_SECONDS < OPERATION_TIMEOUT_SECONDS, "an exit is noticed and named before the operation times out"
