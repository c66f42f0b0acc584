"""Every family on the kernels of NVIDIA GPUs, interpreted on a CPU, has transformers' logits."""

from __future__ import annotations

import pytest
import torch
from checkpoints import make_checkpoint
from harness import random_prompt
from model_runs import PagedRun, load
from oracle import Oracle

from eagleray.kernels.cuda.backend import CudaBackend
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


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(registry, "choose_backend", lambda device, model, *_: CudaBackend(model.dtype))


@pytest.mark.parametrize("family", FAMILIES)
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
