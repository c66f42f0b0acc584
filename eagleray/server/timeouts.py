"""Durations of an API server that are not options, in seconds, each with its reason.

Durations that users set (`header_timeout`, `body_timeout`, `keep_alive_timeout`, `send_timeout`,
`chat_template_timeout`, `shutdown_timeout`) are options of `config.sections`.
"""

from __future__ import annotations

# Taking connections in turn with the other API servers

ACCEPT_YIELD_SECONDS = 0.02
"""Time that a server with fewer connections gets to take the next one. Handshakes of TLS keep a server busy for longer
than 10 ms when a burst arrives."""

ACCEPT_POLL_SECONDS = 0.002
"""Interval at which a server that yields looks whether the connection is still there."""

TICK_SECONDS = 1.0
"""Longest interval at which connections are checked for their limits of time, and their number is published."""

STUCK_SERVER_SECONDS = 2.5
"""Age of a published number beyond which others do not wait for its server, because it is stuck or has exited."""

assert STUCK_SERVER_SECONDS > 2 * TICK_SECONDS, "a server that misses one tick is not stuck"

FREED_FILE_SECONDS = 0.01
NO_FILES_SECONDS = 0.1
"""Pauses after the system had no file descriptor or memory for a connection, if one could be closed and if not."""

KEEPALIVE_IDLE_SECONDS = 60
KEEPALIVE_INTERVAL_SECONDS = 15
"""TCP keep-alive: a client that has vanished is found within a few minutes, at the cost of one packet a minute."""

# Connections at and beyond the limit

NEW_CONNECTION_SECONDS = 1.0
"""Time for which a connection without a request keeps its place when all are taken: its request may be on the way."""

RESERVED_SECONDS = 5.0
"""Time in which a connection of the reserve must send its request, since the reserve is small."""

FULL_RETRY_SECONDS = 5
BUSY_RETRY_SECONDS = 5
"""`Retry-After` of refusals for want of connections, and of memory for requests that are arriving."""

WARNING_INTERVAL_SECONDS = 30.0
"""Least time between two warnings that connections have run out."""

LINGER_SECONDS = 2.0
"""Time in which a client that was refused may still send. A socket that is closed with unread bytes is reset, and the
client might never see the answer."""

TLS_SHUTDOWN_SECONDS = 1.0
"""Time in which a client of HTTPS may reply that it closes, too, before its connection is cut."""

CERTIFICATE_SECONDS = 60.0
CERTIFICATE_POLL_SECONDS = 1.0
"""Time for which an API server that replaces another waits for files of a certificate that fit, and the interval."""

# Work in the event loop

INLINE_RENDER_SECONDS = 0.05
"""Time that a chat template gets in the event loop. One that takes longer begins again in a thread."""

MEMORY_RETURN_SECONDS = 2.0
"""Delay of the clean-up after a large request, which has ended by then. One, of some 10 ms, serves all that came
together."""

# The dashboard

DASHBOARD_INTERVAL_SECONDS = 1.0
"""Interval at which the state is sent to an open page if no member joins or leaves."""

DASHBOARD_PAUSE_SECONDS = 0.1
"""Least interval, for times when members join or leave in quick succession."""

DASHBOARD_STREAM_SECONDS = 30.0
"""Time after which a stream of states ends and the page opens another: Ray Serve waits for the requests of a replica
that it takes down, and does not tell the replica."""

# Stopping

DRAIN_POLL_SECONDS = 0.02
"""Interval at which a stopping server looks whether requests are still in flight."""

FLUSH_SECONDS = 2
"""Time that connections get for the last bytes of their answers when the server stops."""
