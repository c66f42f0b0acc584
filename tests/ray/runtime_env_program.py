"""A user's program with a runtime_env: it creates an `LLM` on Ray, and prints the extension's view, as JSON.

Its arguments: `driver`, `actor` or `submitted`, the cluster's address, a checkpoint, and a directory with the module
`job_extension`. A submitted program gets its runtime_env in the way of `ray job submit`, and does not call Ray.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray

from eagleray import LLM

EXTENSION = """
import os

class Look:
    def __init__(self, worker):
        pass

    def look(self):
        return {"cwd": os.getcwd(), "module": __file__, "JOBVAR": os.environ.get("JOBVAR"),
                "ACTORVAR": os.environ.get("ACTORVAR"), "OPTION": os.environ.get("OPTION"),
                "DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
"""

OPTIONS: dict[str, Any] = {
    "executor": "ray",
    "tensor_parallel_size": 2,
    "ray_worker_resources": {"acc": 1},
    "ray_placement_timeout": 20,
    "ray_runtime_env": {"env_vars": {"OPTION": "from the option"}},
    "worker_extension_cls": "job_extension:Look",
    "num_threads": 1,
    "num_kv_blocks": 128,
    "max_num_seqs": 8,
}


def look(checkpoint: str, **options: Any) -> list[dict[str, Any]]:
    with LLM(checkpoint, **OPTIONS, **options) as llm:
        seen: list[dict[str, Any]] = llm.collective_rpc("look")
        return seen


class Maker:
    """A user's actor."""

    def look(self, checkpoint: str) -> list[dict[str, Any]]:
        return look(checkpoint, data_parallel_backend="ray")


def main() -> None:
    role, address, checkpoint, directory = sys.argv[1:]
    if role == "submitted":
        print(json.dumps(look(checkpoint, ray_address=address)), flush=True)
        return
    env_vars = {"JOBVAR": "1", "PYTHONPATH": directory, "CUDA_VISIBLE_DEVICES": ""}
    if role == "driver":
        ray.init(address, runtime_env={"working_dir": directory, "env_vars": {"JOBVAR": "1"}}, log_to_driver=False)
        print(json.dumps(look(checkpoint)), flush=True)
    else:
        ray.init(address, runtime_env={"py_modules": [directory], "env_vars": env_vars}, log_to_driver=False)
        actor = ray.remote(Maker).options(num_cpus=0, runtime_env={"env_vars": {"ACTORVAR": "2"}}).remote()
        print(json.dumps(ray.get(actor.look.remote(checkpoint))), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
