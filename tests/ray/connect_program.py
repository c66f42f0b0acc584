"""A program that connects to the Ray cluster at the given address, prints the address, and disconnects.

With the argument `run` it first runs an actor there, which must not have a secret of this program; with `hold` it
stays until its standard input ends, and prints a line if it exits because the cluster is lost.
"""

from __future__ import annotations

import os
import sys

import ray

from eagleray.cluster.connect import connect
from eagleray.errors import ClusterError, ClusterLost


class Actor:
    def say(self) -> str | None:
        return os.environ.get("SOME_TOKEN")


def say_lost(error: ClusterLost) -> None:
    print(f"lost: {error}", flush=True)


def main() -> None:
    try:
        connection = connect(sys.argv[1] if sys.argv[1] != "none" else None, namespace="program", on_lost=say_lost)
    except ClusterError as error:
        print(f"ClusterError: {error}")
        return
    if "run" in sys.argv[2:]:
        actor = ray.remote(num_cpus=1)(Actor).remote()
        assert ray.get(actor.say.remote(), timeout=30) is None
        assert os.environ.get("SOME_TOKEN") == os.environ.get("EXPECTED")
    print(connection.address, flush=True)
    if "hold" in sys.argv[2:]:
        sys.stdin.read()
    connection.close()


if __name__ == "__main__":
    main()
