"""What a rank has of a model: its share of the weights, what is read of the files, and what cannot be divided."""

from __future__ import annotations

from dataclasses import replace
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
from eagleray.models.dummy import BLOCK, DummyWeights
from eagleray.models.loading import CheckpointWeights
from eagleray.models.registry import FAMILIES
from eagleray.models.sharding import (
    check_experts,
    check_fits,
    features,
    kv_heads,
    num_kv_heads,
    padded_shard,
    shard,
)
from eagleray.models.weights import Cut
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.groups import Groups
from eagleray.parallel.mesh import Mesh
from eagleray.worker.memory import step_bytes

CPU = torch.device("cpu")


def ranks(size: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(rank=rank, size=size) for rank in range(size)]


class Loading:
    """A group that is only loaded with."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.size = mesh.tp_rank, mesh.tp_size
        self.bytes_sent = {}

    def close(self) -> None:
        pass


def loaded(checkpoint, mesh: Mesh, **options):
    tp = Loading(mesh)
    return load(checkpoint, groups=Groups(mesh, tp, None, ExpertGroup(tp)), **options)


@given(size=st.integers(1, 8), count=st.integers(1, 100))
def test_shares_of_a_padded_count_cover_it_in_order(size, count):
    shares = [padded_shard(count, tp) for tp in ranks(size)]
    assert len({len(share) for share in shares}) == 1
    covered = [index for share in shares for index in share]
    assert covered == list(range(len(covered)))
    assert count <= len(covered) < count + size


@given(size=st.sampled_from([1, 2, 4, 8]), kv=st.sampled_from([1, 2, 4, 8]), group=st.sampled_from([1, 2, 8]))
def test_every_rank_has_the_key_heads_of_its_query_heads(size, kv, group):
    heads = kv * group
    if heads % size == 0:
        for tp in ranks(size):
            needed = {head // group for head in shard(heads, tp)}
            assert needed == set(kv_heads(kv, tp))
            assert len(kv_heads(kv, tp)) == num_kv_heads(kv, size)


def test_features_of_heads():
    assert features(range(2, 4), 16) == range(32, 64)


@pytest.mark.parametrize("shape", [(6, 8), (8,), (BLOCK // 100, 400)])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_parts_of_dummy_weights_are_parts_of_the_whole(shape, name):
    weights = DummyWeights(dtype=torch.float32, device=CPU, seed=1)
    whole = weights.load(name, shape)
    assert torch.equal(weights.load(name, shape, Cut(0, range(3, 5))), whole[3:5])
    if len(shape) == 2:
        assert torch.equal(weights.load(name, shape, Cut(1, range(2, 7))), whole[:, 2:7])
        both = weights.load_concatenated([name, name], [shape, shape], [Cut(0, range(1)), None])
        assert torch.equal(both, torch.cat([whole[:1], whole]))
    assert not torch.equal(weights.load("another", shape), whole)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_parts_of_a_checkpoint(kind, tmp_path):
    whole, other = torch.randn(6, 8).to(kind), torch.randn(4, 8).to(kind)
    save_file({"a": whole, "b": other}, tmp_path / "model.safetensors")
    with CheckpointWeights(tmp_path, dtype=torch.float32, device=CPU, on_progress=None) as weights:
        shapes = [(6, 8), (4, 8)]
        assert torch.equal(weights.load("a", (6, 8), Cut(0, range(2, 5))), whole[2:5].float())
        assert torch.equal(weights.load("a", (6, 8), Cut(1, range(2, 5))), whole[:, 2:5].float())
        assert weights.load("a", (6, 8), Cut(0, range(6, 6))).shape == (0, 8)
        rows = weights.load_concatenated(["a", "b"], shapes, [Cut(0, range(2)), Cut(0, range(3, 4))])
        assert torch.equal(rows, torch.cat([whole[:2], other[3:]]).float())
        columns = weights.load_concatenated(["a", "b"], shapes, [Cut(1, range(4, 8))] * 2)
        assert torch.equal(columns, torch.cat([whole, other])[:, 4:].float())
        assert weights.num_parameters == 24 + 18 + 0 + 24 + 40
        with pytest.raises(CheckpointError, match=r"tensor 'a' has the shape \[6, 8\], but .* implies \[6, 4\]"):
            weights.load("a", (6, 4), Cut(1, range(2)))


def test_ranks_have_all_weights_between_them(tmp_path):
    """Nothing but norms and the router is there twice; a tied weight is in the first and in the last stage."""
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    whole = load(checkpoint)
    norms = (2 * whole.spec.num_layers + 1) * whole.spec.hidden_size
    parts = [loaded(checkpoint, Mesh(rank=rank, tp_size=2, pp_size=2)) for rank in range(4)]
    assert sum(part.num_parameters for part in parts) == whole.num_parameters + norms
    assert [part.num_local_layers for part in parts] == [2, 2, 1, 1]
    assert {part.num_local_kv_heads for part in parts} == {whole.spec.num_kv_heads // 2}
    assert all(part.spec == whole.spec for part in parts)
    shape = parts[0].cache_shape(16)
    assert (shape.num_layers, shape.block) == (2, (1, 2, 16 * whole.spec.head_dim))


@pytest.mark.parametrize(
    "place", [Mesh(rank=1, tp_size=2), Mesh(rank=0, pp_size=3), Mesh(rank=3, tp_size=2, pp_size=2)]
)
def test_progress_is_that_of_the_ranks_share(tmp_path, place):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    told = []
    loaded(checkpoint, place, on_progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    ((total),) = {total for _, total in told}
    size = (checkpoint / "model.safetensors").stat().st_size
    assert 0.5 * size / place.world_size < total < 1.5 * size / place.world_size
    assert 0.8 * total < told[-2][0] <= total
    assert told[-1] == (total, total)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_no_stage_has_a_place_for_is_left_over(tmp_path, rank):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    tensors = load_file(checkpoint / "model.safetensors")
    for extra in ("model.other", "model.layers.0.mlp.router", "model.layers.2.mlp.router", "model.layers.3.new"):
        save_file(tensors | {extra: torch.zeros(1)}, checkpoint / "model.safetensors")
        stages = [0, 1] if extra in ("model.other", "model.layers.3.new") else [int("2" in extra)]
        if rank in stages:
            with pytest.raises(CheckpointError, match=f"no place for {extra}"):
                loaded(checkpoint, Mesh(rank=rank, pp_size=2))
        else:
            loaded(checkpoint, Mesh(rank=rank, pp_size=2))


def test_a_wrong_shape_is_said_of_the_whole_tensor(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file(tensors | {name: torch.zeros(64, 32)}, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        loaded(checkpoint, Mesh(rank=1, tp_size=2))
    assert f"tensor '{name}' has the shape [64, 32], but config.json implies [64, 64]" in str(error.value)


def spec(architecture: str = "LlamaForCausalLM", **fields):
    return FAMILIES[architecture].read_spec(ConfigFile(None, {"head_dim": 128} | fields))


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
def test_what_cannot_be_divided_is_refused(model, mesh, message):
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
def test_experts_that_cannot_be_divided_are_refused(model, num_ranks, num_redundant, message):
    with pytest.raises(ConfigError) as error:
        check_experts(model, num_ranks=num_ranks, num_redundant=num_redundant)
    assert str(error.value).startswith(message)


def test_whole_experts_need_not_be_cut():
    model = spec("Qwen3MoeForCausalLM", **(MOE | {"moe_intermediate_size": 15}))
    with pytest.raises(ConfigError, match="expert intermediate size 15"):
        check_fits(model, Mesh(tp_size=2))
    check_fits(model, Mesh(tp_size=2), has_whole_experts=True)
    check_experts(model, num_ranks=2, num_redundant=0)


def test_what_can_be_divided():
    for mesh in (Mesh(), Mesh(tp_size=32, pp_size=32), Mesh(tp_size=4, pp_size=5)):
        check_fits(spec(intermediate_size=64), mesh)
    check_fits(spec(num_attention_heads=8, num_key_value_heads=2, intermediate_size=16), Mesh(tp_size=8))
    check_fits(spec("Qwen3MoeForCausalLM", **MOE), Mesh(tp_size=4))


def test_the_refusal_comes_before_the_weights_are_looked_for(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    (checkpoint / "model.safetensors").unlink()
    edit_config(checkpoint, num_hidden_layers=2)
    with pytest.raises(ConfigError, match="2 layers"):
        loaded(checkpoint, Mesh(pp_size=3))


def test_a_step_takes_less_on_a_rank_than_on_all():
    model = replace(spec(), vocab_size=100_000)

    def needed(**place: int) -> int:
        return step_bytes(model, torch.bfloat16, num_tokens=512, num_logits=64, mesh=Mesh(**place))

    whole = step_bytes(model, torch.bfloat16, num_tokens=512, num_logits=64)
    assert whole == needed()
    assert needed(rank=1, tp_size=2) < needed(rank=0, tp_size=2) < whole
    assert needed(rank=0, pp_size=2) < whole == needed(rank=1, pp_size=2)


def test_a_step_takes_more_where_the_rows_of_other_engines_come():
    model = spec("Qwen3MoeForCausalLM", **MOE)
    alone, two, four = (
        step_bytes(model, torch.bfloat16, num_tokens=512, num_logits=64, num_exchanging=engines)
        for engines in (0, 2, 4)
    )
    assert alone < two < four
    assert four - alone == 2 * (two - alone)
