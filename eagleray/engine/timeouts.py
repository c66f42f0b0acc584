"""Durations of an engine, in seconds, each with its reason."""

from __future__ import annotations

ATTACH_TIMEOUT_SECONDS = 30.0
"""Time from the engine's `Bound` to the supervisor's `Attach`, which is sent at once."""

FAILURE_REPORT_SECONDS = 1.0
"""Time for a hung engine to send the cause before it exits."""

LEAVE_MARGIN_SECONDS = 10.0
"""Time beyond the heartbeat timeout for workers to return from a step that the exit of another engine has broken."""

RESTART_MARGIN_SECONDS = 60.0
"""Time beyond the start of a missing engine: the longest delay between two restarts (30 s), and reserve."""

STATS_INTERVAL_SECONDS = 0.5
"""Interval at which a working engine reports its load; it also reports when it becomes idle."""

IDLE_POLL_SECONDS = 0.25
"""Interval at which an idle engine checks its workers and connections."""

FLUSH_SECONDS = 0.01
"""Time for zmq to send a message before a step that may crash this process."""

JOIN_TIMEOUT_SECONDS = 30.0
"""Time for which the requests of a client that has not joined are kept."""

EXPERT_LOAD_INTERVAL_SECONDS = 5.0
"""Interval of the reports of the experts' load. Reading it waits for the steps in flight, so the workers are idle for a
moment."""

WATCHDOG_MARGIN_SECONDS = 5.0
"""Margin beyond a step's time limit: the executor, which fails the step at the limit, knows the cause better."""

WATCHDOG_TICK_SECONDS = 1.0
"""Interval of the watchdog's checks; each reads one attribute."""

WATCHDOG_LATE_SECONDS = 1.0
"""Delay of a check that shows that the process itself was stopped."""

WATCHDOG_STOP_SECONDS = 5.0
"""Time for the watchdog's thread to end, which is at most one tick away."""

assert WATCHDOG_TICK_SECONDS < WATCHDOG_MARGIN_SECONDS, "a late step of the executor must not look like a hang"

GRAMMAR_POLL_SECONDS = 0.0005
"""Interval at which workers are asked whether they have compiled a grammar, while nothing else is to be done. Most take
less than a millisecond."""

GRAMMAR_TIMEOUT_SECONDS = 90.0
"""Time for all workers to compile a grammar. A worker abandons one that takes 75 s."""

TRANSFER_POLL_SECONDS = 0.02
"""Interval at which workers are asked whether they have received weights, while the engine steps."""
