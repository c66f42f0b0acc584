"""A model that is divided among ranks has the logits of the whole model."""

from __future__ import annotations

import threading

import pytest
import torch
from checkpoints import make_checkpoint
from harness import random_prompt
from model_runs import PagedRun, load, logits_in_chunks
from ranks import run_ranks, topology

from eagleray.parallel.groups import Groups

ROUNDING = 1e-4
"""Tolerance for sums that are computed in another order."""

PROMPT = random_prompt(0, 50, 384)

CASES = {
    "llama tp": ("llama", {}, 2, 1),
    "llama pp, uneven layers": ("llama", {}, 1, 2),
    "llama both": ("llama", {"attention_bias": True, "mlp_bias": True}, 2, 2),
    "llama tp, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, 2, 1),
    "llama, fewer key heads than ranks": ("llama", {"num_key_value_heads": 2}, 4, 1),
    "llama, one key head": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}, 2, 1),
    "llama, a stage for each layer, tied": ("llama", {"tie_word_embeddings": True}, 1, 3),
    "llama both, tied": ("llama", {"tie_word_embeddings": True}, 2, 2),
    "llama, vocabulary that does not divide": ("llama", {"vocab_size": 385}, 4, 1),
    "llama, tied vocabulary that does not divide": ("llama", {"vocab_size": 385, "tie_word_embeddings": True}, 2, 2),
    "mistral tp": ("mistral", {"sliding_window": 24}, 2, 1),
    "mistral pp": ("mistral", {"sliding_window": 24}, 1, 2),
    "qwen2 tp": ("qwen2", {"tie_word_embeddings": True}, 2, 1),
    "qwen2 both, windows in one stage": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2, "tie_word_embeddings": False},
        2,
        2,
    ),
    "qwen3 tp": ("qwen3", {"attention_bias": True}, 2, 1),
    "qwen3, fewer key heads than ranks": ("qwen3", {"num_key_value_heads": 2}, 4, 1),
    "qwen3 pp": ("qwen3", {}, 1, 2),
    "qwen3_moe tp": ("qwen3_moe", {}, 2, 1),
    "qwen3_moe pp": ("qwen3_moe", {}, 1, 2),
    "qwen3_moe both, a dense layer": ("qwen3_moe", {"mlp_only_layers": [1]}, 2, 2),
    "gpt_oss tp": ("gpt_oss", {}, 2, 1),
    "gpt_oss both": ("gpt_oss", {"sliding_window": 20}, 2, 2),
    "gpt_oss, one key head": ("gpt_oss", {"num_key_value_heads": 1}, 4, 1),
    "mixtral tp": ("mixtral", {}, 2, 1),
    "mixtral both": ("mixtral", {"tie_word_embeddings": True}, 2, 2),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, because several ranks compute at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of_ranks(checkpoint, where, chunks=(20, 1), **options) -> list[list[torch.Tensor]]:
    """Return the logits by rank, then by chunk."""

    def work(groups: Groups) -> list[torch.Tensor]:
        model = load(checkpoint, groups=groups, **options)
        return [logits_in_chunks(model, PROMPT, chunk) for chunk in chunks]

    return run_ranks(work, where)


@pytest.mark.parametrize("case", CASES)
def test_forward_divided_model_equals_whole_model(case, tmp_path):
    family, overrides, tp, pp = CASES[case]
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False, **overrides)
    expected = logits_in_chunks(load(checkpoint), PROMPT, 50)
    results = logits_of_ranks(checkpoint, topology(tp=tp, pp=pp))
    sampler = (pp - 1) * tp
    for logits in results[sampler]:
        assert logits.is_contiguous()
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)
    assert all(not logits.numel() for rank, given in enumerate(results) for logits in given if rank != sampler)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_load_model_divided_dummy_weights_equal_whole_model(family, tmp_path):
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False)
    expected = logits_in_chunks(load(checkpoint, load_format="dummy", seed=3), PROMPT, 50)
    results = logits_of_ranks(checkpoint, topology(tp=2, pp=2), chunks=(50,), load_format="dummy", seed=3)
    torch.testing.assert_close(results[2][0], expected, atol=ROUNDING, rtol=0)


def test_forward_ranks_on_two_nodes_equal_whole_model(tmp_path):
    """The ranks use connections, not shared memory."""
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    expected = logits_in_chunks(load(checkpoint), PROMPT, 50)
    for logits in logits_of_ranks(checkpoint, topology(tp=2, nodes="ab"))[0]:
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_forward_divided_half_precision_is_as_close_to_float32_as_whole_model(dtype, tmp_path):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)

    def error(logits: torch.Tensor) -> float:
        return (logits - exact).pow(2).mean().sqrt().item()

    exact = logits_in_chunks(load(checkpoint), PROMPT, 50)
    whole = error(logits_in_chunks(load(checkpoint, dtype=dtype), PROMPT, 50))
    for logits in logits_of_ranks(checkpoint, topology(tp=2, pp=2), dtype=dtype)[2]:
        assert error(logits) < 1.5 * whole


def test_forward_stages_overlap_steps(tmp_path):
    """The first stage computes three steps before the last one begins."""
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    expected = logits_in_chunks(load(checkpoint), PROMPT, 50)

    first_is_done = threading.Event()

    def work(groups: Groups) -> torch.Tensor | None:
        run = PagedRun(load(checkpoint, groups=groups))
        run.add("only", PROMPT)
        if groups.mesh.is_last_stage:
            assert first_is_done.wait(20)
            return torch.cat([run.step({"only": count})["only"] for count in (20, 29, 1)])
        for count in (20, 29, 1):
            assert run.step({"only": count}) == {}
        first_is_done.set()
        return None

    torch.testing.assert_close(run_ranks(work, topology(pp=2))[1], expected, atol=ROUNDING, rtol=0)
