"""Options of several engines and API servers: their combined meaning, and the refusal of contradictions."""

from __future__ import annotations

import argparse
import importlib.util

import pytest

from eagleray.cli.options import server_config
from eagleray.config.build import build_config
from eagleray.config.flags import add_config_flags
from eagleray.config.resolve import engines_on_host, executor_name, first_device, local_ranks, steps_in_flight
from eagleray.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, [0]),
        ({"data_parallel_size": 3}, [0, 1, 2]),
        ({"autoscale": "2:4"}, [0, 1]),
        ({"autoscale": " 1:4 ", "data_parallel_size": 3}, [0, 1, 2]),
        ({"data_parallel_size": 3, "data_parallel_rank": 2}, [2]),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, [0, 1]),
        ({"data_parallel_size": 4, "data_parallel_start_rank": 2, "data_parallel_size_local": 2}, [2, 3]),
        ({"data_parallel_size": 4, "data_parallel_start_rank": 1}, [1, 2, 3]),
    ],
)
def test_local_ranks_options_give_ranks(options, ranks):
    assert list(local_ranks(build_config(**options))) == ranks


SEVERAL = {"data_parallel_size": 2}
BY_RAY = {"data_parallel_backend": "ray"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_rank": 1}, "`data_parallel_rank`: there is no rank 1"),
        (SEVERAL | {"data_parallel_rank": 2}, "there is no rank 2.* the ranks 0 to 1"),
        (SEVERAL | {"data_parallel_rank": 0, "data_parallel_start_rank": 0}, "`data_parallel_start_rank` says how"),
        (SEVERAL | {"data_parallel_rank": 0, "data_parallel_size_local": 1}, "`data_parallel_size_local` says how"),
        (SEVERAL | {"data_parallel_size_local": 3}, "`data_parallel_size_local`: there is no rank 2"),
        (SEVERAL | {"data_parallel_start_rank": 2}, "`data_parallel_start_rank`: there is no rank 2"),
        (SEVERAL | {"data_parallel_start_rank": 1, "data_parallel_size_local": 2}, "there is no rank 2"),
        ({"data_parallel_rank": -1}, "option `data_parallel_rank`"),
        ({"ray_engine_placement": "spread"}, "spread is for engines that are Ray actors"),
        ({"ray_engine_placement": "strict-spread", "executor": "ray"}, "strict-spread is for engines"),
        ({"ray_nodes": ["a"], "executor": "processes"}, "`ray_nodes` is for what Ray places"),
        (SEVERAL | {"bundle_indices": [0]}, "names the bundles of one engine, but here are 2"),
        (SEVERAL | BY_RAY | {"bundle_indices": [0]}, "names the bundles of one engine"),
        (SEVERAL | {"placement_group": "ab"}, "take data_parallel_backend ray"),
        (BY_RAY | {"executor": "processes", "ray_placement_strategy": "SPREAD"}, "is for executors ray and ray-graph"),
        (BY_RAY | {"executor": "in-process", "tensor_parallel_size": 2}, "needs 2: take processes"),
        ({"attach_file": "/nowhere/at/all"}, "`attach_file`: there is no directory '/nowhere/at'"),
        ({"attach_file": "/"}, "`attach_file`: '/' is a directory"),
        ({"autoscale": "4:1"}, "`autoscale`: 4:1 has a minimum above its maximum: did you mean 1:4"),
        ({"autoscale": "0:3"}, "`autoscale`: 0:3 would stop every engine"),
        ({"autoscale": "a:b"}, "`autoscale`: expected the least and the greatest .* such as 1:4, but got 'a:b'"),
        ({"autoscale": "3"}, "`autoscale`: expected the least"),
        ({"autoscale": "1:-2"}, "`autoscale`: expected the least"),
        ({"autoscale": "1:3", "data_parallel_size": 4}, "data_parallel_size 4 is more than the maximum of 1:3"),
        ({"autoscale": "1:3", "enable_expert_parallel": True}, "engines that share experts"),
        (SEVERAL | {"autoscale": "1:3", "data_parallel_rank": 1}, "with `data_parallel_rank` the engines are"),
        ({"autoscale": "1:2", "bundle_indices": [0]}, "names the bundles of one engine, but here are 2"),
        ({"autoscale_target_ttft": 2.0}, "`autoscale_target_ttft` is a target of `autoscale`: add `autoscale`"),
        ({"autoscale": "1:2", "autoscale_target_queue": 0}, "option `autoscale_target_queue`"),
        ({"api_server_count": 0}, "option `api_server_count`"),
        ({"request_timeout": 0}, "option `request_timeout`"),
    ],
)
def test_check_fleet_contradicting_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_config(**options)


@pytest.mark.parametrize(
    "options",
    [
        SEVERAL | BY_RAY | {"ray_engine_placement": "strict-spread", "ray_nodes": ["a", "b"]},
        SEVERAL | BY_RAY | {"executor": "in-process", "ray_nodes": ["a"], "ray_worker_resources": {"GPU": 1}},
        SEVERAL | BY_RAY | {"executor": "processes", "tensor_parallel_size": 2, "ray_address": "auto"},
        SEVERAL | BY_RAY | {"placement_group": "ab"},
        SEVERAL | {"data_parallel_rank": 1, "placement_group": "ab", "bundle_indices": [1]},
        {"executor": "ray", "ray_nodes": ["a"]},
        {"api_server_count": 3},
    ],
)
def test_check_fleet_consistent_options_are_accepted(options):
    build_config(**options)


def test_check_fleet_attach_file_in_existing_directory_is_accepted(tmp_path):
    assert build_config(attach_file=str(tmp_path / "attach.json")).serving.attach_file == str(tmp_path / "attach.json")


def test_check_fleet_ray_engines_need_ray_workers():
    def name(**options):
        return executor_name(build_config(**options), in_placement_group=False)

    assert name(data_parallel_backend="ray") == "ray"
    assert name(data_parallel_backend="ray", executor="in-process") == "in-process"
    assert name(data_parallel_backend="ray", executor="processes") == "processes"
    assert name(data_parallel_size=2) == "in-process"
    assert name(ray_nodes=["a"]) == "ray"


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({}, "cpu", 1),
        ({"async_scheduling": True}, "cpu", 1),  # the thread that plans is the one that computes
        ({}, "cuda", 2),
        ({"async_scheduling": False}, "cuda", 1),
        ({"data_parallel_backend": "ray"}, "cpu", 2),
        ({"executor": "processes"}, "cpu", 2),
        ({"pipeline_parallel_size": 3}, "cpu", 4),
        ({"pipeline_parallel_size": 3, "async_scheduling": False}, "cuda", 3),
    ],
)
def test_steps_in_flight_depend_on_executor_and_device(options, device, expected):
    assert steps_in_flight(build_config(**options), device=device, in_placement_group=False) == expected


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1),
        ({"data_parallel_size": 3}, 3),
        ({"data_parallel_size": 8, "data_parallel_start_rank": 4, "data_parallel_size_local": 2}, 2),
        ({"data_parallel_size": 8, "data_parallel_rank": 4}, 1),
        ({"data_parallel_size": 8, "data_parallel_backend": "ray"}, 1),
        ({"autoscale": "1:4", "data_parallel_size": 2}, 4),
    ],
)
def test_engines_on_host_process_engines_are_counted(options, count):
    assert engines_on_host(build_config(**options)) == count


def test_first_device_process_engines_have_their_own():
    config = build_config(data_parallel_size=8, data_parallel_start_rank=4, tensor_parallel_size=2)
    assert [first_device(config, rank) for rank in local_ranks(config)] == [0, 2, 4, 6]
    assert first_device(build_config(data_parallel_size=8, data_parallel_rank=3), 3) == 0
    assert first_device(build_config(data_parallel_size=8, data_parallel_backend="ray"), 3) == 0


def test_build_config_fleet_flags_are_parsed():
    parser = argparse.ArgumentParser()
    sections = ("model", "parallel", "ray", "recovery", "serving")
    add_config_flags(parser, sections=sections)
    line = (
        "--data-parallel-size 4 --data-parallel-backend ray --data-parallel-start-rank 2 --data-parallel-size-local 2 "
        "--ray-engine-placement strict-spread --ray-nodes a b --max-request-restarts 0 --watchdog-timeout 1.5 "
        "--api-server-count 3 --request-timeout 30 --max-queued-requests 7"
    )
    config = server_config(parser.parse_args(line.split()), sections=sections)
    assert list(local_ranks(config)) == [2, 3]
    assert (config.ray.ray_engine_placement, config.ray.ray_nodes) == ("strict-spread", ["a", "b"])
    assert (config.recovery.max_request_restarts, config.recovery.watchdog_timeout) == (0, 1.5)
    serving = config.serving
    assert (serving.api_server_count, serving.request_timeout, serving.max_queued_requests) == (3, 30.0, 7)
    assert "default: pack" in parser.format_help()


@pytest.mark.parametrize("name", ["", "a/b", "a@b", "x" * 65, "ä", "a b", "a\n"])
def test_instance_name_that_cannot_name_an_actor_is_refused(name):
    with pytest.raises(ConfigError, match=r"option `instance_name` is .* 1 to 64 letters"):
        build_config(instance_name=name)


def test_instance_name_with_every_kind_of_character_is_taken():
    assert build_config(instance_name="A-b_c.9" + "x" * 57).execution.instance_name is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [("executor", "ray"), ("executor", "ray-graph"), ("data_parallel_backend", "ray"), ("ray_address", "auto")],
)
def test_build_config_ray_that_is_not_installed_is_refused(monkeypatch, name, value):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf'^option `{name}` needs Ray: pip install "ray>=2\.55"'):
        build_config(**{name: value})
    build_config(executor="processes")
