"""The names of instances on a cluster."""

from __future__ import annotations

import pytest

from eagleray.cluster.instances import Driver, earlier_driver
from eagleray.identity import cluster_name, display_name, new_instance_name


def driver(job: int, namespace: str) -> Driver:
    return Driver(job_id=f"{job:08x}", namespace=namespace, ip="10.0.0.1", pid=job)


def test_new_instance_name_that_is_given_begins_with_it_and_is_unique() -> None:
    first, second = new_instance_name("prod"), new_instance_name("prod")
    assert first != second
    assert display_name(first) == display_name(second) == "prod"
    assert cluster_name(first, "engine-0") == "prod/engine-0"


def test_new_instance_name_that_is_random_is_the_whole_name() -> None:
    name = new_instance_name()
    assert display_name(name) == name
    assert cluster_name(name, "engine-0") == f"{name}/engine-0"


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ([(1, "prod@aaaa")], 1),  # earlier, of the same name
        ([(3, "prod@aaaa")], None),  # later: that one has to go
        ([(1, "prod@mine")], None),  # another driver of this instance
        ([(1, "prod"), (1, "prod2@aaaa"), (1, "product@aaaa")], None),  # other names
        ([(1, "prod@bbbb"), (0, "prod@aaaa")], 0),
    ],
)
def test_earlier_driver_finds_the_first_rival(others: list[tuple[int, str]], found: int | None) -> None:
    drivers = [driver(2, "prod@mine"), *(driver(job, namespace) for job, namespace in others)]
    rival = earlier_driver("prod@mine", f"{2:08x}", drivers)
    assert (rival and rival.pid) == found
