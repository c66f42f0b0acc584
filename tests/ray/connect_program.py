"""A program that joins the Ray cluster of the address it is given, says which that is, and leaves it."""

from __future__ import annotations

import sys

from eagleray.cluster.connect import connect
from eagleray.errors import ClusterError


def main() -> None:
    try:
        connection = connect(sys.argv[1] if sys.argv[1] != "none" else None, namespace="program")
    except ClusterError as error:
        print(f"ClusterError: {error}")
        return
    print(connection.address)
    connection.close()


if __name__ == "__main__":
    main()
