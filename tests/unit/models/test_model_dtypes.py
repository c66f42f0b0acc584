from __future__ import annotations

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from harness import random_prompt
from model_runs import load, logits_in_chunks
from transformers import AutoModelForCausalLM

PROMPT = random_prompt(0, 60, 384)


def logprobs(model, chunk: int = 60):
    return torch.log_softmax(logits_in_chunks(model, PROMPT, chunk), dim=-1)


def error(wrong: torch.Tensor, right: torch.Tensor) -> float:
    """Return the root mean square over all positions and tokens."""
    return (wrong - right).pow(2).mean().sqrt().item()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "bfloat16") for family in FAMILIES),
        *(
            pytest.param(
                family, "float16", marks=() if family in ("qwen3", "gpt_oss", "deepseek_v3") else pytest.mark.grid
            )
            for family in FAMILIES
        ),
    ],
)
def test_forward_half_precision_is_as_close_to_float32_as_transformers(family, dtype, tmp_path):
    checkpoint = make_checkpoint(tmp_path, family, dtype=dtype, tokenizer=False)
    model = load(checkpoint)
    assert model.dtype == getattr(torch, dtype), "auto takes the checkpoint's"
    exact = logprobs(load(checkpoint, dtype="float32"))
    oracle = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with torch.inference_mode():
        theirs = torch.log_softmax(oracle(torch.tensor([PROMPT])).logits[0].float(), dim=-1)
    for chunk in (60, 7, 1):
        assert error(logprobs(model, chunk), exact) < 1.5 * error(theirs, exact) + 1e-3


def test_load_model_dtype_overrides_the_checkpoints(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    assert load(checkpoint).dtype == torch.float32
    kinds = {"bfloat16": torch.bfloat16, "half": torch.float16, "float16": torch.float16, "float": torch.float32}
    for name, kind in kinds.items():
        model = load(checkpoint, dtype=name)
        assert model.dtype == kind
        assert logits_in_chunks(model, PROMPT[:4], 4).dtype == torch.float32


def test_num_parameters_tied_weight_counts_once(tmp_path):
    for tied in (True, False):
        checkpoint = make_checkpoint(tmp_path / str(tied), "qwen2", tokenizer=False, tie_word_embeddings=tied)
        assert load(checkpoint).num_parameters == AutoModelForCausalLM.from_pretrained(checkpoint).num_parameters()
