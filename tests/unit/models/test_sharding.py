"""A rank's part of a model: its shard of the weights, the tensors it reads, and the models that cannot be divided."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checkpoints import edit_config, make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from model_runs import load
from safetensors.torch import load_file, save_file

from eagleray.errors import CheckpointError, ConfigError
from eagleray.models.config_file import ConfigFile
from eagleray.models.registry import import_family
from eagleray.models.sharding import (
    check_experts,
    check_fits,
    features,
    kv_heads,
    num_kv_heads,
    padded_shard,
    shard,
)
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.groups import Groups
from eagleray.parallel.mesh import Mesh

CPU = torch.device("cpu")


def ranks(size: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(rank=rank, size=size) for rank in range(size)]


class Loading:
    """A group that only loads and never computes."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.size = mesh.tp_rank, mesh.tp_size
        self.bytes_sent = {}

    def close(self) -> None:
        pass


def loaded(checkpoint, mesh: Mesh, **options):
    tp = Loading(mesh)
    return load(checkpoint, groups=Groups(mesh, tp, None, ExpertGroup(tp)), **options)


@given(size=st.integers(1, 8), count=st.integers(1, 100))
def test_padded_shard_all_ranks_cover_the_count_in_order(size, count):
    shards = [padded_shard(count, tp) for tp in ranks(size)]
    assert len({len(part) for part in shards}) == 1
    covered = [index for part in shards for index in part]
    assert covered == list(range(len(covered)))
    assert count <= len(covered) < count + size


@given(size=st.sampled_from([1, 2, 4, 8]), kv=st.sampled_from([1, 2, 4, 8]), group=st.sampled_from([1, 2, 8]))
def test_kv_heads_are_those_of_the_ranks_query_heads(size, kv, group):
    heads = kv * group
    if heads % size == 0:
        for tp in ranks(size):
            needed = {head // group for head in shard(heads, tp)}
            assert needed == set(kv_heads(kv, tp))
            assert len(kv_heads(kv, tp)) == num_kv_heads(kv, size)


def test_features_of_heads_are_consecutive():
    assert features(range(2, 4), 16) == range(32, 64)


def test_load_model_ranks_have_all_weights_together(tmp_path):
    """Only norms and routers are on several ranks; a tied weight would be in the first and in the last stage."""
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    whole = load(checkpoint)
    norms = (2 * whole.spec.num_layers + 1) * whole.spec.hidden_size
    parts = [loaded(checkpoint, Mesh(rank=rank, tp_size=2, pp_size=2)) for rank in range(4)]
    assert sum(part.num_parameters for part in parts) == whole.num_parameters + norms
    assert [part.num_local_layers for part in parts] == [2, 2, 1, 1]
    assert {part.num_local_kv_heads for part in parts} == {whole.spec.num_kv_heads // 2}
    assert all(part.spec == whole.spec for part in parts)
    shape = parts[0].cache_shape(16)
    assert (shape.num_layers, shape.block) == (2, (1, 2 * 16 * whole.spec.head_dim))


@pytest.mark.parametrize("mesh", [Mesh(rank=1, tp_size=2), Mesh(rank=0, pp_size=3), Mesh(rank=3, tp_size=2, pp_size=2)])
def test_load_model_reports_progress_of_the_ranks_part(tmp_path, mesh):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    reported = []
    loaded(checkpoint, mesh, on_progress=lambda done, total: reported.append((done, total)))
    assert reported == sorted(reported)
    ((total),) = {total for _, total in reported}
    size = (checkpoint / "model.safetensors").stat().st_size
    assert 0.5 * size / mesh.world_size < total < 1.5 * size / mesh.world_size
    assert 0.8 * total < reported[-2][0] <= total
    assert reported[-1] == (total, total)


@pytest.mark.parametrize("rank", [0, 1])
def test_load_model_unknown_tensor_is_refused_on_every_stage(tmp_path, rank):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    tensors = load_file(checkpoint / "model.safetensors")
    for extra in ("model.other", "model.layers.0.mlp.router", "model.layers.2.mlp.router", "model.layers.3.new"):
        save_file(tensors | {extra: torch.zeros(1)}, checkpoint / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"no place for {extra}"):
            loaded(checkpoint, Mesh(rank=rank, pp_size=2))


def test_load_model_wrong_shape_names_the_whole_tensor(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file(tensors | {name: torch.zeros(64, 32)}, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        loaded(checkpoint, Mesh(rank=1, tp_size=2))
    assert f"tensor '{name}' has the shape [64, 32], but config.json implies [64, 64]" in str(error.value)


def spec(architecture: str = "LlamaForCausalLM", **fields):
    return import_family(architecture).read_spec(ConfigFile(None, {"head_dim": 128} | fields))


MOE = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 15, "moe_intermediate_size": 12}


@pytest.mark.parametrize(
    ("model", "mesh", "message"),
    [
        (spec(), Mesh(pp_size=33), "`pipeline_parallel_size`: 33 stages are more than the model's 32 layers"),
        (
            spec(num_attention_heads=6, num_key_value_heads=2, intermediate_size=12),
            Mesh(tp_size=4),
            "`tensor_parallel_size`: 4 does not fit the model's 6 attention heads.* what fits is 1, 2, 6$",
        ),
        (
            spec(num_attention_heads=12, num_key_value_heads=3, intermediate_size=12),
            Mesh(tp_size=2),
            "2 does not fit the model's 3 key-value heads.* what fits is 1, 3, 6, 12$",
        ),
        (
            spec(num_attention_heads=8, intermediate_size=12),
            Mesh(tp_size=8),
            "8 does not fit the model's intermediate size 12.* what fits is 1, 2, 4$",
        ),
        (
            spec("Qwen3MoeForCausalLM", **MOE),
            Mesh(tp_size=8),
            "8 does not fit the model's expert intermediate size 12.* what fits is 1, 2, 4$",
        ),
        (
            spec("Qwen3MoeForCausalLM", mlp_only_layers=[0], **MOE),
            Mesh(tp_size=2),
            "2 does not fit the model's intermediate size 15.* what fits is 1$",
        ),
    ],
)
def test_check_fits_indivisible_model_is_refused(model, mesh, message):
    with pytest.raises(ConfigError, match=f"^option `.*{message.lstrip('`')}"):
        check_fits(model, mesh)


@pytest.mark.parametrize(
    ("model", "num_ranks", "num_redundant", "message"),
    [
        (
            spec(),
            2,
            0,
            "option `enable_expert_parallel`: the model, LlamaForCausalLM, has no experts to divide; drop it",
        ),
        (
            spec("Qwen3MoeForCausalLM", num_experts=10, **MOE),
            4,
            0,
            "option `enable_expert_parallel`: 10 experts and 0 redundant ones cannot be divided among 4 ranks; set "
            "`num_redundant_experts` to 2, or",
        ),
        (
            spec("Qwen3MoeForCausalLM", num_experts=8, **MOE),
            4,
            3,
            "option `enable_expert_parallel`: 8 experts and 3 redundant ones cannot be divided among 4 ranks; set "
            "`num_redundant_experts` to 4, or",
        ),
        (
            spec("Qwen3MoeForCausalLM", num_experts=8, **MOE),
            2,
            10,
            "option `num_redundant_experts`: 10 are more than copies of all 8 experts on all 2 ranks; at most 8",
        ),
    ],
)
def test_check_experts_indivisible_experts_are_refused(model, num_ranks, num_redundant, message):
    with pytest.raises(ConfigError) as error:
        check_experts(model, num_ranks=num_ranks, num_redundant=num_redundant)
    assert str(error.value).startswith(message)


def test_check_fits_whole_experts_are_not_cut():
    model = spec("Qwen3MoeForCausalLM", **(MOE | {"moe_intermediate_size": 15}))
    with pytest.raises(ConfigError, match="expert intermediate size 15"):
        check_fits(model, Mesh(tp_size=2))
    check_fits(model, Mesh(tp_size=2), has_whole_experts=True)
    check_experts(model, num_ranks=2, num_redundant=0)


def test_check_fits_divisible_model_is_accepted():
    for mesh in (Mesh(), Mesh(tp_size=32, pp_size=32), Mesh(tp_size=4, pp_size=5)):
        check_fits(spec(intermediate_size=64), mesh)
    check_fits(spec(num_attention_heads=8, num_key_value_heads=2, intermediate_size=16), Mesh(tp_size=8))
    check_fits(spec("Qwen3MoeForCausalLM", **MOE), Mesh(tp_size=4))


def test_load_model_indivisible_model_is_refused_before_weights_are_opened(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    (checkpoint / "model.safetensors").unlink()
    edit_config(checkpoint, num_hidden_layers=2)
    with pytest.raises(ConfigError, match="2 layers"):
        loaded(checkpoint, Mesh(pp_size=3))
