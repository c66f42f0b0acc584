"""Default options of a deployment. The user's own replace them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagleray.cluster.actor_options import as_actor_options
from eagleray.config.sections import Config
from eagleray.serve.resources import ReplicaResources

NAME = "eagleray"

QUEUED_SHARE = 4
"""One request for this many running sequences may wait in the engines. The others wait in Serve, for any replica."""

MIN_QUEUED = 16
"""Least number of requests that a replica takes beyond the running sequences, for its state and metrics too."""

TARGET_SHARE = 0.75
"""Part of the sequences that its engines may run at which a replica is loaded as the autoscaler wants it."""

HEALTH_CHECK_PERIOD_SECONDS = 5.0
HEALTH_CHECK_TIMEOUT_SECONDS = 30.0

GRACEFUL_SHUTDOWN_SECONDS = 60.0
"""Time for running requests to finish and then for engines to stop, before Serve kills the replica."""

AUTOSCALING_POLICY = "eagleray.serve.autoscaling:scale_by_queue"


def deployment_options(config: Config, resources: ReplicaResources, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `serve.deployment`: those given, over our defaults."""
    sequences = config.scheduling.max_num_seqs * config.parallel.data_parallel_size
    options: dict[str, Any] = {
        "name": NAME,
        "max_ongoing_requests": sequences + max(MIN_QUEUED, sequences // QUEUED_SHARE),
        "health_check_period_s": HEALTH_CHECK_PERIOD_SECONDS,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_SECONDS,
        "graceful_shutdown_timeout_s": GRACEFUL_SHUTDOWN_SECONDS,
    }
    if resources.bundles and "placement_group_bundles" not in given:
        options["placement_group_bundles"] = [dict(bundle) for bundle in (resources.replica, *resources.bundles)]
        options["placement_group_strategy"] = resources.strategy
    options |= given
    options["ray_actor_options"] = {**given.get("ray_actor_options", {}), **as_actor_options(resources.replica)}
    if given.get("num_replicas") == "auto" or given.get("autoscaling_config") is not None:
        options["autoscaling_config"] = _autoscaling(sequences, given.get("autoscaling_config"))
    return options


def _autoscaling(sequences: int, given: Any) -> Any:
    """Return the autoscaling configuration, with our policy and target unless it has its own."""
    if given is not None and not isinstance(given, Mapping):
        return given  # an AutoscalingConfig of Ray is complete
    defaults = {
        "target_ongoing_requests": max(1.0, TARGET_SHARE * sequences),
        "policy": {"policy_function": AUTOSCALING_POLICY},
    }
    return defaults | dict(given or {})
