"""Every family and variant has transformers' logits, for any chunks of the prompt and any batch."""

from __future__ import annotations

import pytest
import torch
import transformers
from checkpoints import make_checkpoint
from harness import random_prompt
from model_runs import PagedRun, load, logits_in_chunks
from oracle import Oracle

from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.torch.onednn import OneDnnBackend
from eagleray.models import registry

EXACT = 5e-5
"""Tolerance for logits of at most about 8 that are computed in float32 in another order."""

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
YARN_DETAILS = {
    "rope_theta": 100.0,
    "beta_fast": 3.0,
    "beta_slow": 0.8,
    "truncate": False,
    "mscale": 0.7,
    "mscale_all_dim": 0.3,
}
SCALED = {"rope_theta": 10_000.0, "original_max_position_embeddings": 32}

VARIANTS = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied, one key head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, as many key heads": ("llama", {"num_key_value_heads": 4, "head_dim": 24}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3 | SCALED}),
    "llama, yarn": ("llama", {"rope_parameters": YARN | SCALED}),
    "llama, yarn in detail": ("llama", {"rope_parameters": YARN | SCALED | YARN_DETAILS}),
    "qwen3, yarn with its factor": ("qwen3", {"rope_parameters": YARN | SCALED | {"attention_factor": 1.3}}),
    "mistral, window": ("mistral", {"sliding_window": 24}),
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows above": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "tie_word_embeddings": False},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases, windows by layer": (
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, some layers dense": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen3_moe, every second layer": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 33, "attention_bias": True},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral, tied, window": ("mixtral", {"tie_word_embeddings": True, "sliding_window": 30}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, one key head": ("gpt_oss", {"num_key_value_heads": 1}),
    "gpt_oss, clamped more": ("gpt_oss", {"head_dim": 24, "swiglu_limit": 0.5}),
}  # fmt: skip


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tmp_path_factory):
    family, overrides = VARIANTS[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), family, tokenizer=False, **overrides)


@pytest.fixture(params=["native", "plain"], autouse=True)
def kernels(request, monkeypatch):
    """Run with our own kernels, and without."""
    choose = registry.choose_backend

    def made(*arguments, **options):
        chosen = choose(*arguments, **options)
        assert isinstance(chosen, CpuBackend)
        return chosen if request.param == "native" else OneDnnBackend()

    monkeypatch.setattr(registry, "choose_backend", made)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(seed, length, 384)


def test_forward_prompt_in_chunks_equals_transformers(checkpoint):
    model, expected = load(checkpoint), Oracle(checkpoint).logits(prompt(90))
    for chunk in (90, 16, 1):
        torch.testing.assert_close(logits_in_chunks(model, prompt(90), chunk), expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_forward_long_prompt_equals_transformers(family, tmp_path):
    """The prompt is so long that attention computes the queries in pieces; Mistral has a window of 64."""
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False)
    model, expected = load(checkpoint), Oracle(checkpoint).logits(prompt(620))
    for chunk in (620, 300):
        torch.testing.assert_close(logits_in_chunks(model, prompt(620), chunk), expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize("family", ["mistral", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"])
def test_forward_mixed_batch_equals_rows_alone(family, tmp_path):
    """Decodes of very different lengths, a prompt that starts and one that continues do not affect each other."""
    model = load(make_checkpoint(tmp_path, family, tokenizer=False))
    lengths = {"long": 400, "middle": 120, "short": 3, "first token": 1, "starts": 70, "goes on": 150}
    computed = {"long": 399, "middle": 119, "short": 2, "goes on": 60}
    run = PagedRun(model)
    for seed, (name, length) in enumerate(lengths.items()):
        run.add(name, prompt(length, seed))
    run.step(computed)
    together = run.step({name: length - computed.get(name, 0) for name, length in lengths.items()})
    for seed, (name, length) in enumerate(lengths.items()):
        alone = logits_in_chunks(model, prompt(length, seed), length)[computed.get(name, 0) :]
        torch.testing.assert_close(together[name], alone, atol=EXACT, rtol=0)


def test_forward_dynamic_rope_grows_with_the_sequence(tmp_path):
    """The reference is transformers' generation: a prompt within the original length, then single tokens far beyond
    it."""
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10_000.0}
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False, max_position_embeddings=40, rope_parameters=rope)
    tokens, oracle = prompt(100), Oracle(checkpoint).model
    cache = transformers.DynamicCache(config=oracle.config)  # the fourth argument, whose name differs by release
    with torch.inference_mode():
        parts = [tokens[:40], *([token] for token in tokens[40:])]
        expected = [oracle(torch.tensor([part]), None, None, cache).logits[0] for part in parts]
    model = load(checkpoint)
    assert model.spec.max_model_len == 120
    for chunk in (100, 16, 1):  # transformers rounds these frequencies to float32 earlier
        torch.testing.assert_close(logits_in_chunks(model, tokens, chunk), torch.cat(expected), atol=1e-4, rtol=0)


def test_load_model_sharded_checkpoint_equals_transformers(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False, max_shard_size="200KB")
    assert len(list(checkpoint.glob("model-*.safetensors"))) > 3
    expected = Oracle(checkpoint).logits(prompt(20))
    torch.testing.assert_close(logits_in_chunks(load(checkpoint), prompt(20), 20), expected, atol=EXACT, rtol=0)
