"""A program that prints, as JSON, what is alive in the Ray cluster at an address."""

from __future__ import annotations

import json
import sys
import warnings


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray._private.internal_api import memory_summary
        from ray._private.state import actors
        from ray.util.placement_group import placement_group_table

        ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
        alive = [entry for entry in actors().values() if entry["State"] != "DEAD"]
        groups = {
            key: entry["name"] or key for key, entry in placement_group_table().items() if entry["state"] != "REMOVED"
        }
        summary = memory_summary(sys.argv[1], units="B", stats_only=False, line_wrap=False, num_entries=1000)
        found = {
            "actors": [entry["Name"] or entry["ActorID"] for entry in alive],
            "groups": list(groups.values()),
            "objects": [line for line in summary.splitlines() if "LOCAL_REFERENCE" in line or "PINNED" in line],
        }
        print(json.dumps(found))
        ray.shutdown()


if __name__ == "__main__":
    main()
