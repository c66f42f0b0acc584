"""A program that runs a Ray cluster with token authentication until its standard input ends."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        print(cluster.address, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
