from __future__ import annotations

from dataclasses import replace

import torch

from eagleray.models.config_file import ConfigFile
from eagleray.models.registry import FAMILIES
from eagleray.parallel.mesh import Mesh
from eagleray.worker.memory import step_bytes

MOE = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 15, "moe_intermediate_size": 12}


def spec(architecture: str = "LlamaForCausalLM", **fields):
    return FAMILIES[architecture].read_spec(ConfigFile(None, {"head_dim": 128} | fields))


def test_step_bytes_are_fewer_on_a_rank_than_on_whole_model():
    model = replace(spec(), vocab_size=100_000)

    def needed(**place: int) -> int:
        return step_bytes(model, torch.bfloat16, num_tokens=512, num_logits=64, mesh=Mesh(**place))

    whole = step_bytes(model, torch.bfloat16, num_tokens=512, num_logits=64)
    assert whole == needed()
    assert needed(rank=1, tp_size=2) < needed(rank=0, tp_size=2) < whole
    assert needed(rank=0, pp_size=2) < whole == needed(rank=1, pp_size=2)


def test_step_bytes_grow_with_the_number_of_exchanging_engines():
    model = spec("Qwen3MoeForCausalLM", **MOE)
    alone, two, four = (
        step_bytes(model, torch.bfloat16, num_tokens=512, num_logits=64, num_exchanging=engines)
        for engines in (0, 2, 4)
    )
    assert alone < two < four
    assert four - alone == 2 * (two - alone)
