"""Rules derived from the configuration and the files it names. Pure: each one a named function."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from eagleray.config.sections import CacheConfig, Config, ModelConfig, ParallelConfig, RayConfig
from eagleray.errors import ConfigError

ExecutorName = Literal["in-process", "processes", "ray", "ray-graph"]
ExpertDispatch = Literal["all-reduce", "all-gather", "all-to-all"]

DEMO_MODEL_DIR = Path(__file__).parent.parent / "demo_model"
DEMO_MODEL_NAME = "eagleray-demo"

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

INSTANCE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

WORKER_GROUP_OPTIONS = ("bundle_indices", "ray_placement_strategy", "ray_graph_timeout")
"""Options of Ray that only make sense where the workers are actors of their own."""


def served_names(model: ModelConfig) -> list[str]:
    """Return the names of the model in the API; never empty."""
    if model.served_model_name:
        return model.served_model_name
    return [model.model if model.model is not None else DEMO_MODEL_NAME]


def max_model_len(model: ModelConfig, longest: int, source: Path) -> int:
    """Return the length of the longest sequence. `longest`: number of tokens that the model was made for, according
    to its file `source`. Raises `ConfigError` if the option asks for more."""
    wanted = model.max_model_len
    if wanted is None or wanted == "auto":
        return longest
    if wanted > longest:
        raise ConfigError(
            f"option `max_model_len`: {wanted} is longer than the {longest} tokens that {source} says the model was "
            "made for"
        )
    return wanted


def logprobs_limit(model: ModelConfig, vocab_size: int) -> int:
    """Return the largest number of likeliest tokens that a request may ask for."""
    return vocab_size if model.max_logprobs == -1 else model.max_logprobs


def cache_bytes(cache: CacheConfig) -> int | None:
    """Return `kv_cache_memory` in bytes, or None if the cache is sized by the available memory."""
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
    """Return the executor to use. `in_placement_group`: this program runs in a placement group of Ray."""
    if config.execution.executor != "auto":
        return config.execution.executor
    if in_placement_group or config.parallel.data_parallel_backend == "ray" or _ray_options(config.ray):
        return "ray"
    return "in-process" if config.parallel.world_size == 1 else "processes"


def option_that_needs_ray(config: Config) -> str | None:
    """Return the name of an option by which engines or workers are Ray actors; None without one."""
    if config.parallel.data_parallel_backend == "ray":
        return "data_parallel_backend"
    if config.execution.executor in ("ray", "ray-graph"):
        return "executor"
    return next(iter(_ray_options(config.ray)), None)


def option_that_needs_invariance(config: Config) -> str | None:
    """Return the name of an option by which a request's numbers must not depend on the other tokens of a step; None
    without one."""
    if config.model.deterministic:
        return "deterministic"
    return "speculative_config" if config.scheduling.speculative_config else None


def is_asynchronous(config: Config, executor: ExecutorName, device: str) -> bool:
    """Whether the next step is planned and sent while the current one runs. `device`: `cpu` or `cuda`."""
    if executor == "in-process" and device == "cpu":
        return False  # the thread that plans is the one that computes
    return config.execution.async_scheduling is not False


def steps_in_flight(config: Config, *, device: str, in_placement_group: bool) -> int:
    """Return the number of steps in flight: one for each pipeline stage, and one ahead."""
    name = executor_name(config, in_placement_group=in_placement_group)
    return config.parallel.pipeline_parallel_size + is_asynchronous(config, name, device)


def local_ranks(config: Config) -> range:
    """Return the data-parallel ranks whose engines this program starts. Raises `ConfigError` for ranks that do not
    exist."""
    parallel = config.parallel
    size, start = parallel.data_parallel_size, parallel.data_parallel_start_rank
    count = parallel.data_parallel_size_local
    if parallel.data_parallel_rank is not None:
        if start is not None or count is not None:
            other = "data_parallel_start_rank" if start is not None else "data_parallel_size_local"
            raise ConfigError(
                f"option `data_parallel_rank` runs one engine alone, `{other}` says how several are divided: give one "
                "of the two"
            )
        ranks, option = range(parallel.data_parallel_rank, parallel.data_parallel_rank + 1), "data_parallel_rank"
    elif start is not None:
        ranks, option = range(start, size if count is None else start + count), "data_parallel_start_rank"
    else:
        ranks, option = range(size if count is None else count), "data_parallel_size_local"
    if not ranks or ranks[-1] >= size:
        last = start if not ranks else ranks[-1]
        raise ConfigError(
            f"option `{option}`: there is no rank {last}; the engines of `data_parallel_size` {size} have the ranks 0 "
            f"to {size - 1}: mend one of the two"
        )
    return ranks


def is_whole_deployment(config: Config) -> bool:
    """Whether this program starts all engines of the deployment."""
    return len(local_ranks(config)) == config.parallel.data_parallel_size


def autoscale_limits(config: Config) -> tuple[int, int] | None:
    """Return the least and the greatest number of engines of `autoscale`; None without it. Raises `ConfigError`."""
    if (text := config.parallel.autoscale) is None:
        return None
    if (match := re.fullmatch(r"\s*(\d{1,6})\s*:\s*(\d{1,6})\s*", text)) is None:
        raise ConfigError(
            f"option `autoscale`: expected the least and the greatest number of engines, such as 1:4, but got {text!r}"
        )
    least, most = int(match[1]), int(match[2])
    if least < 1:
        raise ConfigError(f"option `autoscale`: {text} would stop every engine, but at least one must stay: take 1")
    if most < least:
        raise ConfigError(f"option `autoscale`: {text} has a minimum above its maximum: did you mean {most}:{least}?")
    return least, most


def max_engines(config: Config) -> int:
    """Return the largest number of engines that this program may start by itself."""
    limits, num_ranks = autoscale_limits(config), len(local_ranks(config))
    return num_ranks if limits is None else max(num_ranks, limits[1])


def engines_on_host(config: Config) -> int:
    """Return the number of engines that share the cores and the memory of a host, as far as the configuration tells:
    engines that are processes all run on this one; Ray decides the number on a host at run time."""
    return max_engines(config) if config.parallel.data_parallel_backend == "processes" else 1


def engine_index(config: Config, rank: int) -> int:
    """Return the index of engine `rank` among the `engines_on_host`."""
    return rank - local_ranks(config)[0] if config.parallel.data_parallel_backend == "processes" else 0


def first_device(config: Config, rank: int) -> int:
    """Return the index of the first GPU of engine `rank`: each engine that is a process has its own."""
    return engine_index(config, rank) * config.parallel.world_size  # Ray assigns devices


def expert_engines(config: Config) -> int:
    """Return the number of engines that divide the experts of a layer and therefore step together."""
    return config.parallel.data_parallel_size if config.parallel.enable_expert_parallel else 1


def expert_dispatch(config: Config) -> ExpertDispatch:
    """Return the method that brings tokens to the ranks of their experts."""
    if config.parallel.expert_dispatch != "auto":
        return config.parallel.expert_dispatch
    return "all-reduce" if expert_engines(config) == 1 else "all-gather"


def check_experts(config: Config) -> None:
    """Raise `ConfigError` for options of expert parallelism that contradict each other. Rules that
    depend on the model are checked at load."""
    _check_experts_are_divided(config)
    _check_experts_are_balanced(config)
    if expert_engines(config) > 1:
        _check_tokens_differ(config)
        _check_one_stage(config)
        _check_all_engines_here(config)
        _check_group_executor(config)
        _check_staged_updates(config)
    if (option := option_that_needs_invariance(config)) is not None:
        _check_ordered_sums(config, option)


def check_executor(config: Config) -> None:
    """Raise `ConfigError` for options of executor, parallelism and Ray that contradict each other."""
    parallel, ray, executor = config.parallel, config.ray, config.execution.executor
    if executor == "in-process" and parallel.world_size > 1:
        raise ConfigError(
            f"executor in-process has one worker, but tensor_parallel_size {parallel.tensor_parallel_size} x "
            f"pipeline_parallel_size {parallel.pipeline_parallel_size} needs {parallel.world_size}: take processes"
        )
    if executor in ("in-process", "processes"):
        given = _ray_options(ray)
        if parallel.data_parallel_backend == "ray":  # then most of them say where the engines go
            given = [name for name in given if name in WORKER_GROUP_OPTIONS]
        if given:
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


def check_names(model: ModelConfig) -> None:
    """Raise `ConfigError` for an empty model or name, as scripts give whose variable is not set."""
    if model.model is not None and not model.model.strip():
        raise ConfigError("option `model` is empty: give a directory, a model id or a URL, or drop the option")
    if not all(name.strip() for name in model.served_model_name):
        raise ConfigError("option `served_model_name`: a name is empty: give one that is not, or drop the option")


def check_instance_name(config: Config) -> None:
    """Raise `ConfigError` for a name that cannot be a part of the names of actors."""
    name = config.execution.instance_name
    if name is not None and not INSTANCE_NAME.fullmatch(name):
        raise ConfigError(
            f"option `instance_name` is {name[:100]!r}, but a name has 1 to 64 letters, digits, `.`, `_` and `-`"
        )


def check_fleet(config: Config) -> None:
    """Raise `ConfigError` for options of engines and API servers that contradict each other."""
    num_engines, ray, backend = max_engines(config), config.ray, config.parallel.data_parallel_backend
    if backend == "processes" and "ray_engine_placement" in _ray_options(ray):
        raise ConfigError(
            f"option `ray_engine_placement`: {ray.ray_engine_placement} is for engines that are Ray actors, but "
            "data_parallel_backend is processes, all on this host: take data_parallel_backend ray"
        )
    if backend == "processes" and ray.ray_nodes and config.execution.executor in ("in-process", "processes"):
        raise ConfigError(
            "option `ray_nodes` is for what Ray places: take data_parallel_backend ray, or executor ray or ray-graph"
        )
    if num_engines > 1:
        _check_shared_bundles(config, num_engines=num_engines)
    _check_autoscale(config)
    if config.serving.routed_experts_by_default and not config.model.enable_return_routed_experts:
        raise ConfigError("option `routed_experts_by_default` needs the option `enable_return_routed_experts`")
    if config.serving.attach_file is not None:
        _check_attach_file(Path(config.serving.attach_file))


def _check_autoscale(config: Config) -> None:
    parallel, limits = config.parallel, autoscale_limits(config)
    if limits is None:
        for name in ("autoscale_target_queue", "autoscale_target_ttft", "autoscale_down_delay"):
            if getattr(parallel, name) != getattr(ParallelConfig(), name):
                raise ConfigError(f"option `{name}` is a target of `autoscale`: add `autoscale`, such as 1:4")
        return
    if parallel.data_parallel_size > limits[1]:
        raise ConfigError(
            f"option `autoscale`: data_parallel_size {parallel.data_parallel_size} is more than the maximum of "
            f"{parallel.autoscale}: mend one of the two"
        )
    if parallel.enable_expert_parallel:
        raise ConfigError(
            "option `autoscale`: engines that share experts (`enable_expert_parallel`) cannot be scaled yet: drop one "
            "of the two"
        )
    for name in ("data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local"):
        if getattr(parallel, name) is not None:
            raise ConfigError(
                f"option `autoscale`: with `{name}` the engines are started by several programs, and each sees a part "
                "of the load only: drop it, or scale the programs"
            )


def _ray_options(ray: RayConfig) -> list[str]:
    """Return the names of the given options of Ray."""
    return [f.name for f in msgspec.structs.fields(RayConfig) if getattr(ray, f.name) != getattr(RayConfig(), f.name)]


def _check_bundle_indices(indices: list[int], world_size: int) -> None:
    if len(indices) != world_size:
        raise ConfigError(
            f"option `bundle_indices`: {len(indices)} were given, but there are {world_size} workers: give one for each"
        )
    if len(set(indices)) != len(indices) or min(indices) < 0:
        raise ConfigError(f"option `bundle_indices`: must be different and not negative, but they are {indices}")


def _check_shared_bundles(config: Config, *, num_engines: int) -> None:
    """Refuse the same bundles for several engines."""
    if config.ray.bundle_indices:
        raise ConfigError(
            f"option `bundle_indices` names the bundles of one engine, but here are {num_engines}: drop it, or run "
            "each engine by a program of its own with `data_parallel_rank`"
        )
    if config.ray.placement_group is not None and config.parallel.data_parallel_backend == "processes":
        raise ConfigError(
            f"option `placement_group`: all {num_engines} engines here would take its first bundles: take "
            "data_parallel_backend ray, which gives each engine bundles of its own, or run each engine by a program of "
            "its own with `data_parallel_rank` and `bundle_indices`"
        )


def _check_experts_are_divided(config: Config) -> None:
    parallel = config.parallel
    given = {
        "enable_eplb": parallel.enable_eplb,
        "num_redundant_experts": parallel.num_redundant_experts > 0,
        "expert_dispatch": parallel.expert_dispatch != "auto",
    }
    for name, is_given in given.items():
        if is_given and not parallel.enable_expert_parallel:
            raise ConfigError(f"option `{name}` is for whole experts on each worker: add `enable_expert_parallel`")


def _check_experts_are_balanced(config: Config) -> None:
    """Refuse redundant experts without load balancing, which alone can tell which experts need copies."""
    if config.parallel.enable_eplb:
        return
    if config.parallel.num_redundant_experts > 0:
        raise ConfigError(
            "option `num_redundant_experts` makes room for copies of experts with much load: add `enable_eplb`, which "
            "measures it"
        )
    if config.parallel.eplb_step_interval != ParallelConfig().eplb_step_interval:
        raise ConfigError("option `eplb_step_interval` is how often experts move: add `enable_eplb`, which moves them")


def _check_tokens_differ(config: Config) -> None:
    if expert_dispatch(config) == "all-reduce":
        raise ConfigError(
            f"option `expert_dispatch`: all-reduce is for one engine, whose workers all have the same tokens, but "
            f"data_parallel_size is {config.parallel.data_parallel_size}: take all-gather or all-to-all"
        )


def _check_staged_updates(config: Config) -> None:
    if config.execution.weight_update == "in-place":
        raise ConfigError(
            "option `weight_update`: engines that share their experts step together and cannot change weights in place "
            "one by one; leave it at staged"
        )


def _check_one_stage(config: Config) -> None:
    if config.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"option `enable_expert_parallel`: engines that share their experts have one stage, but "
            f"pipeline_parallel_size is {config.parallel.pipeline_parallel_size}: set it to 1, and raise "
            "tensor_parallel_size or data_parallel_size; or leave data_parallel_size at 1"
        )


def _check_all_engines_here(config: Config) -> None:
    """Refuse an expert group whose engines do not all belong to one supervisor, which must know all members."""
    for name in ("data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local"):
        if getattr(config.parallel, name) is not None:
            raise ConfigError(
                f"option `{name}`: engines that share their experts are all started by one program: drop it, with "
                "data_parallel_backend ray for several nodes, or drop `enable_expert_parallel`"
            )


def _check_group_executor(config: Config) -> None:
    executor, backend = config.execution.executor, config.parallel.data_parallel_backend
    if executor == "ray-graph":
        raise ConfigError(
            "option `enable_expert_parallel`: engines that share their experts cannot use executor ray-graph, whose "
            "graph ends with the first step that fails: take ray"
        )
    if backend == "ray" and executor in ("in-process", "processes"):
        raise ConfigError(
            f"option `enable_expert_parallel`: workers of different engines must reach each other, but with executor "
            f"{executor} those of an engine that is a Ray actor know no address of their node: take executor ray"
        )


def _check_ordered_sums(config: Config, option: str) -> None:
    """Refuse an option that needs batch invariance where the order of a sum over ranks may vary."""
    if not config.parallel.enable_expert_parallel or expert_dispatch(config) == "all-to-all":
        return
    if expert_engines(config) > 1:
        raise ConfigError(
            f"option `{option}`: with expert_dispatch {expert_dispatch(config)}, sums over experts depend on how "
            "many engines share them: take all-to-all"
        )
    if config.parallel.enable_eplb:
        raise ConfigError(
            f"option `{option}`: with expert_dispatch {expert_dispatch(config)}, sums over experts depend on "
            "where the experts are, which `enable_eplb` changes: take all-to-all, or drop it"
        )


def _check_attach_file(path: Path) -> None:
    path = path.expanduser()
    if path.is_dir():
        raise ConfigError(f"option `attach_file`: {str(path)!r} is a directory: name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"option `attach_file`: there is no directory {str(path.parent)!r}: make it, or name another")
