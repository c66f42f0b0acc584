"""Program that prints, as JSON, the actors, placement groups and objects of the Ray cluster at an address."""

from __future__ import annotations

import json
import sys
import warnings

STORE = "object_store_memory"


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray._private.state import actors
        from ray.util.placement_group import placement_group_table

        ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
        alive = [entry for entry in actors().values() if entry["State"] != "DEAD"]
        groups = {
            key: entry["name"] or key for key, entry in placement_group_table().items() if entry["state"] != "REMOVED"
        }
        total, free = (float(each.get(STORE, 0)) for each in (ray.cluster_resources(), ray.available_resources()))
        found = {
            "actors": [entry["Name"] or entry["ActorID"] for entry in alive],
            "groups": list(groups.values()),
            "object_store_bytes": total - free,
        }
        print(json.dumps(found))
        ray.shutdown()


if __name__ == "__main__":
    main()
