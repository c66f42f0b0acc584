"""`logprobs_mode` through the whole engine: the numbers follow from transformers' logits, also in a request that
another engine continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from harness import LocalEngine, random_prompt
from oracle import oracle

VOCAB = 300
PROMPT = random_prompt(4, 33, VOCAB)
SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_k": 12, "seed": 5, "logit_bias": {7: 3.0}, "max_tokens": 12}
SAMPLING |= {"logprobs": 4, "logprob_token_ids": (7, 9), "prompt_logprobs": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=False)


def processed(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits [n, vocab_size] after bias, temperature and top_k, in float64."""
    values = logits.double()
    values[:, 7] += 3.0
    values /= 0.7
    least = values.topk(12).values[:, -1:]
    return values.masked_fill(values < least, -torch.inf)


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_engine_reports_numbers_of_its_logprobs_mode(checkpoint: Path, mode: str) -> None:
    engine = LocalEngine(checkpoint, logprobs_mode=mode)
    engine.add("a", PROMPT, **SAMPLING)
    answer = engine.run()["a"]
    raw = oracle(checkpoint).logits(PROMPT + answer.token_ids)
    truth = processed(raw) if mode.startswith("processed") else raw.double()
    if mode.endswith("logprobs"):
        raw, truth = torch.log_softmax(raw, -1), torch.log_softmax(truth, -1)
    for row, entry in zip(truth[len(PROMPT) - 1 :], answer.logprobs, strict=False):
        assert np.allclose(entry.logprobs, row[entry.token_ids].numpy(), atol=1e-4)
        assert np.allclose(entry.logprobs[1:5], row.topk(4).values.numpy(), atol=1e-4)
        assert entry.rank == 1 + int((row > row[entry.token_ids[0]] + 1e-6).sum())
    assert len(answer.logprobs) == 12
    position = 0
    for piece in answer.prompt_logprobs:  # always raw
        for token_ids, values in zip(piece.token_ids, piece.logprobs, strict=True):
            assert np.allclose(values, raw[position, token_ids.astype(np.int64)].numpy(), atol=1e-4)
            position += 1
    assert position == len(PROMPT) - 1

    other = LocalEngine(checkpoint, logprobs_mode=mode)
    other.add("a", PROMPT, **SAMPLING, output_token_ids=answer.token_ids[:5], prompt_logprobs_from=len(PROMPT))
    rest = other.run()["a"]
    assert (rest.token_ids, rest.logprobs) == (answer.token_ids[5:], answer.logprobs[5:])
