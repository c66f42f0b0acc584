from __future__ import annotations

import json

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from harness import random_prompt
from model_runs import load, logits_in_chunks

from eagleray.kernels.quantized import Fp8Weight
from eagleray.models.dummy import BLOCK, FP8_SCALE, DummyWeights
from eagleray.models.weights import Cut, Param, Part

CPU = torch.device("cpu")
ROWS, COLUMNS = Cut(0, range(3, 5)), Cut(1, range(130, 270))
PROMPT = random_prompt(0, 60, 384)


@pytest.mark.parametrize("shape", [(6, 8), (8,), (BLOCK // 100, 400)])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_dummy_weights_cut_equals_part_of_whole(shape, name):
    weights = DummyWeights(dtype=torch.float32, device=CPU, seed=1)
    whole = weights.load(Param(name, shape))
    assert torch.equal(weights.load(Param(name, shape, Cut(0, range(3, 5)))), whole[3:5])
    if len(shape) == 2:
        assert torch.equal(weights.load(Param(name, shape, Cut(1, range(2, 7)))), whole[:, 2:7])
        both = weights.load_concatenated([Param(name, shape, Cut(0, range(1))), Param(name, shape)])
        assert torch.equal(both, torch.cat([whole[:1], whole]))
    assert not torch.equal(weights.load(Param("another", shape)), whole)


@pytest.mark.parametrize("shape", [(6, 300), (BLOCK // 100, 400)])
def test_dummy_weights_fp8_cut_equals_part_of_whole(shape):
    weights = DummyWeights(dtype=torch.bfloat16, device=CPU, seed=1, has_fp8=True)
    whole = weights.load_weight([Param("a", shape)])
    assert isinstance(whole, Fp8Weight) and whole.shape == shape
    decoded = whole.dequantize(torch.float32)
    rows, columns = (weights.load_weight([Param("a", shape, cut)] * 2) for cut in (ROWS, COLUMNS))
    assert torch.equal(rows.dequantize(torch.float32), decoded[3:5].repeat(2, 1))
    assert torch.equal(columns.dequantize(torch.float32), decoded[:, 130:270].repeat(2, 1))
    plain = DummyWeights(dtype=torch.float32, device=CPU, seed=1).load(Param("a", shape))
    torch.testing.assert_close(decoded, plain, rtol=2**-4, atol=FP8_SCALE * 2**-9)


def test_dummy_weights_bytes_depend_on_name_part_and_seed():
    def draw(name: str = "a_blocks", index: int = 0, seed: int = 0) -> torch.Tensor:
        weights = DummyWeights(dtype=torch.bfloat16, device=CPU, seed=seed)
        drawn = weights.load(Param(name, (2, 30, 3, 16), Part(index), torch.uint8))
        assert drawn.shape == (30, 3, 16)
        return drawn

    assert torch.equal(draw(), draw())
    assert len(draw().unique()) > 200
    for other in (draw("b_blocks"), draw(index=1), draw(seed=1)):
        assert not torch.equal(draw(), other)


@pytest.mark.parametrize("family", FAMILIES)
def test_load_model_dummy_needs_no_files_and_depends_on_seed(family, tmp_path):
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False)
    num_parameters = load(checkpoint).num_parameters
    (checkpoint / "model.safetensors").unlink()
    model = load(checkpoint, load_format="dummy")
    assert model.num_parameters == num_parameters
    logits = logits_in_chunks(model, PROMPT, 60)
    assert logits.isfinite().all()
    assert logits.std() > 0.01
    assert torch.equal(logits, logits_in_chunks(load(checkpoint, load_format="dummy", seed=0), PROMPT, 60))
    assert not torch.equal(logits, logits_in_chunks(load(checkpoint, load_format="dummy", seed=1), PROMPT, 60))


def test_load_model_large_dummy_tensors_are_filled(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 20_000, "hidden_size": 64, "num_hidden_layers": 1,
              "intermediate_size": 64, "num_attention_heads": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    logits = logits_in_chunks(load(tmp_path, load_format="dummy"), [1, 2, 3], 3)
    assert logits.shape == (3, 20_000)
    assert (logits.abs() > 0).float().mean() > 0.99
