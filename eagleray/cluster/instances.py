"""Two instances of one name on a cluster: the later one is refused.

Every driver of an instance joins the cluster in the namespace that is the instance's unique name, so the cluster's
table of jobs tells which instances are there. Jobs are numbered in the order in which they join: of two instances that
start together the first one stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import ray
from ray.experimental.internal_kv import internal_kv_get_gcs_client

from eagleray.errors import ClusterError
from eagleray.identity import display_name
from eagleray.log import get_logger

logger = get_logger(__name__)

PATIENCE_SECONDS = 5.0
"""How long an earlier instance may take to end. Ray notices the end of a driver within a second."""

LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A program that has joined the cluster, and has not left it."""

    job_id: str
    namespace: str
    ip: str
    pid: int


def check_alone(instance: str) -> None:
    """Raise `ClusterError` if another instance that was given the same name was there before this driver, and stays."""
    name = display_name(instance)
    if name == instance:  # none was given
        return
    own_job = ray.get_runtime_context().get_job_id()
    deadline = time.monotonic() + PATIENCE_SECONDS
    is_told = False
    while (other := earlier_driver(instance, own_job, _drivers())) is not None:
        if time.monotonic() >= deadline:
            raise ClusterError(
                f"option `instance_name` is {name}, but another instance of that name runs on this Ray cluster "
                f"(process {other.pid} on {other.ip} drives it): give another name, or stop that one"
            )
        if not is_told:
            logger.info("another instance is named %s: waiting %.0f s for its end", name, PATIENCE_SECONDS)
            is_told = True
        time.sleep(LOOK_SECONDS)


def earlier_driver(instance: str, own_job: str, drivers: Iterable[Driver]) -> Driver | None:
    """The first driver of another instance of the same given name that joined before `own_job`. Pure."""
    name = display_name(instance)
    rivals = [
        driver
        for driver in drivers
        if driver.namespace not in (instance, name) and display_name(driver.namespace) == name
        if driver.job_id < own_job
    ]
    return min(rivals, key=lambda driver: driver.job_id, default=None)


def _drivers() -> list[Driver]:
    client = internal_kv_get_gcs_client()  # type: ignore[no-untyped-call]
    jobs = client.get_all_job_info(skip_submission_job_info_field=True, skip_is_running_tasks_field=True)
    return [
        Driver(
            job_id=job.job_id.hex(),
            namespace=job.config.ray_namespace,
            ip=job.driver_address.ip_address,
            pid=job.driver_pid,
        )
        for job in jobs.values()
        if not job.is_dead
    ]
