"""An `LLMConfig` of `ray.serve.llm` -> options of eagleray and of the deployment. Pure; `LLMConfig` is read by its
attributes, because its module cannot be imported without vLLM or SGLang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagleray.cluster.bundles import Resources
from eagleray.config.sections import Config
from eagleray.errors import ConfigError
from eagleray.serve.defaults import deployment_options
from eagleray.serve.options import serve_config
from eagleray.serve.resources import replica_resources, with_executor

ACCELERATOR_SHARE = 0.001
"""Amount of the resource `accelerator_type:NAME` that a worker takes, to be placed on a node with such devices."""

INGRESS_CONFIGS = frozenset({"num_ingress_replicas"})
"""Keys of `experimental_configs` that concern Ray's ingress."""


def llm_server_config(llm_config: Any) -> Config:
    """Return the configuration of a replica. Raises `ConfigError` for what eagleray does not have."""
    _check_supported(llm_config)
    return with_executor(serve_config(_engine_options(llm_config)))


def llm_deployment_options(llm_config: Any, offered: Sequence[Resources]) -> dict[str, Any]:
    """Return the options of the deployment. `offered`: all resources of each node. Raises `ConfigError`."""
    config, given = llm_server_config(llm_config), dict(llm_config.deployment_config)
    for name in ("placement_group_bundles", "placement_group_strategy"):
        if name in given:
            raise ConfigError(f"`deployment_config` may not have `{name}`: give `placement_group_config` of LLMConfig")
    actor_options = dict(given.get("ray_actor_options") or {})
    group = llm_config.placement_group_config or {}
    bundles = group.get("bundles")
    resources = replica_resources(config, bundles or offered, actor_options=actor_options)
    if bundles:
        given["placement_group_bundles"] = [dict(bundle) for bundle in (resources.replica, *bundles)]
        given["placement_group_strategy"] = group.get("strategy", "PACK")
    if llm_config.runtime_env:
        actor_options["runtime_env"] = {**actor_options.get("runtime_env", {}), **llm_config.runtime_env}
    options = deployment_options(config, resources, given | {"ray_actor_options": actor_options})
    if "name" not in given:
        del options["name"]  # Ray names the deployment after the model
    return options


def _engine_options(llm_config: Any) -> dict[str, Any]:
    loading, group = llm_config.model_loading_config, llm_config.placement_group_config or {}
    source = getattr(loading.model_source, "bucket_uri", loading.model_source)
    options: dict[str, Any] = {
        "model": source or loading.model_id,
        "served_model_name": [loading.model_id],
        "tokenizer": loading.tokenizer_source,
    }
    if llm_config.lora_config is not None:
        options |= {"enable_lora": True, "max_loras": llm_config.lora_config.max_num_adapters_per_replica}
    if group:
        options |= {"executor": "ray", "ray_placement_strategy": group.get("strategy")}
    worker: Mapping[str, float] = group.get("bundle_per_worker") or {}
    if llm_config.accelerator_type and not group:
        worker = {"GPU": 1.0, f"accelerator_type:{llm_config.accelerator_type}": ACCELERATOR_SHARE}
    if worker:
        options["ray_worker_resources"] = dict(worker)
    if llm_config.accelerator_config.kind == "cpu":
        options["device"] = "cpu"
    return options | dict(llm_config.engine_kwargs)


def _check_supported(llm_config: Any) -> None:
    """Raise `ConfigError` for fields that would have no effect here."""
    if llm_config.accelerator_config.kind not in ("cpu", "gpu"):
        raise ConfigError(f"`accelerator_config` {llm_config.accelerator_config.kind}: eagleray runs on CPUs and GPUs")
    for name, value in llm_config.experimental_configs.items():
        if name == "stream_batching_interval_ms" and value:
            raise ConfigError(f"`{name}` must be 0: eagleray streams tokens as they come")
        if name not in ("stream_batching_interval_ms", *INGRESS_CONFIGS):
            raise ConfigError(f"`experimental_configs` may not have `{name}`: eagleray has nothing like it")
    callback = llm_config.callback_config.callback_class
    if getattr(callback, "__name__", callback) != "CallbackBase":
        raise ConfigError("`callback_config` is for Ray's own server: eagleray calls nothing while it loads a model")
    if llm_config.deployment_config.get("user_config") is not None:
        raise ConfigError(
            "`deployment_config` may not have `user_config`, which a running replica does not take: give options in "
            "`engine_kwargs`, and deploy again to change them"
        )
    if "KVAware" in str(llm_config.deployment_config.get("request_router_config", "")):
        raise ConfigError(
            "`request_router_config`: eagleray publishes no events of its cache for KVAwareRouter; take Ray's "
            "PrefixCacheAffinityRouter"
        )
