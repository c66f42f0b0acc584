"""Time limits of the executor, in seconds, each with its reason."""

from __future__ import annotations

STEP_TIMEOUT_SECONDS = 600.0
"""Time limit of a step whose sender sets none."""

ROOT_CAUSE_SECONDS = 0.3
"""Time to wait for the report of a worker's exit: its peers fail too, and their failures may arrive first."""

PEER_EXIT_SECONDS = 3.0
"""Time to wait for the report of a worker's exit after one of its peers lost the connection. Ray takes 2 s to notice
that a whole host is lost."""

SEND_TIMEOUT_SECONDS = 60.0
"""Time for a worker to make room in its queue; a live worker that does not is hung."""

PROCESS_STOP_SECONDS = 3.0
"""Time for workers to exit after the queue was closed, and again after SIGTERM."""
