"""Every family on the kernels of NVIDIA GPUs, interpreted on a CPU, has transformers' logits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from checkpoints import make_checkpoint
from harness import random_prompt
from model_runs import PagedRun, load
from oracle import Oracle
from quantized_checkpoints import pack_mxfp4, write_fp8_checkpoint

from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.cuda.linear import CudaLinear
from eagleray.kernels.quantized import Fp8Weight, Mxfp4Weight
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.models import registry

EXACT = 5e-5

FAMILIES = {
    "llama": {"num_key_value_heads": 1},
    "qwen3": {},
    "mistral": {"sliding_window": 10},
    "qwen2": {},
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {"sliding_window": 10},
    "deepseek_v2": {},
    "deepseek_v3": {},
}
IN_GRID = ("llama", "mistral", "qwen2", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss")
"""Families with the kernels of others, and the one that takes longest."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(registry, "choose_backend", lambda device, model, *_: CudaBackend(model.dtype))


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=pytest.mark.grid) if each in IN_GRID else each for each in FAMILIES]
)
def test_forward_on_cuda_kernels_equals_transformers(family, tmp_path):
    layers = {"num_hidden_layers": 2}
    if family == "gpt_oss":
        layers["layer_types"] = ["sliding_attention", "full_attention"]
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False, **(FAMILIES[family] | layers))
    model, oracle = load(checkpoint), Oracle(checkpoint)
    prompts = {"a": random_prompt(0, 19, 384), "b": random_prompt(1, 6, 384)}
    run = PagedRun(model)
    for name, tokens in prompts.items():
        run.add(name, tokens)
    parts = [run.step(counts) for counts in ({"a": 13}, {"a": 5, "b": 5}, {"a": 1, "b": 1})]
    for name, tokens in prompts.items():
        found = torch.cat([part[name] for part in parts if name in part])
        torch.testing.assert_close(found, oracle.logits(tokens), atol=EXACT, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v2"])
def test_forward_on_cuda_kernels_in_float16_is_close_to_float32(family, tmp_path):
    """Hidden states are float32, and the inputs and results of products are float16. The tolerance is that of rounding,
    far below the logits, which reach 8."""
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False, num_hidden_layers=1)
    tokens = random_prompt(2, 9, 384)
    run = PagedRun(load(checkpoint, dtype="float16"))
    run.add("only", tokens)
    torch.testing.assert_close(run.run("only", 8), Oracle(checkpoint).logits(tokens), atol=0.1, rtol=0)


# ---- quantized weights, as they are stored


@pytest.mark.parametrize(
    ("family", "block"),
    [
        pytest.param("llama", (24, 128), marks=pytest.mark.grid),  # qwen3_moe has dense layers too
        ("qwen3_moe", (1, 512)),
        pytest.param("deepseek_v3", (16, 128), marks=pytest.mark.grid),
    ],
)
def test_forward_with_fp8_weights_equals_decoded_ones_in_plain_torch(family, block, tmp_path, monkeypatch):
    fields = {"num_hidden_layers": 2 if family == "deepseek_v3" else 1, "hidden_size": 160}
    small, decoded = write_fp8_checkpoint(tmp_path / "plain", family, tmp_path / "small", block, **fields)
    check_against_plain_torch(small, decoded, Fp8Weight, monkeypatch)


@pytest.mark.grid  # test_triton_grouped_linear.py multiplies by such weights
def test_forward_with_mxfp4_experts_equals_decoded_ones_in_plain_torch(tmp_path, monkeypatch):
    checkpoint = make_checkpoint(
        tmp_path, "gpt_oss", tokenizer=False, num_hidden_layers=1, layer_types=["full_attention"], hidden_size=160
    )
    pack_mxfp4(checkpoint)
    check_against_plain_torch(checkpoint, checkpoint, Mxfp4Weight, monkeypatch)


def check_against_plain_torch(directory, decoded, kind, monkeypatch):
    """Products of float32 vectors round nothing but sums."""
    tokens, packed = random_prompt(3, 20, 384), []

    def pack(self, *options, **named):
        packed.append(options[0])
        made(self, *options, **named)

    made = CudaLinear.__init__
    monkeypatch.setattr(CudaLinear, "__init__", pack)
    model = load(directory)
    num_plain = sum(isinstance(weight, torch.Tensor) for weight in packed)
    assert any(isinstance(weight, kind) for weight in packed)
    monkeypatch.setattr(registry, "choose_backend", lambda *_: TorchBackend())
    plain = load(decoded)
    assert plain.num_parameters == model.num_parameters and 0 < num_plain < len(packed)
    found, expected = (PagedRun(each) for each in (model, plain))
    for run in (found, expected):
        run.add("only", tokens)
    torch.testing.assert_close(found.run("only", 19), expected.run("only", 19), atol=4 * EXACT, rtol=0)


def test_model_on_a_cpu_imports_no_triton(tmp_path):
    make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from harness import LocalEngine\n"
        "with LocalEngine(Path(sys.argv[1]), executor='in-process') as engine:\n"
        "    engine.add('a', [1, 2, 3], temperature=1.0, max_tokens=3)\n"
        "    assert len(engine.run()['a'].token_ids) == 3\n"
        "print([name for name in ('triton', 'transformers') if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True, env=environment
    )
    assert run.stdout.strip().endswith("[]")


def test_forward_with_fp8_cache_is_close_to_the_models(tmp_path, monkeypatch):
    """Cached numbers have three bits, so logits, whose standard deviation is 1.6, differ by about 0.25."""
    monkeypatch.setattr(CudaBackend, "serves_cache", lambda *_, of_latents: True)
    checkpoint = make_checkpoint(tmp_path, "qwen3", tokenizer=False, num_hidden_layers=1)
    logits, tokens = {}, random_prompt(0, 20, 384)
    for cache_dtype in ("auto", "fp8"):
        run = PagedRun(load(checkpoint, kv_cache_dtype=cache_dtype))
        run.add("only", tokens)
        logits[cache_dtype] = torch.cat([run.step({"only": count})["only"] for count in (13, 6, 1)])
    assert {layer.dtype for layer in run.cache.layers} == {torch.float8_e4m3fn}
    assert 0 < (logits["fp8"] - logits["auto"]).std() < 0.3 * logits["auto"].std()
