"""Choice between the caller's placement group and the resources that the caller holds."""

from __future__ import annotations

from typing import Any

import pytest

from eagleray.config.build import build_config
from eagleray.config.resolve import executor_name
from eagleray.executor.choose import is_in_placement_group
from eagleray.messages.workers import RayCaller, RayContext

CPU, GPU, BOTH = {"CPU": 1.0}, {"GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}


def executor(bundles: list[dict[str, float]], held: dict[int, dict[str, float]], **options: Any) -> str:
    caller = RayCaller(name="actor", held=held)
    context = RayContext(address="a:1", placement_group="ab", group_bundles=bundles, caller=caller)
    config = build_config(**options)
    return executor_name(config, in_placement_group=is_in_placement_group(config, context))


@pytest.mark.parametrize(
    ("bundles", "held", "tp", "expected"),
    [
        ([CPU], {0: CPU}, 1, "in-process"),
        ([BOTH], {0: BOTH}, 1, "in-process"),
        ([BOTH], {0: CPU}, 1, "ray"),  # the GPU of its own bundle is free
        ([{"CPU": 4.0}], {0: CPU}, 2, "ray"),
        ([{"CPU": 2.0, "GPU": 2.0}], {0: {"CPU": 1.0, "GPU": 2.0}}, 2, "processes"),
        ([CPU, GPU, GPU], {0: CPU}, 2, "ray"),
        ([GPU, GPU], {0: GPU}, 1, "ray"),  # the other bundle
        ([CPU], {0: CPU}, 2, "ray"),  # which says what is missing
        ([CPU], {}, 1, "ray"),
        ([BOTH], {0: {"CPU": 1.0, "GPU": 0.5}}, 1, "ray"),  # which says who holds it
    ],
)
def test_executor_name_auto_in_placement_group_is_ray_unless_all_held(
    bundles: list[dict[str, float]], held: dict[int, dict[str, float]], tp: int, expected: str
) -> None:
    assert executor(bundles, held, tensor_parallel_size=tp) == expected


def test_is_in_placement_group_several_engines_counts_all_workers() -> None:
    assert executor([{"CPU": 3.0}], {0: {"CPU": 2.0}}, data_parallel_size=2) == "in-process"
    assert executor([{"CPU": 4.0}], {0: {"CPU": 2.0}}, data_parallel_size=2) == "ray"


def test_executor_name_given_is_used() -> None:
    assert executor([CPU], {0: CPU}, executor="ray") == "ray"
    assert executor([CPU], {0: CPU}, ray_worker_resources={"CPU": 1}) == "ray"
    assert executor([CPU, CPU], {0: CPU}, executor="in-process") == "in-process"


def test_is_in_placement_group_without_a_group_is_false() -> None:
    assert not is_in_placement_group(build_config(), None)
    assert not is_in_placement_group(build_config(), RayContext(address="a:1"))


def test_is_in_placement_group_engine_actor_is_true() -> None:
    """The placement group of an engine's actor was made for its workers."""
    assert is_in_placement_group(build_config(), RayContext(address="a:1", placement_group="ab", bundles=[0]))
