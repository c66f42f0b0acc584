"""Routing info of an engine, and its refusal to start without experts."""

from __future__ import annotations

import math

import msgspec
import pytest
from engine_fakes import CountingGroup

from eagleray.config.build import build_config
from eagleray.engine.startup import start_engine
from eagleray.errors import ConfigError
from eagleray.executor.executor import Executor
from eagleray.messages.membership import EngineInfo, RoutingInfo
from eagleray.messages.steps import Call, ModelLoaded, Reply
from eagleray.messages.workers import Topology


class MixtureGroup(CountingGroup):
    """Start an engine whose stages have `moe_layers` MoE layers each."""

    def __init__(self, *moe_layers: int, num_experts: int = 8, tp: int = 1) -> None:
        super().__init__()
        world_size = tp * len(moe_layers)
        self.topology = Topology(
            tensor_parallel_size=tp,
            pipeline_parallel_size=len(moe_layers),
            nodes=["here"] * world_size,
            addresses=["127.0.0.1"] * world_size,
        )
        self._moe_layers = moe_layers
        self._num_experts = num_experts

    def send(self, call: Call) -> None:
        super().send(call)
        answer = self._replies.pop().body
        for rank in range(self.topology.world_size):
            body = answer
            if isinstance(answer, ModelLoaded):
                stage = rank // self.topology.tensor_parallel_size
                body = msgspec.structs.replace(
                    answer,
                    num_moe_layers=self._moe_layers[stage],
                    num_experts=self._num_experts,
                    top_k=2,
                    layers_with_experts=(1, 2, 3, 4),
                    num_layers=5,
                )
            self._replies.append(Reply(call.call_id, rank, body))


def info(group: CountingGroup, **options) -> EngineInfo:
    sizes = {
        "tensor_parallel_size": group.topology.tensor_parallel_size,
        "pipeline_parallel_size": group.topology.pipeline_parallel_size,
    }
    return start_engine(build_config(**options, **sizes), Executor(group), deadline=math.inf).info


def test_routing_info_several_stages_counts_layers_once():
    started = info(MixtureGroup(1, 3, tp=2), enable_return_routed_experts=True)
    routing = RoutingInfo(num_layers=4, num_experts=8, top_k=2, layers=(1, 2, 3, 4), num_model_layers=5)
    assert started.has_experts and started.routing == routing


def test_routing_info_option_off_is_none():
    started = info(MixtureGroup(2))
    assert started.has_experts and started.routing is None


def test_routing_info_model_without_experts_is_refused():
    assert not info(CountingGroup()).has_experts
    with pytest.raises(ConfigError, match="`enable_return_routed_experts`: the model \\(Counting\\) has no experts"):
        info(CountingGroup(), enable_return_routed_experts=True)
