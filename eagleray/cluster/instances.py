"""Names of instances on a cluster: of two instances with the same given name the later one is refused.

Every driver of an instance joins the cluster in the namespace that is the instance's unique name, so the cluster's
table of jobs shows which instances run. Jobs are numbered in the order in which they join: of two instances that start
together the first one stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import ray
from ray.experimental.internal_kv import internal_kv_get_gcs_client

from eagleray.cluster.timeouts import RIVAL_EXIT_SECONDS, WAIT_SECONDS
from eagleray.errors import ClusterError
from eagleray.identity import display_name
from eagleray.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """A driver that has joined the cluster and has not left it."""

    job_id: str
    namespace: str
    ip: str
    pid: int


def check_name_is_free(instance: str) -> None:
    """Raise `ClusterError` if another instance that was given the same name joined before this driver, and stays."""
    name = display_name(instance)
    if name == instance:  # none was given
        return
    own_job = ray.get_runtime_context().get_job_id()
    deadline = time.monotonic() + RIVAL_EXIT_SECONDS
    is_logged = False
    while (rival := earlier_job(instance, own_job, _list_jobs())) is not None:
        if time.monotonic() >= deadline:
            raise ClusterError(
                f"option `instance_name` is {name}, but another instance of that name runs on this Ray cluster "
                f"(process {rival.pid} on {rival.ip} drives it): give another name, or stop that one"
            )
        if not is_logged:
            logger.info("another instance is named %s: waiting %.0f s for it to exit", name, RIVAL_EXIT_SECONDS)
            is_logged = True
        time.sleep(WAIT_SECONDS)


def earlier_job(instance: str, own_job: str, jobs: Iterable[RayJob]) -> RayJob | None:
    """Return the first job of another instance with the same given name that joined before `own_job`. Pure."""
    name = display_name(instance)
    rivals = [
        job
        for job in jobs
        if job.namespace not in (instance, name) and display_name(job.namespace) == name
        if job.job_id < own_job
    ]
    return min(rivals, key=lambda job: job.job_id, default=None)


def _list_jobs() -> list[RayJob]:
    client = internal_kv_get_gcs_client()  # type: ignore[no-untyped-call]
    jobs = client.get_all_job_info(skip_submission_job_info_field=True, skip_is_running_tasks_field=True)
    return [
        RayJob(
            job_id=job.job_id.hex(),
            namespace=job.config.ray_namespace,
            ip=job.driver_address.ip_address,
            pid=job.driver_pid,
        )
        for job in jobs.values()
        if not job.is_dead
    ]
