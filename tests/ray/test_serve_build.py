"""Applications of `eagleray.serve.build_app`, and the errors for what cannot be deployed."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from eagleray.errors import ClusterError, ConfigError
from eagleray.serve import build_app, build_app_from_args


def deployment_of(application: Any) -> Any:
    return application._bound_deployment


def test_build_app_has_an_accepted_deployment(cluster):
    config = {"min_replicas": 1, "max_replicas": 4}
    deployment = deployment_of(build_app(max_num_seqs=64, device="cpu", deployment={"autoscaling_config": config}))
    autoscaling = deployment._deployment_config.autoscaling_config
    assert (deployment.name, deployment.max_ongoing_requests) == ("eagleray", 80)
    assert (autoscaling.max_replicas, autoscaling.get_target_ongoing_requests()) == (4, 48)


def test_build_app_automatic_number_of_replicas_has_our_policy(cluster):
    deployment = deployment_of(build_app(device="cpu", deployment={"num_replicas": "auto"}))
    config = deployment._deployment_config.autoscaling_config
    assert (config.min_replicas, config.policy.policy_function) == (1, "eagleray.serve.autoscaling:scale_by_queue")


def test_build_app_takes_a_gpu_where_the_cluster_has_some(cluster):
    assert deployment_of(build_app()).ray_actor_options["num_gpus"] == 1
    assert "num_gpus" not in deployment_of(build_app(device="cpu")).ray_actor_options


def test_build_app_from_args_takes_texts_of_a_command_line(cluster):
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    args = {"model": "org/model", "device": "cpu", "tensor_parallel_size": "2", "deployment": '{"num_replicas": 3}'}
    deployment = deployment_of(call_user_app_builder_with_args_if_necessary(build_app_from_args, args))
    assert deployment.num_replicas == 3
    assert deployment._replica_config.placement_group_bundles == [{"CPU": 1.0}] * 3


@pytest.mark.parametrize(("given", "said"), [("{", "expected a JSON object"), ("[]", "expected a mapping")])
def test_build_app_from_args_deployment_that_is_no_mapping_is_refused(cluster, given, said):
    with pytest.raises(ConfigError, match=said):
        build_app_from_args({"deployment": given})


@pytest.mark.parametrize(
    ("deployment", "said"),
    [
        ({"num_replica": 2}, "has no `num_replica`; did you mean `num_replicas`"),
        ({"user_config": {"max_num_seqs": 8}}, "takes no `user_config`: give its options to `build_app`"),
        ({"ray_actor_options": 2}, "`ray_actor_options` must be a mapping, but it is 2"),
        ({"ray_actor_options": {"num_cpus": "two"}}, "`num_cpus` of an actor must be a number"),
        ({"num_replicas": 2, "autoscaling_config": {"max_replicas": 2}}, "Ray Serve refuses it: .*num_replicas"),
        ({"max_ongoing_requests": 0}, "Ray Serve refuses it: .*max_ongoing_requests"),
        ({"autoscaling_config": {"policy": {"policy_function": "missing_module:policy"}}}, "refuses it: .*missing_mod"),
    ],
)
def test_build_app_wrong_deployment_options_are_refused(cluster, deployment, said):
    with pytest.raises(ConfigError, match=said):
        build_app(device="cpu", deployment=deployment)


def test_build_app_replica_that_the_cluster_cannot_hold_is_refused(cluster):
    with pytest.raises(ClusterError, match=r"no replica fits .* 16 x \{CPU: 1\} .*give a smaller"):
        build_app(device="cpu", tensor_parallel_size=16)


def test_build_app_local_testing_mode_says_how_to_deploy(cluster):
    from ray import serve

    with pytest.raises(ClusterError, match=r"deploy it by `ray\.serve\.run`, without local testing mode"):
        serve.run(build_app(device="cpu"), _local_testing_mode=True)


def test_build_app_cluster_that_cannot_be_reached_is_an_error(cluster, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ClusterError, match=r"^variable RAY_ADDRESS: .* 127\.0\.0\.1:1: cannot be reached "):
        build_app()


def test_build_app_program_that_is_not_connected_reads_the_cluster(cluster, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    assert deployment_of(build_app()).ray_actor_options["num_gpus"] == 1
