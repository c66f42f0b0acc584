"""Rules that follow from the configuration and the files it names. Pure: each one a named function."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from eagleray.config.sections import CacheConfig, Config, ModelConfig, RayConfig
from eagleray.errors import CheckpointError, ConfigError

__all__ = [
    "DEMO_MODEL_DIR",
    "ExecutorName",
    "cache_bytes",
    "check_executor",
    "checkpoint_dir",
    "executor_name",
    "is_asynchronous",
    "served_names",
    "steps_in_flight",
    "tokenizer_dir",
]

ExecutorName = Literal["in-process", "processes", "ray", "ray-graph"]

DEMO_MODEL_DIR = Path(__file__).parent.parent / "demo_model"
DEMO_MODEL_NAME = "eagleray-demo"

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def checkpoint_dir(model: ModelConfig) -> Path:
    """The directory of the checkpoint.

    Raises `CheckpointError` if it is not a directory or has no config.json.
    """
    if model.model is None:
        return DEMO_MODEL_DIR
    path = Path(model.model).expanduser()
    if not path.is_dir():
        raise CheckpointError(
            f"model {model.model!r}: there is no such directory. eagleray reads checkpoints from disk: give the path "
            "of a directory with config.json and *.safetensors files"
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path / 'config.json'}: not found; a checkpoint in Hugging Face format has one")
    return path


def tokenizer_dir(model: ModelConfig) -> Path:
    """The directory of the tokenizer's files."""
    if model.tokenizer is None:
        return checkpoint_dir(model)
    path = Path(model.tokenizer).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"tokenizer {model.tokenizer!r}: there is no such directory")
    return path


def served_names(model: ModelConfig) -> list[str]:
    """Names of the model in the API; never empty."""
    if model.served_model_name:
        return model.served_model_name
    return [model.model if model.model is not None else DEMO_MODEL_NAME]


def cache_bytes(cache: CacheConfig) -> int | None:
    """`kv_cache_memory` in bytes; None if it is to be sized from memory."""
    if cache.kv_cache_memory is None or isinstance(cache.kv_cache_memory, int):
        return cache.kv_cache_memory
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", cache.kv_cache_memory.upper())
    if match is None:
        raise ConfigError(
            f"`kv_cache_memory` must be a number of bytes or a size such as 512MiB or 4GB, "
            f"but it is {cache.kv_cache_memory!r}"
        )
    return int(float(match[1]) * UNITS[match[2]])


def executor_name(config: Config, *, in_placement_group: bool) -> ExecutorName:
    """The executor that is meant; `in_placement_group`: this program runs in a placement group of Ray."""
    if config.execution.executor != "auto":
        return config.execution.executor
    if in_placement_group or _ray_options(config.ray):
        return "ray"
    return "in-process" if config.parallel.world_size == 1 else "processes"


def is_asynchronous(config: Config, executor: ExecutorName) -> bool:
    """Whether the next step is planned and sent while the current one runs."""
    if config.execution.async_scheduling is not None:
        return config.execution.async_scheduling
    return executor != "in-process"


def steps_in_flight(config: Config, *, in_placement_group: bool) -> int:
    """How many steps the engine sends before it waits for the first: one for each pipeline stage, and one ahead."""
    name = executor_name(config, in_placement_group=in_placement_group)
    return config.parallel.pipeline_parallel_size + is_asynchronous(config, name)


def check_executor(config: Config) -> None:
    """Raises `ConfigError` for options of executor, parallelism and Ray that do not fit together."""
    parallel, ray, executor = config.parallel, config.ray, config.execution.executor
    if executor == "in-process" and parallel.world_size > 1:
        raise ConfigError(
            f"executor in-process has one worker, but tensor_parallel_size {parallel.tensor_parallel_size} x "
            f"pipeline_parallel_size {parallel.pipeline_parallel_size} needs {parallel.world_size}: take processes"
        )
    if executor in ("in-process", "processes") and (given := _ray_options(ray)):
        raise ConfigError(f"option `{given[0]}` is for executors ray and ray-graph, but executor is {executor}")
    if ray.placement_group is not None and "ray_placement_strategy" in _ray_options(ray):
        raise ConfigError("option `ray_placement_strategy` is for a group of the engine's own: drop `placement_group`")
    if executor == "ray" and "ray_graph_timeout" in _ray_options(ray):
        raise ConfigError("option `ray_graph_timeout` is for executor ray-graph, but executor is ray")
    if ray.bundle_indices:
        _check_bundle_indices(ray.bundle_indices, parallel.world_size)
    for name, amount in ray.ray_worker_resources.items():
        if amount <= 0 or (amount > 1 and amount != int(amount)):
            raise ConfigError(
                f"option `ray_worker_resources`: {name} must be a whole number or a fraction of one, but is {amount}"
            )


def _ray_options(ray: RayConfig) -> list[str]:
    """Those that were given."""
    return [f.name for f in msgspec.structs.fields(RayConfig) if getattr(ray, f.name) != getattr(RayConfig(), f.name)]


def _check_bundle_indices(indices: list[int], world_size: int) -> None:
    if len(indices) != world_size:
        raise ConfigError(
            f"option `bundle_indices`: {len(indices)} were given, but there are {world_size} workers: give one for each"
        )
    if len(set(indices)) != len(indices) or min(indices) < 0:
        raise ConfigError(f"option `bundle_indices`: must be different and not negative, but they are {indices}")
