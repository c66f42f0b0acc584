"""Options of `serve.build_app` -> configuration. Options that would have no meaning in a replica are refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from eagleray.config.api_keys import with_api_keys
from eagleray.config.build import build_config, field_owners
from eagleray.config.option_variables import with_variables
from eagleray.config.sections import Config
from eagleray.config.vllm_options import translate
from eagleray.errors import ConfigError
from eagleray.log import get_logger

logger = get_logger(__name__)

PROXY = "Serve's proxies listen for HTTP: give `{}` in the `http_options` of `serve.start`, or of the config file"
TLS = "connections end at Serve's proxies: give {} in the `http_options` of `serve.start`, or of the config file"
SOCKETS = "connections end at Serve's proxies, which have no such limit: set it in the load balancer before them"
GROUP = "a replica uses the placement group that Serve makes for it: give `{}` in `deployment`"
RANKS = "each replica has all of its engines: give `data_parallel_size`, and `num_replicas` in `deployment` for more"
AUTOSCALE = "Serve scales replicas, each with a fixed number of engines: give `autoscaling_config` in `deployment`"

REFUSED = {
    "host": PROXY.format("host"),
    "port": PROXY.format("port"),
    "uds": "Serve's proxies listen on a host and a port: give both in the `http_options` of `serve.start`",
    "uds_mode": "Serve's proxies listen on a host and a port: give both in the `http_options` of `serve.start`",
    "root_path": "Serve routes by `route_prefix`, of `serve.run` or of the application in the config file",
    "api_server_count": "Serve starts a proxy on each node with a replica, and `num_replicas` in `deployment` replicas",
    "max_connections": SOCKETS,
    "max_header_bytes": SOCKETS,
    "max_header_count": SOCKETS,
    "header_timeout": SOCKETS,
    "body_timeout": SOCKETS,
    "send_timeout": SOCKETS,
    "keep_alive_timeout": PROXY.format("keep_alive_timeout_s"),
    "ssl_certfile": TLS.format("`ssl_certfile`"),
    "ssl_keyfile": TLS.format("`ssl_keyfile`"),
    "ssl_ca_certs": TLS.format("`ssl_ca_certs`"),
    "ssl_cert_reqs": TLS.format("`ssl_ca_certs`"),
    "ssl_ciphers": TLS.format("`ssl_certfile` and `ssl_keyfile`"),
    "enable_ssl_refresh": TLS.format("`ssl_certfile` and `ssl_keyfile`"),
    "attach_file": "clients reach replicas through Serve's proxies: run `eagleray serve` for front-ends of your own",
    "shutdown_timeout": "Serve waits for running requests: give `graceful_shutdown_timeout_s` in `deployment`",
    "ray_address": "engines run in the cluster of their replica: connect to it by `ray.init` or RAY_ADDRESS",
    "placement_group": GROUP.format("placement_group_bundles"),
    "ray_engine_placement": GROUP.format("placement_group_strategy"),
    "ray_nodes": GROUP.format("placement_group_bundle_label_selector"),
    "data_parallel_rank": RANKS,
    "data_parallel_start_rank": RANKS,
    "data_parallel_size_local": RANKS,
    "autoscale": AUTOSCALE,
    "autoscale_target_queue": AUTOSCALE,
    "autoscale_target_ttft": AUTOSCALE,
    "autoscale_down_delay": AUTOSCALE,
    "instance_name": "instances are named after their replicas: give `name` in `deployment`",
}
"""Options of `eagleray serve` that `build_app` refuses, with what Ray Serve has in their place."""


def serve_config(options: Mapping[str, Any]) -> Config:
    """Return the configuration of a replica from options by name, over those of the environment. Raises `ConfigError`.

    API keys are read here too, so that replicas demand those of the program that deploys them. The environment keeps
    its keys, because a program may build several applications.
    """
    environment = dict(os.environ)
    try:
        return _read(options)
    finally:
        os.environ.update(environment)


def _read(options: Mapping[str, Any]) -> Config:
    own = field_owners()
    given = translate(options, own)
    for name in given.options:
        if name in REFUSED:
            raise ConfigError(f"option `{name}` is not for Ray Serve: {REFUSED[name]}")
    known = with_variables(given, own.keys() - REFUSED.keys())
    for note in known.notes:
        logger.info("%s", note)
    return with_api_keys(build_config(**known.options))
