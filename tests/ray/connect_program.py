"""A program that joins the Ray cluster of the address it is given, says which that is, and leaves it.

With a second argument, `run`, it runs an actor there before.
"""

from __future__ import annotations

import sys

import ray

from eagleray.cluster.connect import connect
from eagleray.errors import ClusterError


class Actor:
    def say(self) -> None:
        pass


def main() -> None:
    try:
        connection = connect(sys.argv[1] if sys.argv[1] != "none" else None, namespace="program")
    except ClusterError as error:
        print(f"ClusterError: {error}")
        return
    if "run" in sys.argv[2:]:
        ray.get(ray.remote(num_cpus=1)(Actor).remote().say.remote(), timeout=30)
    print(connection.address)
    connection.close()


if __name__ == "__main__":
    main()
