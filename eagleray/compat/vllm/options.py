"""Options of vLLM as options of eagleray."""

from __future__ import annotations

import os
from typing import Any

from eagleray.config.json_files import shown
from eagleray.errors import ConfigError
from eagleray.log import get_logger

logger = get_logger(__name__)

WITHOUT_EFFECT = {
    "trust_remote_code": "no code of checkpoints is ever run",
    "enforce_eager": "kernels are chosen by the device",
    "enable_sleep_mode": "every instance can sleep",
    "enable_chunked_prefill": "prompts are always computed in chunks",
    "disable_log_stats": "there is no log of statistics",
    "disable_log_requests": "requests are not logged",
    "enable_log_requests": "requests are not logged",
    "swap_space": "requests that are preempted are computed again",
    "disable_custom_all_reduce": "the sum over ranks is chosen by their places",
    "disable_cascade_attn": "attention is chosen by the device",
    "max_parallel_loading_workers": "weights are loaded by all cores",
    "compilation_config": "nothing is compiled by torch",
    "max_seq_len_to_capture": "graphs are captured for all steps",
}
"""Options that change no answer, and the reason."""

EXECUTORS = {"uni": "in-process", "mp": "processes", "ray": "ray"}

BUNDLES_VARIABLE = "VLLM_RAY_BUNDLE_INDICES"
GPUS_VARIABLE = "VLLM_RAY_PER_WORKER_GPUS"


def eagleray_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of eagleray for those of vLLM; None means that an option was not given.

    Raises `ConfigError` for a value that is not supported.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in [name for name in given if name in WITHOUT_EFFECT]:
        del given[name]
        logger.info("option `%s` has no effect here: %s", name, WITHOUT_EFFECT[name])
    if (backend := given.pop("distributed_executor_backend", None)) is not None:
        given["executor"] = _executor(backend)
    if (implementation := given.pop("model_impl", "auto")) not in ("auto", "vllm"):
        raise ConfigError(
            f"option `model_impl`: must be auto or vllm, but it is {shown(implementation)}: all models are eagleray's"
        )
    if bundles := os.environ.get(BUNDLES_VARIABLE):
        given["bundle_indices"] = [int(index) for index in bundles.split(",")]
    if (share := os.environ.get(GPUS_VARIABLE)) and given.get("executor") == "ray":
        given["ray_worker_resources"] = {"GPU": float(share)}
    return given


def _executor(backend: Any) -> str:
    if backend == "external_launcher":
        raise ConfigError(
            "option `distributed_executor_backend`: external_launcher is not supported: start one `LLM` for each node, "
            "and send it the weights by the backend ipc"
        )
    if backend not in EXECUTORS:
        known = ", ".join(EXECUTORS)
        raise ConfigError(f"option `distributed_executor_backend`: must be one of {known}, but it is {shown(backend)}")
    return EXECUTORS[backend]
