"""The names of instances on a cluster."""

from __future__ import annotations

import pytest

from eagleray.cluster.instances import RayJob, earlier_job
from eagleray.identity import cluster_name, display_name, new_instance_name


def job(number: int, namespace: str) -> RayJob:
    return RayJob(job_id=f"{number:08x}", namespace=namespace, ip="10.0.0.1", pid=number)


def test_new_instance_name_given_name_is_its_unique_prefix() -> None:
    first, second = new_instance_name("prod"), new_instance_name("prod")
    assert first != second
    assert display_name(first) == display_name(second) == "prod"
    assert cluster_name(first, "engine-0") == "prod/engine-0"


def test_new_instance_name_without_a_name_is_random() -> None:
    name = new_instance_name()
    assert display_name(name) == name
    assert cluster_name(name, "engine-0") == f"{name}/engine-0"


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ([(1, "prod@aaaa")], 1),  # earlier, of the same name
        ([(3, "prod@aaaa")], None),  # later: the other one is refused
        ([(1, "prod@mine")], None),  # another driver of this instance
        ([(1, "prod"), (1, "prod2@aaaa"), (1, "product@aaaa")], None),  # other names
        ([(1, "prod@bbbb"), (0, "prod@aaaa")], 0),
    ],
)
def test_earlier_job_returns_the_first_rival(others: list[tuple[int, str]], found: int | None) -> None:
    jobs = [job(2, "prod@mine"), *(job(number, namespace) for number, namespace in others)]
    rival = earlier_job("prod@mine", f"{2:08x}", jobs)
    assert (rival and rival.pid) == found
