"""A model computes the same with the kernels for other processors: recorded passes, experts, attention over a cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import eagleray
from eagleray.kernels import choose
from eagleray.kernels.forward_batch import ForwardBatch
from eagleray.kernels.kv_cache import KVCache
from eagleray.models.registry import load_model

EMBEDDED = Path(eagleray.__file__).with_name("demo_model")
CPU = torch.device("cpu")
BLOCK_SIZE = 16
PROMPT = [7, 300, 41, 2077, 5, 5, 812, 93, 1500, 64, 3, 999, 1024, 77, 2048, 6, 31, 12, 450, 88]


def batch_of(token_ids: list[int], num_cached: int) -> ForwardBatch:
    """Make a batch of one row, whose blocks lie one after the other in the cache."""
    length = num_cached + len(token_ids)
    positions = np.arange(num_cached, length, dtype=np.int32)
    return ForwardBatch(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=positions,
        slot_mapping=positions,
        block_table=np.arange(-(-length // BLOCK_SIZE), dtype=np.int32)[None],
        seq_lens=np.array([length], dtype=np.int32),
        query_start_loc=np.array([0, len(token_ids)], dtype=np.int32),
        num_decodes=int(len(token_ids) == 1),
    )


def decode(library, monkeypatch) -> tuple[list[int], torch.Tensor]:
    """Return the next four tokens after a prompt, and the logits of each, of the embedded model in float32."""
    monkeypatch.setattr(choose, "native_library", lambda: library)
    model = load_model(EMBEDDED, dtype="float32", load_format="auto", device=CPU, seed=None, on_progress=None)
    shape = model.cache_shape(BLOCK_SIZE)
    cache = KVCache.allocate(shape, num_blocks=2, dtype=model.dtype, device=CPU)
    tokens, logits, batch = [], [], batch_of(PROMPT, 0)
    for _ in range(4):
        logits.append(model.logits(model.forward(batch, cache)[-1:])[0].clone())
        tokens.append(int(logits[-1].argmax()))
        batch = batch_of(tokens[-1:], len(PROMPT) + len(tokens) - 1)
    return tokens, torch.stack(logits)


def test_model_other_processor_has_the_same_tokens(library, other_library, monkeypatch):
    expected_tokens, expected = decode(library, monkeypatch)
    tokens, logits = decode(other_library, monkeypatch)
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
