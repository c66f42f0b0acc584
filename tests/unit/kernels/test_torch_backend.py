"""Products, experts and norms in plain torch and with oneDNN against the plainest way to compute the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from eagleray.kernels.params import RouterParams
from eagleray.kernels.torch import onednn
from eagleray.kernels.torch.functional import rms_norm
from eagleray.kernels.torch.onednn import OneDnnBackend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (100, 37)])
def test_onednn_linear_any_number_of_rows_equals_float64(dtype, bias, in_features, out_features):
    weight = torch.randn(out_features, in_features) * 0.1
    offset = torch.randn(out_features) if bias else None
    weight, offset = weight.to(dtype), None if offset is None else offset.to(dtype)
    product = OneDnnBackend().linear(weight.clone(), offset)
    x = torch.randn(300, 2 * in_features).to(dtype)[:, :in_features]
    expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for rows in [*range(1, 70), 127, 128, 129, 255, 256, 257, 300]:
        out = product(x[:rows])
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected[:rows], atol=4 * rounding, rtol=2 * rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_onednn_linear_without_packing_equals_plain_torch(dtype, monkeypatch):
    monkeypatch.setattr(onednn, "_can_pack", lambda dtype: False)
    weight, x = torch.randn(32, 16).to(dtype), torch.randn(3, 16).to(dtype)
    out = OneDnnBackend().linear(weight, None)(x)
    torch.testing.assert_close(out, F.linear(x, weight))


def naive_experts(x, ids, weights, gate_up, down):
    out = torch.zeros_like(x)
    for token, (experts, shares) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2)
            out[token] += share * F.linear(F.silu(gate) * up, down[expert])
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 50])
def test_experts_equal_one_expert_at_a_time(num_tokens):
    num_experts, top_k, hidden, size = 6, 3, 16, 12
    gate_up = torch.randn(num_experts, 2 * size, hidden)
    down = torch.randn(num_experts, hidden, size)
    x = torch.randn(num_tokens, hidden)
    scores = torch.randn(num_tokens, num_experts)
    weights, ids = torch.topk(scores.softmax(dim=1), top_k)
    kernels = OneDnnBackend()
    gated = [kernels.gated_linear(w, None) for w in gate_up]
    router = RouterParams(top_k=top_k, renormalize=False, round_weights=True)
    out = kernels.experts(router, gated, [kernels.linear(w, None) for w in down])(x, scores)
    torch.testing.assert_close(out, naive_experts(x, ids, weights, gate_up, down), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_rounds_like_transformers(dtype):
    x, weight = torch.randn(5, 4, 32).to(dtype), torch.rand(4, 32).to(dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), weight * normed.to(dtype), atol=1e-6, rtol=0)
