"""Resources of a replica, from its configuration and the nodes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from eagleray.cluster.actor_options import as_actor_options
from eagleray.config.build import build_config
from eagleray.errors import ConfigError
from eagleray.serve.resources import (
    ReplicaResources,
    explain_replica_shortage,
    replica_resources,
    with_executor,
)

CPUS = [{"CPU": 8.0}]
GPUS = [{"CPU": 8.0, "GPU": 4.0}]


def resources(offered: list[dict[str, float]], given: dict[str, Any] | None = None, **options: Any) -> ReplicaResources:
    return replica_resources(with_executor(build_config(**options)), offered, actor_options=given or {})


def test_one_worker_runs_on_what_the_replica_holds():
    assert resources(CPUS) == ReplicaResources(replica={"CPU": 1.0}, bundles=(), strategy="PACK")
    assert resources(GPUS).replica == {"CPU": 1.0, "GPU": 1.0}
    assert resources(GPUS, device="cpu").replica == {"CPU": 1.0}


def test_engines_that_are_processes_run_on_what_the_replica_holds():
    assert resources(GPUS, data_parallel_size=2, tensor_parallel_size=2).replica == {"CPU": 1.0, "GPU": 4.0}


def test_workers_of_one_engine_have_bundles():
    found = resources(GPUS, tensor_parallel_size=2, pipeline_parallel_size=2, ray_placement_strategy="STRICT_PACK")
    assert found == ReplicaResources(replica={"CPU": 1.0}, bundles=[{"GPU": 1.0}] * 4, strategy="STRICT_PACK")


def test_engines_that_are_actors_have_bundles():
    options = {"data_parallel_backend": "ray", "data_parallel_size": 3, "ray_worker_resources": {"GPU": 0.5}}
    assert resources(GPUS, tensor_parallel_size=2, **options).bundles == [{"GPU": 0.5}] * 6
    assert resources(GPUS, executor="in-process", **options).bundles == [{"GPU": 0.5}] * 3


def test_user_options_of_the_actor_are_in_its_bundle():
    given = {"num_cpus": 3, "resources": {"disk": 1}, "runtime_env": {}}
    found = resources(GPUS, given, tensor_parallel_size=2)
    assert found.replica == {"CPU": 3.0, "disk": 1.0}
    assert as_actor_options(found.replica) == {"num_cpus": 3.0, "resources": {"disk": 1.0}}


def test_engines_that_are_processes_cannot_share_bundles():
    with pytest.raises(ConfigError, match="give data_parallel_backend ray"):
        resources(GPUS, data_parallel_size=2, executor="ray")


@pytest.mark.parametrize(
    ("strategy", "num_bundles", "fits"),
    [("PACK", 7, True), ("PACK", 8, False), ("STRICT_PACK", 4, True), ("STRICT_PACK", 5, False)],
)
def test_explain_replica_shortage_counts_bundles_beside_the_replica(strategy, num_bundles, fits):
    wanted = ReplicaResources(replica={"CPU": 1.0}, bundles=[{"CPU": 1.0}] * num_bundles, strategy=strategy)
    said = explain_replica_shortage(wanted, [{"CPU": 3.0}, {"CPU": 5.0}])
    if fits:
        assert said is None
    else:
        assert said is not None
        assert re.search(rf"no replica fits .* {num_bundles} x {{CPU: 1}} \({strategy}\).*add nodes", said)


def test_explain_replica_shortage_strict_spread_needs_a_node_for_each_bundle():
    wanted = ReplicaResources(replica={"CPU": 1.0}, bundles=[{"CPU": 1.0}] * 2, strategy="STRICT_SPREAD")
    assert explain_replica_shortage(wanted, [{"CPU": 1.0}] * 3) is None
    said = explain_replica_shortage(wanted, [{"CPU": 8.0}] * 2)
    assert said is not None
    assert "nodes have {CPU: 8}; {CPU: 8}: add nodes" in said


def test_explain_replica_shortage_replica_without_resources_fits_anywhere():
    wanted = ReplicaResources(replica={}, bundles=(), strategy="PACK")
    assert explain_replica_shortage(wanted, [{"CPU": 1.0}]) is None
