"""Durations of the fleet, in seconds, each with its reason.

Inequalities with durations of other packages are asserted in `tests/unit/fleet/test_timeouts.py`; docs/liveness.md
says which of them bounds which failure.
"""

from __future__ import annotations

# Start

START_MARGIN_SECONDS = 15.0
"""Time beyond `startup_timeout` after which a starting process is killed. The process itself gives up at
`startup_timeout` and reports the cause, so only a process that hangs is killed."""

FIRST_HEARTBEAT_TIMEOUT_SECONDS = 120.0
"""Time from `Attach` to a member's first heartbeat: before it a member may load libraries from a slow disk."""

# Restart

FIRST_RESTART_DELAY_SECONDS = 0.5
"""Delay of the second restart in a row; the first has none. Each start that fails doubles it. A process that exited
soon after its start is never delayed longer than this, because it can start, and requests wait for it."""

MAX_ENGINE_DELAY_SECONDS = 30.0
"""Longest delay of an engine's restart, which loads a model each time."""

MAX_API_SERVER_DELAY_SECONDS = 1.0
"""Longest delay of an API server's restart, which is cheap, and without which no client is served."""

STEADY_SECONDS = 10.0
"""A process that has worked for this long gets its whole budget of restarts back."""

# Scaling

SCALE_START_ATTEMPTS = 2
"""Starts for which an operation waits for an engine that it has added, before it is rolled back."""

REGROUP_WAIT_SECONDS = 600.0
"""Time for which an operation that changes an expert group waits for control calls and weight updates to end, and for
memory to wake up, before it fails."""

FETCH_CHECKPOINT_SECONDS = 12 * 3600.0
"""Time for an API server to download the checkpoint that a restart names, before the operation fails. Downloads notice
by themselves that a connection delivers nothing, so only a terabyte over a slow line takes nearly as long."""

SURGE_PLACEMENT_SECONDS = 10.0
"""Time for which an engine that runs while others are restarted waits for resources of Ray. Without it the restart goes
on as well, so it does not wait for nodes that a cluster may get."""

AUTOSCALE_DRAIN_SECONDS = 30.0
"""Time for which an engine that the autoscaler removes may finish its requests. Then they move, which costs others the
computation of their prompts; meanwhile a burst of load cannot add engines."""

# Stop

STOP_TIMEOUT_SECONDS = 15.0
"""Time for a process to exit after it was told to or has failed, before the next stronger means (`Stop`, SIGTERM,
SIGKILL), and between two warnings that a killed one still runs. An engine stops its workers first."""

FLUSH_SECONDS = 2.0
"""Time for API servers to tell their clients the cause when the instance fails."""

# Connections and leases

CONNECTION_POLL_SECONDS = 1.0
"""Interval between two looks for broken connections."""

DISCONNECT_GRACE_SECONDS = 3.0
"""Time between the report of a broken connection and the eviction of one of its ends. A connection also breaks because
a process exits, and that is reported within this time."""

LATE_TIMER_SECONDS = 1.0
"""A lease's timer that fires later than this shows that this process itself did not run and received nothing."""

# Control calls and weights

CALL_TIMEOUT_LIMIT_SECONDS = 7 * 86_400.0
"""Longest time limit of a control call; a call that asks for a longer one gets this."""

FETCH_WEIGHTS_TIMEOUT_SECONDS = 600.0
"""Time for an engine to copy weights from one source, before it tries the next."""

FETCH_RETRY_SECONDS = 5.0
"""Time until sources are tried again when all have failed."""

STATE_TIMEOUT_SECONDS = 660.0
"""Time for an engine that has not joined to adopt the state of the instance, before it is replaced. It may be copying
weights before. Also the time beyond the deadline of a call for which an engine goes on adopting its state, because the
state holds although the call failed."""

# The driver of Ray

DRIVER_CONNECT_TIMEOUT_SECONDS = 120.0
"""Time for a driver to connect to Ray. Ray itself gives up earlier."""

DRIVER_RETRY_DELAYS_SECONDS = (0.0, 1.0, 2.0)
"""Delays of the further attempts to get the first driver connected."""

DRIVER_STOP_TIMEOUT_SECONDS = 15.0
"""Time for the driver to exit after SIGTERM, before it is killed."""

ACTORS_STOP_TIMEOUT_SECONDS = 12.0
"""Time for a driver that stops to kill its engines' actors and remove their placement groups."""

DRIVER_POLL_INTERVAL_SECONDS = 1.0
"""Longest wait of the driver's main thread for a message. A signal wakes that thread at once, unless another thread
received the signal."""

SPAWN_BATCH_SECONDS = 0.02
"""Time to wait after one message for further ones, so that engines that are spawned together are placed together."""

DRAIN_POLL_SECONDS = 2.0
"""Interval at which the driver looks for nodes that drain. Cloud providers give notice of 30 s or more."""

ACTOR_POLL_INTERVAL_SECONDS = 0.2
"""Interval at which the thread of a running actor checks whether it is to kill the actor. The actor's exit wakes the
thread at once."""

assert ACTORS_STOP_TIMEOUT_SECONDS < DRIVER_STOP_TIMEOUT_SECONDS, "a driver names the actors that are late itself"
assert CONNECTION_POLL_SECONDS < DISCONNECT_GRACE_SECONDS, "both ends of a broken connection report it before one goes"
assert FIRST_RESTART_DELAY_SECONDS < MAX_API_SERVER_DELAY_SECONDS < MAX_ENGINE_DELAY_SECONDS
assert FETCH_WEIGHTS_TIMEOUT_SECONDS < STATE_TIMEOUT_SECONDS, "an engine that copies weights is not replaced for that"
assert FLUSH_SECONDS < STOP_TIMEOUT_SECONDS, "API servers tell the cause before they are terminated"
