"""A program that runs a Ray cluster of its own until its standard input ends. Prints its address, and the process id of
its control store."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        (store,) = cluster.head_node.all_processes["gcs_server"]
        print(cluster.address, store.process.pid, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
