"""What is wrong with a checkpoint is said with the file, the tensor, what was found and what is expected."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from checkpoints import edit_config, make_checkpoint
from model_runs import load
from safetensors.torch import load_file, save_file

from eagleray.errors import CheckpointError, ConfigError

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("whole"), "llama", tokenizer=False)


@pytest.fixture(scope="module")
def made_in_shards(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("shards"), "llama", tokenizer=False, max_shard_size="200KB")


@pytest.fixture
def checkpoint(made, tmp_path):
    return shutil.copytree(made, tmp_path / "checkpoint")


@pytest.fixture
def sharded(made_in_shards, tmp_path):
    return shutil.copytree(made_in_shards, tmp_path / "sharded")


def edit_weights(checkpoint, edit) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    edit(tensors)
    save_file(tensors, checkpoint / "model.safetensors")


def refusal(checkpoint, **options) -> str:
    with pytest.raises(CheckpointError) as error:
        load(checkpoint, **options)
    return str(error.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_of_the_weights_where_config_json_has_none(tmp_path, dtype):
    """As that of the published gpt-oss."""
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False, dtype=dtype)
    edit_config(checkpoint, "dtype")
    assert load(checkpoint, dtype="auto").dtype == getattr(torch, dtype)
    assert load(checkpoint, dtype="auto", load_format="dummy").dtype == torch.float32
    assert load(checkpoint, dtype="float32").dtype == torch.float32


def test_progress_reaches_the_size_of_the_files(checkpoint):
    told = []
    load(checkpoint, on_progress=lambda done, total: told.append((done, total)))
    assert len(told) > 20
    assert told == sorted(told)
    size = (checkpoint / "model.safetensors").stat().st_size
    assert {total for _, total in told} == {size}
    assert told[-1] == (size, size)
    assert told[-2][0] > 0.9 * size


def test_the_files_are_not_needed_after_loading(checkpoint):
    model = load(checkpoint)
    before = model.logits(torch.ones(1, 64))
    path = checkpoint / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(model.logits(torch.ones(1, 64)), before)


def test_no_config(checkpoint):
    (checkpoint / "config.json").unlink()
    assert "config.json: not found" in refusal(checkpoint)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff\xfe"])
def test_a_damaged_config(checkpoint, text):
    (checkpoint / "config.json").write_text(text, encoding="latin-1")
    message = refusal(checkpoint)
    assert str(checkpoint / "config.json") in message
    assert "JSON" in message


def test_no_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    message = refusal(checkpoint)
    assert "neither model.safetensors nor model.safetensors.index.json" in message
    assert str(checkpoint) in message


def test_a_missing_tensor(checkpoint):
    edit_weights(checkpoint, lambda tensors: tensors.pop(Q_PROJ))
    message = refusal(checkpoint)
    assert f"tensor '{Q_PROJ}' of shape [64, 64] is missing" in message
    assert str(checkpoint / "model.safetensors") in message


def test_a_tensor_of_another_shape(checkpoint):
    edit_weights(checkpoint, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 32)}))
    message = refusal(checkpoint)
    assert message.startswith(str(checkpoint / "model.safetensors"))
    assert f"tensor '{Q_PROJ}' has the shape [64, 32], but config.json implies [64, 64]" in message


def test_a_tensor_of_another_kind(checkpoint):
    edit_weights(checkpoint, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}))
    assert f"tensor '{Q_PROJ}' is stored as I8; supported are F32, F16, BF16" in refusal(checkpoint)


def test_tensors_that_nobody_takes(checkpoint):
    extra = {f"model.layers.{layer}.mlp.router": torch.zeros(1) for layer in range(5)}
    edit_weights(checkpoint, lambda tensors: tensors.update(extra))
    message = refusal(checkpoint)
    assert message.startswith(str(checkpoint / "model.safetensors"))
    assert "no place for model.layers.0.mlp.router, model.layers.1.mlp.router, model.layers.2.mlp.router" in message
    assert "and 2 more" in message


def test_fewer_layers_than_the_weights_have(checkpoint):
    edit_config(checkpoint, num_hidden_layers=2)
    assert "no place for model.layers.2." in refusal(checkpoint)


def test_tables_of_old_checkpoints_and_a_tied_head_are_ignored(checkpoint):
    edit_config(checkpoint, tie_word_embeddings=True)
    edit_weights(
        checkpoint, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    )
    assert load(checkpoint).spec.tie_embeddings


@pytest.mark.parametrize("keep", [0, 5, 1000, 100_000])
def test_a_truncated_file(checkpoint, keep):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    message = refusal(checkpoint)
    assert message.startswith(f"{path}: is not a complete safetensors file")


def test_a_damaged_header(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"x" * 1000 + path.read_bytes()[1008:])
    assert refusal(checkpoint).startswith(f"{path}: is not a complete safetensors file")


def test_a_missing_shard(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{shard}: not found, but {sharded / 'model.safetensors.index.json'} names it" in refusal(sharded)


def test_a_truncated_shard(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert refusal(sharded).startswith(f"{shard}: is not a complete safetensors file")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON: it is nested too deeply"),
        ("[]", "must hold a JSON object"),
        ("{}", "is not an index of safetensors files"),
        ('{"weight_map": []}', "is not an index of safetensors files"),
        ('{"weight_map": {"a": ["b"]}}', "is not an index of safetensors files"),
        ('{"weight_map": {}}', "its `weight_map` names no file"),
    ],
)
def test_a_damaged_index(sharded, text, said):
    (sharded / "model.safetensors.index.json").write_text(text)
    assert refusal(sharded).startswith(f"{sharded / 'model.safetensors.index.json'}: {said}")


@pytest.mark.parametrize("name", ["x" * 5000, "a\u0000b", ".", "/dev/null"])
def test_an_index_that_names_what_is_no_file(sharded, name):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {Q_PROJ: name}}))
    assert "not found, but" in refusal(sharded)


@pytest.mark.parametrize("header", [b"[" * 100_000, b"{" * 100, b"\xff" * 100, b'{"a":' * 50_000, b"{}"])
def test_a_header_of_nonsense(checkpoint, header):
    (checkpoint / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert len(refusal(checkpoint)) < 1000


def test_more_layers_than_the_files_hold_are_told_before_a_weight_is_read(checkpoint):
    edit_config(checkpoint, num_hidden_layers=8000)
    told = []
    message = refusal(checkpoint, on_progress=lambda done, total: told.append(done))
    assert "`num_hidden_layers` is 8000, but the weight files beside it have no tensor of layer 7999" in message
    assert told == []


@pytest.mark.parametrize(
    "fields", [{"hidden_size": 2**20}, {"intermediate_size": 2**24}, {"vocab_size": 2**23}, {"head_dim": 2**20}]
)
def test_more_weights_than_the_files_hold_are_told_before_one_is_read(checkpoint, fields):
    edit_config(checkpoint, **fields)
    assert "parameters, but the weight files beside it hold 1" in refusal(checkpoint)


def test_a_tensor_is_not_allocated_before_its_shape_is_known_to_fit(checkpoint, monkeypatch):
    edit_config(checkpoint, intermediate_size=97)
    allocated = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda shape, **kwargs: allocated.append(tuple(shape)) or empty(shape, **kwargs)
    )
    assert "config.json implies [97, 64]" in refusal(checkpoint)
    assert not [shape for shape in allocated if 97 in shape or 194 in shape]


def test_weights_that_can_never_fit_into_the_memory_are_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"take .* GiB of a worker as float32, but there are 0\.0 GiB in all"):
        load(checkpoint, total_memory=100_000)
    load(checkpoint, total_memory=2**30)


@pytest.mark.parametrize("fields", [{"hidden_size": 2**20}, {"num_hidden_layers": 8000, "intermediate_size": 2**20}])
def test_dummy_weights_that_can_never_fit_into_the_memory_are_refused(checkpoint, fields):
    edit_config(checkpoint, **fields)
    with pytest.raises(ConfigError, match="`tensor_parallel_size`"):
        load(checkpoint, load_format="dummy", total_memory=2**33)


def test_a_tensor_missing_from_every_shard(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shard = sharded / index["weight_map"][Q_PROJ]
    tensors = load_file(shard)
    del tensors[Q_PROJ]
    save_file(tensors, shard)
    message = refusal(sharded)
    assert f"tensor '{Q_PROJ}' of shape [64, 64] is missing" in message
    assert str(shard) in message
