"""Loading of checkpoints. Errors name the file, the tensor, the found and the expected value."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from checkpoints import edit_config, make_checkpoint
from model_runs import load
from safetensors.torch import load_file, save_file

from eagleray.errors import CheckpointError, ConfigError
from eagleray.models.loading import CheckpointWeights
from eagleray.models.stored_weights import WeightRules
from eagleray.models.weights import Cut, Param, Part

CPU = torch.device("cpu")
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
def test_load_model_dtype_absent_in_config_is_that_of_the_weights(tmp_path, dtype):
    """The published gpt-oss has no dtype in config.json."""
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False, dtype=dtype)
    edit_config(checkpoint, "dtype")
    assert load(checkpoint, dtype="auto").dtype == getattr(torch, dtype)
    assert load(checkpoint, dtype="auto", load_format="dummy").dtype == torch.float32
    assert load(checkpoint, dtype="float32").dtype == torch.float32


def test_load_model_progress_reaches_the_size_of_the_files(checkpoint):
    reported = []
    load(checkpoint, on_progress=lambda done, total: reported.append((done, total)))
    assert len(reported) > 20
    assert reported == sorted(reported)
    size = (checkpoint / "model.safetensors").stat().st_size
    assert {total for _, total in reported} == {size}
    assert reported[-1] == (size, size)
    assert reported[-2][0] > 0.9 * size


def test_load_model_files_are_not_needed_afterwards(checkpoint):
    model = load(checkpoint)
    before = model.logits(torch.ones(1, 64))
    path = checkpoint / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(model.logits(torch.ones(1, 64)), before)


def test_load_model_missing_config_is_refused(checkpoint):
    (checkpoint / "config.json").unlink()
    assert "config.json: not found" in refusal(checkpoint)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff\xfe"])
def test_load_model_damaged_config_is_refused(checkpoint, text):
    (checkpoint / "config.json").write_text(text, encoding="latin-1")
    message = refusal(checkpoint)
    assert str(checkpoint / "config.json") in message
    assert "JSON" in message


def test_load_model_missing_weights_are_refused(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    message = refusal(checkpoint)
    assert "neither model.safetensors nor model.safetensors.index.json" in message
    assert str(checkpoint) in message


def test_load_model_missing_tensor_is_refused(checkpoint):
    edit_weights(checkpoint, lambda tensors: tensors.pop(Q_PROJ))
    message = refusal(checkpoint)
    assert f"tensor '{Q_PROJ}' of shape [64, 64] is missing" in message
    assert str(checkpoint / "model.safetensors") in message


def test_load_model_tensor_of_another_shape_is_refused(checkpoint):
    edit_weights(checkpoint, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 32)}))
    message = refusal(checkpoint)
    assert message.startswith(str(checkpoint / "model.safetensors"))
    assert f"tensor '{Q_PROJ}' has the shape [64, 32], but config.json implies [64, 64]" in message


def test_load_model_tensor_of_another_dtype_is_refused(checkpoint):
    edit_weights(checkpoint, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}))
    assert f"tensor '{Q_PROJ}' is stored as I8; supported are F32, F16, BF16" in refusal(checkpoint)


def test_load_model_unknown_tensors_are_refused(checkpoint):
    extra = {f"model.layers.{layer}.mlp.router": torch.zeros(1) for layer in range(5)}
    edit_weights(checkpoint, lambda tensors: tensors.update(extra))
    message = refusal(checkpoint)
    assert message.startswith(str(checkpoint / "model.safetensors"))
    assert "no place for model.layers.0.mlp.router, model.layers.1.mlp.router, model.layers.2.mlp.router" in message
    assert "and 2 more" in message


def test_load_model_fewer_layers_than_stored_is_refused(checkpoint):
    edit_config(checkpoint, num_hidden_layers=2)
    assert "no place for model.layers.2." in refusal(checkpoint)


def test_load_model_old_tables_and_tied_head_are_ignored(checkpoint):
    edit_config(checkpoint, tie_word_embeddings=True)
    edit_weights(
        checkpoint, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    )
    assert load(checkpoint).spec.tie_embeddings


@pytest.mark.parametrize("keep", [0, 5, 1000, 100_000])
def test_load_model_truncated_file_is_refused(checkpoint, keep):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    message = refusal(checkpoint)
    assert message.startswith(f"{path}: is not a complete safetensors file")
    assert f'`rm "$(realpath {path})"`' in message


def test_load_model_damaged_header_is_refused(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"x" * 1000 + path.read_bytes()[1008:])
    assert refusal(checkpoint).startswith(f"{path}: is not a complete safetensors file")


def test_load_model_missing_shard_is_refused(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{shard}: not found, but {sharded / 'model.safetensors.index.json'} names it" in refusal(sharded)


def test_load_model_truncated_shard_is_refused(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert refusal(sharded).startswith(f"{shard}: is not a complete safetensors file")


@pytest.mark.parametrize(
    ("text", "problem"),
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
def test_load_model_damaged_index_is_refused(sharded, text, problem):
    (sharded / "model.safetensors.index.json").write_text(text)
    assert refusal(sharded).startswith(f"{sharded / 'model.safetensors.index.json'}: {problem}")


@pytest.mark.parametrize("name", ["x" * 5000, "a\u0000b", ".", "/dev/null"])
def test_load_model_index_of_invalid_file_name_is_refused(sharded, name):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {Q_PROJ: name}}))
    assert "not found, but" in refusal(sharded)


@pytest.mark.parametrize("header", [b"[" * 100_000, b"{" * 100, b"\xff" * 100, b'{"a":' * 50_000, b"{}"])
def test_load_model_nonsense_header_is_refused_briefly(checkpoint, header):
    (checkpoint / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert len(refusal(checkpoint)) < 1000


def test_load_model_more_layers_than_stored_is_refused_before_reading(checkpoint):
    edit_config(checkpoint, num_hidden_layers=8000)
    reported = []
    message = refusal(checkpoint, on_progress=lambda done, total: reported.append(done))
    assert "`num_hidden_layers` is 8000, but the weight files beside it have no tensor of layer 7999" in message
    assert reported == []


@pytest.mark.parametrize(
    "fields", [{"hidden_size": 2**20}, {"intermediate_size": 2**24}, {"vocab_size": 2**23}, {"head_dim": 2**20}]
)
def test_load_model_more_parameters_than_stored_is_refused_before_reading(checkpoint, fields):
    edit_config(checkpoint, **fields)
    assert "parameters, but the weight files beside it hold 1" in refusal(checkpoint)


def test_load_model_wrong_shape_is_refused_before_allocation(checkpoint, monkeypatch):
    edit_config(checkpoint, intermediate_size=97)
    allocated = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda shape, **kwargs: allocated.append(tuple(shape)) or empty(shape, **kwargs)
    )
    assert "config.json implies [97, 64]" in refusal(checkpoint)
    assert not [shape for shape in allocated if 97 in shape or 194 in shape]


def test_load_model_weights_beyond_memory_are_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"take .* GiB of a worker as float32, but there are 0\.0 GiB in all"):
        load(checkpoint, total_memory=100_000)
    load(checkpoint, total_memory=2**30)


@pytest.mark.parametrize("fields", [{"hidden_size": 2**20}, {"num_hidden_layers": 8000, "intermediate_size": 2**20}])
def test_load_model_dummy_weights_beyond_memory_are_refused(checkpoint, fields):
    edit_config(checkpoint, **fields)
    with pytest.raises(ConfigError, match="`tensor_parallel_size`"):
        load(checkpoint, load_format="dummy", total_memory=2**33)


def test_load_model_tensor_missing_in_all_shards_is_refused(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shard = sharded / index["weight_map"][Q_PROJ]
    tensors = load_file(shard)
    del tensors[Q_PROJ]
    save_file(tensors, shard)
    message = refusal(sharded)
    assert f"tensor '{Q_PROJ}' of shape [64, 64] is missing" in message
    assert str(shard) in message


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_checkpoint_weights_cut_equals_part_of_whole(kind, tmp_path):
    whole, other = torch.randn(6, 8).to(kind), torch.randn(4, 8).to(kind)
    save_file({"a": whole, "b": other}, tmp_path / "model.safetensors")
    with CheckpointWeights(tmp_path, WeightRules(dtype=torch.float32, device=CPU)) as weights:

        def pair(first: Cut, second: Cut) -> list[Param]:
            return [Param("a", (6, 8), first), Param("b", (4, 8), second)]

        assert torch.equal(weights.load(Param("a", (6, 8), Cut(0, range(2, 5)))), whole[2:5].float())
        assert torch.equal(weights.load(Param("a", (6, 8), Cut(1, range(2, 5)))), whole[:, 2:5].float())
        assert torch.equal(weights.load(Param("a", (6, 8), Part(4))), whole[4].float())
        assert weights.load(Param("a", (6, 8), Cut(0, range(6, 6)))).shape == (0, 8)
        rows = weights.load_concatenated(pair(Cut(0, range(2)), Cut(0, range(3, 4))))
        assert torch.equal(rows, torch.cat([whole[:2], other[3:]]).float())
        columns = weights.load_concatenated(pair(*[Cut(1, range(4, 8))] * 2))
        assert torch.equal(columns, torch.cat([whole, other])[:, 4:].float())
        with pytest.raises(CheckpointError, match=r"tensor 'a' has the shape \[6, 8\], but .* implies \[6, 4\]"):
            weights.load(Param("a", (6, 4), Cut(1, range(2))))
