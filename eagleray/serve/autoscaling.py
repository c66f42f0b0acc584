"""Autoscaling policy of Ray Serve: number of replicas that the sequences in their engines and queues need. Pure.

Serve's controller gets a copy of this module and need not have the package installed, so it imports nothing of it.
"""

from __future__ import annotations

from typing import Any

RUNNING = "running_sequences"
WAITING = "waiting_sequences"
"""Names of the numbers that a replica records for the policy."""

SETTLED_QUEUE = 0.5
"""Mean number of waiting sequences up to which a queue counts as empty: a new sequence waits for the next step."""


def scale_by_queue(context: Any) -> tuple[float, dict[str, Any]]:
    """Return how many replicas the load needs, and no state. `context`: Serve's `AutoscalingContext`.

    A replica whose engines have no queue has room for `target_ongoing_requests` sequences; one with a queue has room
    for its running ones, because its cache holds no more. Requests that wait in Serve count as one sequence each.
    """
    target = context.config.get_target_ongoing_requests()
    recorded = context.aggregated_metrics or {}
    running, waiting = recorded.get(RUNNING, {}), recorded.get(WAITING, {})
    replicas = (context.total_queued_requests or 0.0) / target
    for replica, sequences in running.items():
        queue = waiting.get(replica, 0.0)
        room = min(target, max(1.0, sequences)) if queue > SETTLED_QUEUE else target
        replicas += (sequences + queue) / room
    return replicas, {}
