"""A Ray cluster for a server whose engines are actors, and what is in it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chaos_server import LABEL, Member

__all__ = ["actors_and_groups", "cluster", "members"]

CPUS_PER_ENGINE = 4
OBJECT_STORE_BYTES = 100 * 2**20


@contextmanager
def cluster(root: Path, *, num_engines: int) -> Iterator[str]:
    """A cluster of one node on this host; its address. What its processes write goes to `root`."""
    (root / "ray").mkdir()
    os.environ |= {"RAY_TMPDIR": str(root / "ray"), "RAY_AUTH_MODE": "disabled", "TMPDIR": str(root / "tmp")}
    os.environ.pop("RAY_ADDRESS", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        ray.init(
            address="local",
            num_cpus=CPUS_PER_ENGINE * num_engines,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
        )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def members() -> list[Member]:
    """The living actors that have the name of an engine or of a worker."""
    return [
        Member(int(entry["Pid"]), match[0])
        for entry in _actors()
        if entry["State"] == "ALIVE" and (match := LABEL.search(entry["Name"]))
    ]


def actors_and_groups() -> list[str]:
    """Every actor that is not dead and every placement group that is not removed."""
    from ray.util.placement_group import placement_group_table

    there = [f"actor {entry['Name'] or entry['ActorID']}" for entry in _actors() if entry["State"] != "DEAD"]
    groups = placement_group_table().items()
    return there + [f"group {entry['name'] or key}" for key, entry in groups if entry["state"] != "REMOVED"]


def _actors() -> list[dict[str, object]]:
    from ray._private.state import actors

    return list(actors().values())
