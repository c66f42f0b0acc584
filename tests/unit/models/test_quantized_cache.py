"""Models with a cache of 8 bits: close to the cache in the model's dtype, in half its memory, with the same bits for a
token however it is computed."""

from __future__ import annotations

import pytest
import torch
from checkpoints import make_checkpoint
from harness import LocalEngine, random_prompt
from model_runs import PagedRun, load, logits_in_chunks
from ranks import run_ranks, topology
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from eagleray.config.resolve import DEMO_MODEL_DIR
from eagleray.errors import ConfigError
from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.kv_cache import KVCache
from eagleray.parallel.groups import Groups

FORMATS = ("int8", "fp8")
MAX_DIVERGENCES = {"int8": 0.001, "fp8": 0.01}
"""Bounds for the mean divergence of the demo model's predictions, in nats: 0.0005 and 0.005 on longer texts."""

PROMPT = random_prompt(0, 150, 384)

every_format = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(scope="module", params=["qwen3", "gpt_oss"])
def checkpoint(request, tmp_path_factory):
    """A checkpoint of plain layers, and one of layers with sinks of which every other has a window."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param, tokenizer=False)


@every_format
def test_forward_demo_model_predicts_as_with_a_plain_cache(name):
    text = (DEMO_MODEL_DIR / "MODEL_CARD.md").read_text()
    tokens = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json")).encode(text).ids[:300]
    exact, found = (
        logits_in_chunks(load(DEMO_MODEL_DIR, **options), tokens, 300).log_softmax(-1)
        for options in ({}, {"kv_cache_dtype": name})
    )
    divergence = (exact.exp() * (exact - found)).sum(-1).mean()
    assert 0 < divergence < MAX_DIVERGENCES[name]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({}, "the cache is in float32, which needs none"), ({"kv_cache_dtype": "fp8"}, "a scale of its own")],
)
def test_load_model_scales_for_the_cache_change_nothing_and_are_logged(tmp_path, caplog, options, reason):
    directory = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    expected = logits_in_chunks(load(directory, **options), PROMPT, 150)
    path = directory / "model.safetensors"
    names = ("k_proj.k_scale", "v_proj.v_scale", "attn.k_scale", "k_scale", "v_scale", "v_proj.output_scale")
    scales = {f"model.layers.1.self_attn.{name}": torch.tensor(0.5) for name in names}
    save_file({**load_file(path), **scales}, path, metadata={"format": "pt"})
    caplog.clear()
    caplog.set_level("INFO")
    assert torch.equal(logits_in_chunks(load(directory, **options), PROMPT, 150), expected)
    [line] = [line for line in caplog.messages if "scales for a cache of 8 bits" in line]
    assert line.startswith("the checkpoint has 6 scales") and reason in line


@every_format
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_in_chunks_and_batches_has_the_same_bits(checkpoint, dtype, name):
    model = load(checkpoint, dtype=dtype, kv_cache_dtype=name, invariant_for="deterministic")
    whole = logits_in_chunks(model, PROMPT, 150)
    for chunk in (64, 1):
        assert torch.equal(logits_in_chunks(model, PROMPT, chunk), whole)
    run = PagedRun(model)
    for row, length in (("other", 61), ("third", 3)):
        run.add(row, random_prompt(length, length, 384))
    run.add("only", PROMPT)
    run.step({"only": 90, "other": 60})
    assert torch.equal(run.step({"only": 60, "other": 1, "third": 3})["only"], whole[90:])


@every_format
def test_forward_divided_model_is_as_close_as_whole_model(checkpoint, name):
    """Codes may differ by one step where the sums of ranks are rounded in another order."""

    def work(groups: Groups) -> list[torch.Tensor]:
        model = load(checkpoint, groups=groups, kv_cache_dtype=name)
        return [logits_in_chunks(model, PROMPT, chunk) for chunk in (150, 40)]

    exact = logits_in_chunks(load(checkpoint), PROMPT, 150)
    whole = logits_in_chunks(load(checkpoint, kv_cache_dtype=name), PROMPT, 150)
    results = run_ranks(work, topology(tp=2, pp=2))
    assert torch.equal(results[2][0], results[2][1])
    error = (whole - exact).square().mean()
    assert 0 < (results[2][0] - exact).square().mean() < 1.5 * error


@every_format
@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_cache_block_takes_the_memory_of_its_codes_and_scales(checkpoint, dtype, itemsize, name):
    plain, small = (load(checkpoint, dtype=dtype, kv_cache_dtype=kind) for kind in ("auto", name))
    sizes = [KVCache.bytes_per_block(model.cache_shape(16), model.cache_dtype) for model in (plain, small)]
    codes = sizes[0] // itemsize
    num_scales = codes // plain.spec.head_dim  # of a key or value of each token and head
    assert sizes[1] == codes + 2 * num_scales


@every_format
def test_engine_memory_of_the_cache_holds_nearly_twice_the_blocks(name):
    """The demo model has heads of 64 features, whose keys and values take 66 bytes, not 128."""
    counts = []
    for kind in ("auto", name):
        with LocalEngine(DEMO_MODEL_DIR, kv_cache_memory="4MiB", kv_cache_dtype=kind, max_model_len=256) as engine:
            counts.append(engine.info.num_kv_blocks)
    assert counts[1] == int(4 * 2**20 / (4 * 2 * 2 * 16 * 66))
    assert 1.93 < counts[1] / counts[0] < 1.95


def test_engine_requests_alone_together_and_from_the_prefix_cache_have_the_same_bits(checkpoint):
    prompts = {str(length): [*PROMPT[:64], *random_prompt(length, length, 384)] for length in (1, 17, 40)}
    options = {"kv_cache_dtype": "int8", "deterministic": True, "max_model_len": 160, "max_num_batched_tokens": 48}
    answers = []
    for limits in ({"num_kv_blocks": 40, "enable_prefix_caching": False}, {"num_kv_blocks": 11}):
        with LocalEngine(checkpoint, **options, **limits) as engine:
            for name, prompt in prompts.items():
                engine.add(name, prompt, max_tokens=30, logprobs=2)
                if limits["num_kv_blocks"] == 40:  # the engine has one request at a time
                    engine.run()
            engine.run()
            answers.append(engine.answers)
            stats = engine.core.scheduler.stats()
    assert stats.num_preemptions > 0
    for name in prompts:
        assert answers[0][name].token_ids == answers[1][name].token_ids
        assert answers[0][name].logprobs == answers[1][name].logprobs


@pytest.mark.parametrize(
    ("family", "options", "problem"),
    [
        ("deepseek_v3", {"kv_cache_dtype": "int8"}, "ForCausalLM caches latents, which CPUs keep in the model's"),
        ("llama", {"kv_cache_dtype": "fp8", "dtype": "float16"}, "of LlamaForCausalLM on cpu cannot use a cache of fp"),
        ("llama", {"kv_cache_dtype": "int8", "attention_backend": "torch"}, "on cpu cannot use a cache of int8"),
    ],
)
def test_load_model_cache_that_kernels_cannot_use_is_refused(family, options, problem, tmp_path):
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False)
    with pytest.raises(ConfigError, match=f"option `kv_cache_dtype`: .*{problem}"):
        load(checkpoint, **options)


def test_cuda_backend_serves_fp8_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    backend, device = CudaBackend(torch.bfloat16), torch.device("cuda")
    assert backend.serves_cache(torch.float8_e4m3fn, device, of_latents=True)
    assert not backend.serves_cache(torch.int8, device, of_latents=False)
