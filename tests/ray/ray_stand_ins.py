"""Engines without a model, for the actors of the tests. Found by PYTHONPATH."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import ray

from eagleray.errors import CheckpointError
from eagleray.messages.lifecycle import EngineSpec


class Waits:
    """An engine whose address contains facts about its process."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        assert spec.ray is not None
        facts = {
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "niceness": os.nice(0),
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "setting": os.environ.get("SOME_SETTING"),
            "secret": os.environ.get("HF_TOKEN"),
            "directory": spec.runtime_dir,
            "host": spec.host,
            "group": spec.ray.placement_group,
            "bundles": spec.ray.bundles,
            "resources": ray.get_runtime_context().get_assigned_resources(),
        }
        self.address = json.dumps(facts)

    def run(self, report_error: Callable[[Exception], None]) -> None:
        time.sleep(600)


class Lingers(Waits):
    """The first instance does not bind."""

    def __init__(self, spec: EngineSpec) -> None:
        try:
            Path(os.environ["LINGERS"]).touch(exist_ok=False)
        except FileExistsError:
            super().__init__(spec)
        else:
            time.sleep(600)


class Ends(Waits):
    def run(self, report_error: Callable[[Exception], None]) -> None:
        return


class Raises(Waits):
    def run(self, report_error: Callable[[Exception], None]) -> None:
        raise CheckpointError("model.safetensors: it is broken")


class Refuses(Waits):
    def __init__(self, spec: EngineSpec) -> None:
        raise KeyError("no such interface")
