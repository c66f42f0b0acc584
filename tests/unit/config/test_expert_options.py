"""Options of expert parallelism: their combined meaning, and the refusal of contradictions."""

from __future__ import annotations

import pytest

from eagleray.config.build import build_config
from eagleray.config.resolve import expert_dispatch, expert_engines
from eagleray.errors import ConfigError

EP = {"enable_expert_parallel": True}
SEVERAL = EP | {"data_parallel_size": 2}
BY_RAY = {"data_parallel_backend": "ray"}


@pytest.mark.parametrize(
    ("options", "dispatch", "engines"),
    [
        ({}, "all-reduce", 1),
        ({"data_parallel_size": 4}, "all-reduce", 1),
        (EP, "all-reduce", 1),
        (EP | {"tensor_parallel_size": 2, "expert_dispatch": "all-to-all"}, "all-to-all", 1),
        (EP | {"tensor_parallel_size": 2, "expert_dispatch": "all-gather"}, "all-gather", 1),
        (SEVERAL, "all-gather", 2),
        (SEVERAL | {"expert_dispatch": "all-gather"}, "all-gather", 2),
        (SEVERAL | {"expert_dispatch": "all-to-all"}, "all-to-all", 2),
    ],
)
def test_expert_dispatch_options_give_method_and_engines(options, dispatch, engines):
    config = build_config(**options)
    assert (expert_dispatch(config), expert_engines(config)) == (dispatch, engines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_eplb": True}, "`enable_eplb` is for whole experts on each worker: add `enable_expert_parallel`"),
        ({"num_redundant_experts": 2}, "`num_redundant_experts` is for whole experts"),
        ({"expert_dispatch": "all-to-all"}, "`expert_dispatch` is for whole experts"),
        (EP | {"num_redundant_experts": 2}, "`num_redundant_experts` .* add `enable_eplb`"),
        (EP | {"eplb_step_interval": 100}, "`eplb_step_interval` .* add `enable_eplb`"),
        ({"eplb_step_interval": 100}, "`eplb_step_interval` .* add `enable_eplb`"),
        (SEVERAL | {"expert_dispatch": "all-reduce"}, "all-reduce is for one engine.* data_parallel_size is 2"),
        (SEVERAL | {"pipeline_parallel_size": 2}, "one stage, but pipeline_parallel_size is 2"),
        (SEVERAL | {"weight_update": "in-place"}, "cannot change weights in place"),
        (SEVERAL | BY_RAY | {"executor": "ray-graph"}, "cannot use executor ray-graph"),
        (SEVERAL | {"executor": "ray-graph"}, "cannot use executor ray-graph"),
        (SEVERAL | BY_RAY | {"executor": "in-process"}, "with executor in-process .* take executor ray"),
        (SEVERAL | BY_RAY | {"executor": "processes"}, "with executor processes .* take executor ray"),
        (SEVERAL | {"data_parallel_rank": 0}, "`data_parallel_rank`: engines that share their experts are all started"),
        (SEVERAL | {"data_parallel_start_rank": 1}, "`data_parallel_start_rank`: engines that share"),
        (SEVERAL | {"data_parallel_size_local": 1}, "`data_parallel_size_local`: engines that share"),
        (SEVERAL | {"deterministic": True}, "`deterministic`: with expert_dispatch all-gather.* take all-to-all"),
        (EP | {"deterministic": True, "enable_eplb": True}, "where the experts are, which `enable_eplb` changes"),
        (EP | {"enable_eplb": True, "num_redundant_experts": -1}, "option `num_redundant_experts`"),
        (EP | {"enable_eplb": True, "eplb_step_interval": 0}, "option `eplb_step_interval`"),
        (EP | {"expert_dispatch": "all"}, "option `expert_dispatch`"),
    ],
)
def test_check_experts_contradicting_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_config(**options)


@pytest.mark.parametrize(
    "options",
    [
        EP | {"pipeline_parallel_size": 2},
        EP | {"executor": "ray-graph"},
        EP | {"enable_eplb": True, "num_redundant_experts": 2},
        EP | {"deterministic": True},
        EP | {"deterministic": True, "enable_eplb": True, "expert_dispatch": "all-to-all"},
        SEVERAL | {"deterministic": True, "expert_dispatch": "all-to-all"},
        SEVERAL | {"deterministic": True, "expert_dispatch": "all-to-all", "enable_eplb": True},
        SEVERAL | {"enable_eplb": True, "num_redundant_experts": 4, "tensor_parallel_size": 2},
        SEVERAL | {"executor": "in-process"},
        SEVERAL | BY_RAY,
        SEVERAL | BY_RAY | {"executor": "ray", "tensor_parallel_size": 2},
        {"data_parallel_size": 2, "deterministic": True, "pipeline_parallel_size": 2},
    ],
)
def test_check_experts_consistent_options_are_accepted(options):
    build_config(**options)
