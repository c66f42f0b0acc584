"""Models on a GPU: every family has transformers' logits."""

from __future__ import annotations

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from harness import random_prompt
from model_runs import PagedRun, load, logits_in_chunks
from oracle import Oracle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
PROMPT = random_prompt(0, 90, 384)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_prompt_in_chunks_on_gpu_equals_transformers(family, tmp_path):
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False)
    model, expected = load(checkpoint, device=CUDA), Oracle(checkpoint).logits(PROMPT)
    for chunk in (90, 16, 1):
        torch.testing.assert_close(logits_in_chunks(model, PROMPT, chunk), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_half_precision_on_gpu_is_finite(family, dtype, tmp_path):
    model = load(make_checkpoint(tmp_path, family, tokenizer=False), device=CUDA, dtype=dtype)
    run = PagedRun(model)
    run.add("decode", PROMPT)
    run.add("prompt", PROMPT[:50])
    run.step({"decode": 89})
    assert all(logits.isfinite().all() for logits in run.step({"decode": 1, "prompt": 50}).values())


def test_load_model_dummy_weights_on_gpu_equal_cpu(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    on_gpu, on_cpu = (load(checkpoint, device=device, load_format="dummy") for device in (CUDA, torch.device("cpu")))
    expected = logits_in_chunks(on_cpu, PROMPT, 90)
    torch.testing.assert_close(logits_in_chunks(on_gpu, PROMPT, 90), expected, atol=1e-3, rtol=0)
