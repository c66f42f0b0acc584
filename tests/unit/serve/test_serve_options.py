"""Options of `serve.build_app` and the deployment that they describe."""

from __future__ import annotations

from typing import Any

import pytest

from eagleray.config.build import field_owners
from eagleray.config.environment import API_KEY_VARIABLE
from eagleray.errors import ConfigError
from eagleray.serve.defaults import deployment_options
from eagleray.serve.options import REFUSED, serve_config
from eagleray.serve.resources import replica_resources, with_executor


def options_of(given: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    config = with_executor(serve_config(options))
    return deployment_options(config, replica_resources(config, [{"CPU": 8.0}], actor_options={}), given or {})


def test_refused_options_exist():
    assert REFUSED.keys() <= field_owners().keys()


@pytest.mark.parametrize(
    ("option", "value", "advice"),
    [
        ("port", 80, "http_options"),
        ("uds", "/tmp/socket", "http_options"),
        ("ssl_certfile", "cert.pem", "ssl_certfile"),
        ("api_server_count", 2, "num_replicas"),
        ("root_path", "/llm", "route_prefix"),
        ("shutdown_timeout", 5, "graceful_shutdown_timeout_s"),
        ("placement_group", "mine", "placement_group_bundles"),
        ("ray_address", "auto", "ray.init"),
        ("data_parallel_rank", 1, "num_replicas"),
        ("autoscale", "1:4", "autoscaling_config"),
        ("instance_name", "mine", "`name` in `deployment`"),
    ],
)
def test_serve_config_option_of_sockets_and_processes_is_refused_with_what_serve_has(option, value, advice):
    with pytest.raises(ConfigError, match=f"option `{option}` is not for Ray Serve: .*{advice}"):
        serve_config({option: value})


def test_serve_config_unknown_option_is_refused():
    with pytest.raises(ConfigError, match="no option `tensor_paralel_size`; did you mean `tensor_parallel_size`"):
        serve_config({"tensor_paralel_size": 2})


def test_serve_config_options_of_the_http_api_and_of_vllm_are_accepted():
    config = serve_config({"enable_sglang_api": True, "max_request_bytes": "1000", "enforce_eager": True})
    assert config.serving.enable_sglang_api
    assert config.serving.max_request_bytes == 1000


def test_serve_config_reads_keys_of_the_environment_and_keeps_them_there(monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    assert [serve_config({}).serving.api_key for _ in range(2)] == [["secret"], ["secret"]]


def test_deployment_options_given_ones_replace_defaults():
    options = options_of({"name": "mine", "health_check_period_s": 1, "ray_actor_options": {"runtime_env": {}}})
    assert (options["name"], options["health_check_period_s"], options["health_check_timeout_s"]) == ("mine", 1, 30.0)
    assert options["ray_actor_options"] == {"runtime_env": {}, "num_cpus": 1.0}
    assert "autoscaling_config" not in options
    assert "placement_group_bundles" not in options


def test_deployment_options_take_more_requests_than_run():
    assert options_of(max_num_seqs=64)["max_ongoing_requests"] == 80
    assert options_of(max_num_seqs=4, data_parallel_size=2)["max_ongoing_requests"] == 24


def test_deployment_options_bundles_of_the_user_replace_ours():
    assert options_of(tensor_parallel_size=2)["placement_group_bundles"] == [{"CPU": 1.0}] * 3
    bundles = [{"CPU": 3.0}]
    options = options_of({"placement_group_bundles": bundles}, tensor_parallel_size=2)
    assert options["placement_group_bundles"] == bundles
    assert "placement_group_strategy" not in options


@pytest.mark.parametrize("given", [{"num_replicas": "auto"}, {"autoscaling_config": {"max_replicas": 4}}])
def test_deployment_options_autoscaling_has_our_target_and_policy(given):
    config = options_of(given, max_num_seqs=64)["autoscaling_config"]
    assert config["target_ongoing_requests"] == 48
    assert config["policy"] == {"policy_function": "eagleray.serve.autoscaling:scale_by_queue"}
    assert config.get("max_replicas") == given.get("autoscaling_config", {}).get("max_replicas")


def test_deployment_options_autoscaling_of_the_user_replaces_ours():
    given = {"autoscaling_config": {"target_ongoing_requests": 5, "policy": {"policy_function": "my:policy"}}}
    assert options_of(given)["autoscaling_config"] == given["autoscaling_config"]
