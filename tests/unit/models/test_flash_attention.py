"""Prompts by FlashAttention-3: a stand-in for its module shows that it is called as its interface says."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import make_checkpoint
from model_runs import PagedRun, load
from torch import Tensor

from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.cuda.flash_attention import MODULE
from eagleray.models import registry
from eagleray.models.base import TRIAL_TOKENS


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """Compute the documented result of the function of this name.

    q: [tokens, heads, size]; caches: [blocks, block size, key heads, size]. The last query of a row sees its last key;
    a query sees `window_size[0]` keys before its own.
    """
    assert causal and all(part.dtype == torch.int32 for part in (cache_seqlens, page_table, cu_seqlens_q))
    assert cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] == len(q) and len(cu_seqlens_q) == len(cache_seqlens) + 1
    out = torch.empty_like(q)
    for row, length in enumerate(cache_seqlens.tolist()):
        first, last = cu_seqlens_q[row : row + 2].tolist()
        assert last - first <= max_seqlen_q
        keys, values = (cache[page_table[row]].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        distance = torch.arange(length - (last - first), length)[:, None] - torch.arange(length)
        visible = distance >= 0
        if window_size[0] >= 0:
            visible &= distance <= window_size[0]
        shared = q.shape[1] // keys.shape[1]
        out[first:last] = F.scaled_dot_product_attention(
            q[first:last].transpose(0, 1),
            keys.repeat_interleave(shared, 1).transpose(0, 1),
            values.repeat_interleave(shared, 1).transpose(0, 1),
            attn_mask=visible,
        ).transpose(0, 1)
    return out


@pytest.mark.parametrize("family", ["qwen3", pytest.param("mistral", marks=pytest.mark.grid)])
def test_prompt_attention_of_mixed_batches_equals_our_kernels(family, monkeypatch, tmp_path):
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False)
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache))

    def run(*, prefills_by_fa3: bool) -> list[Tensor]:
        backend = CudaBackend(torch.float32, prefills_by_fa3=prefills_by_fa3)
        monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: backend)
        paged = PagedRun(load(checkpoint))
        paged.add("a", list(range(70, 80)))
        paged.add("b", list(range(5, 12)))
        paged.step({"a": 9})
        found = paged.step({"a": 1, "b": 7})
        return [found["a"], found["b"]]

    for own, by_fa3 in zip(run(prefills_by_fa3=False), run(prefills_by_fa3=True), strict=True):
        torch.testing.assert_close(by_fa3, own, atol=1e-4, rtol=0)


def test_prompt_attention_is_tried_with_a_row_of_several_queries(monkeypatch, tmp_path):
    calls = []

    def attend(q: Tensor, *caches: Tensor, max_seqlen_q: int, **options: Any) -> Tensor:
        calls.append((len(q), max_seqlen_q, len(options["cache_seqlens"])))
        return flash_attn_with_kvcache(q, *caches, max_seqlen_q=max_seqlen_q, **options)

    checkpoint = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(flash_attn_with_kvcache=attend))
    backend = CudaBackend(torch.float32, captures=False, prefills_by_fa3=True)
    monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: backend)
    model = load(checkpoint)
    model.try_kernels()
    assert calls == model.num_local_layers * [(TRIAL_TOKENS - 1, TRIAL_TOKENS - 1, 1)]
