"""Ray Serve applications: the HTTP API of `eagleray serve` in replicas.

`build_app` turns options into an application for `ray.serve.run`. Nothing is started before `serve.run` is called.
Needs Ray Serve: `pip install "ray[serve]>=2.56"`. See docs/ray_serve.md.
"""

# ruff: noqa: E402  (Ray Serve is checked before the imports that need it)

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from eagleray.cluster.ray_libraries import explain_missing_library

MIN_RAY = (2, 56)
"""First version of Ray whose `serve.ingress` takes an application that the replica builds."""

if missing := explain_missing_library("ray.serve", "eagleray.serve", min_ray=MIN_RAY, extra="serve"):
    raise ImportError(missing)

import ray
from ray import serve

from eagleray.cluster.nodes import check_cluster_can_hold
from eagleray.cluster.offered import offered_resources
from eagleray.config.suggestions import suggest
from eagleray.errors import ConfigError
from eagleray.serve.adapter_source import adapter_source
from eagleray.serve.defaults import deployment_options
from eagleray.serve.options import serve_config
from eagleray.serve.replica import ServeReplica
from eagleray.serve.resources import explain_replica_shortage, replica_resources, with_executor

__all__ = ["build_app", "build_app_from_args"]


def build_app(
    model: str | None = None,
    *,
    deployment: Mapping[str, Any] | None = None,
    adapters: str | Mapping[str, str] | None = None,
    **options: Any,
) -> serve.Application:
    """Return an application for `ray.serve.run`, each replica of which is an instance of eagleray with its engines.

    `model` and `options` are those of `eagleray serve`, except the ones for its own sockets and processes.
    `deployment`: options of `ray.serve.deployment`, such as `num_replicas`, over our defaults. `adapters`: low-rank
    adapters that replicas load when a request names them in the header `serve_multiplexed_model_id`: a directory that
    has them as subdirectories, or their directories by name.

    Raises `ConfigError` for an option that cannot be used, and `ClusterError` if the cluster cannot be joined or can
    never hold a replica.
    """
    given = _checked_deployment({} if deployment is None else deployment)
    config = with_executor(serve_config(options | ({} if model is None else {"model": model})))
    source = adapter_source(adapters, config)
    resources = replica_resources(config, offered_resources(), actor_options=given.get("ray_actor_options", {}))
    if ray.is_initialized() and "placement_group_bundles" not in given:
        check_cluster_can_hold(
            lambda nodes: explain_replica_shortage(resources, [node.total for node in nodes if node.is_alive])
        )
    made_options = deployment_options(config, resources, given)
    try:
        made: Any = serve.deployment(ServeReplica, **made_options)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"option `deployment`: Ray Serve refuses it: {' '.join(str(error).split())}") from error
    app: serve.Application = made.bind(config, source)
    return app


def build_app_from_args(args: dict[str, Any]) -> serve.Application:
    """Return the application that `args`, the keyword arguments of `build_app` as a mapping, describe.

    This is the builder for `serve run`, for the `import_path` of config files, and for KubeRay. `deployment` and
    `adapters` may be JSON objects.
    """
    options = dict(args)
    if isinstance(deployment := options.pop("deployment", None), str):
        deployment = _json_object("deployment", deployment)
    if isinstance(adapters := options.pop("adapters", None), str) and adapters.startswith("{"):
        adapters = _json_object("adapters", adapters)
    return build_app(options.pop("model", None), deployment=deployment, adapters=adapters, **options)


def _json_object(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"option `{name}`: expected a JSON object, but got {text!r}: {error}") from None


def _checked_deployment(given: Any) -> dict[str, Any]:
    """Return the options of the deployment. Raises `ConfigError` for one that Ray Serve or a replica does not have."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"option `deployment`: expected a mapping of options of serve.deployment, but got {given!r}")
    known = inspect.signature(serve.deployment).parameters.keys() - {"_func_or_class", "version"}
    for name in given:
        if name not in known:
            meant = suggest(str(name), known, {})
            hint = f"; did you mean `{meant}`?" if meant else f"; it has {', '.join(sorted(known))}"
            raise ConfigError(f"option `deployment`: serve.deployment of Ray {ray.__version__} has no `{name}`{hint}")
    options = {name: value for name, value in given.items() if value is not None}
    if not isinstance(actor_options := options.get("ray_actor_options", {}), Mapping):
        raise ConfigError(f"option `deployment`: `ray_actor_options` must be a mapping, but it is {actor_options!r}")
    if "user_config" in options:
        raise ConfigError(
            "option `deployment`: a running replica takes no `user_config`: give its options to `build_app`, and "
            "deploy the application again to change them"
        )
    return options
