"""Options of stages, and the resources that their actors reserve."""

from __future__ import annotations

from typing import Any

import pytest

from eagleray.cluster.nodes import Node
from eagleray.config.build import build_config
from eagleray.data.options import StageOptions, split_options
from eagleray.data.reservation import actor_resources, explain_actor_shortage, explain_group_shortage
from eagleray.errors import ConfigError


def node(**resources: float) -> Node:
    return Node(node_id="a" * 32, ip="10.0.0.1", is_alive=True, total=resources, free=resources)


def test_split_options_divides_stage_and_engine() -> None:
    stage, engine = split_options({"num_actors": 2, "errors": "raise", "max_num_seqs": 8})
    assert (stage.num_actors, stage.errors, stage.rows_per_block) == ((2, 2), "raise", 64)
    assert engine == {"max_num_seqs": 8}


def test_split_options_option_of_one_instance_is_refused() -> None:
    with pytest.raises(ConfigError, match="option `placement_group`: each actor has a placement group of its own"):
        split_options({"placement_group": "group"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"errors": "ignore"},
        {"rows_per_block": 0},
        {"rows_per_block": "64"},
        {"num_actors": 0},
        {"num_actors": (2, 1)},
        {"num_actors": (1, 2, 3)},
        {"num_actors": "all"},
        {"output_prefix": 3},
        {"actor_options": ["num_gpus"]},
        {"actor_options": {"num_gpus": 1, "concurrency": 4}},
    ],
)
def test_stage_options_wrong_value_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"`{name}` must be "):
        StageOptions(**wrong)


@pytest.mark.parametrize(
    ("options", "total", "expected"),
    [
        ({}, {"CPU": 8}, {"CPU": 1}),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, {"CPU": 8}, {"CPU": 4}),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, {"CPU": 8, "GPU": 4}, {"CPU": 1, "GPU": 4}),
        ({"device": "cpu"}, {"CPU": 8, "GPU": 4}, {"CPU": 1}),
        ({"num_threads": 3, "tensor_parallel_size": 2}, {"CPU": 8}, {"CPU": 6}),
        ({"executor": "ray", "tensor_parallel_size": 4}, {"CPU": 8, "GPU": 4}, {"CPU": 1}),
        ({"data_parallel_backend": "ray", "data_parallel_size": 4}, {"CPU": 8}, {"CPU": 1}),
    ],
)
def test_actor_resources_are_those_of_its_child_processes(
    options: dict[str, Any], total: dict[str, float], expected: dict[str, float]
) -> None:
    assert actor_resources(build_config(**options), [node(**total)]) == expected


@pytest.mark.parametrize(
    ("resources", "num_actors", "advice"),
    [
        ({"GPU": 4.0}, 1, None),
        ({"GPU": 2.0}, 2, None),
        ({}, 9, None),
        ({"CPU": 7.0}, 1, None),
        ({"GPU": 2.0}, 3, "set `num_actors` to 2"),
        ({"CPU": 2.0}, 4, "and Ray Data {CPU: 1} for its own tasks, but"),
        ({"CPU": 2.0}, 4, "set `num_actors` to 3"),
        ({"CPU": 8.0}, 1, "set `actor_options`, such as `num_cpus`, to less, or add nodes"),
        ({"TPU": 1.0}, 1, "node 10.0.0.1 (aaaaaaaa) has {CPU: 8, TPU: 0}"),
    ],
)
def test_explain_actor_shortage_says_what_would_fit(
    resources: dict[str, float], num_actors: int, advice: str | None
) -> None:
    said = explain_actor_shortage([node(CPU=8, GPU=4)], resources, num_actors, 1.0)
    assert said is None if advice is None else said is not None and advice in said


def test_explain_actor_shortage_of_ray_data_itself_is_no_matter_of_the_actors() -> None:
    said = explain_actor_shortage([node(CPU=1)], {}, 1, 2.0)
    assert said is not None
    assert said.startswith("the stage needs an actor with {CPU: 0}, and Ray Data {CPU: 2} for its own tasks, but")
    assert said.endswith("has {CPU: 1}; add nodes")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 8}, None),
        ({"tensor_parallel_size": 4, "executor": "ray"}, None),
        ({"tensor_parallel_size": 8, "executor": "ray"}, "`tensor_parallel_size` 4 would fit"),
        ({"data_parallel_size": 5, "data_parallel_backend": "ray"}, "`data_parallel_size` 4 would fit"),
        ({"executor": "ray", "ray_worker_resources": {"acc": 1}}, "nothing of that kind fits"),
    ],
)
def test_explain_group_shortage_says_what_would_fit(options: dict[str, Any], said: str | None) -> None:
    found = explain_group_shortage(build_config(**options), [node(CPU=8, GPU=4)])
    assert found is None if said is None else found is not None and said in found
