"""Ray itself on several hosts, on which the other tests rely."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.hosts


def test_ray_every_host_is_a_node(cluster, driver):
    found = driver.do("cluster", address=cluster.address)
    assert sorted(found["nodes"].values())[:3] == sorted(host.ip for host in cluster.hosts)
    assert found["actors"] == found["groups"] == []
