"""Kernels that compute rows of hidden states or logits: embedding, norms, gates, cache writes, sums, sampling."""

from __future__ import annotations

import numpy as np
import torch
from gpu_case import EXACT, KernelCase, KernelRun, num_bytes
from gpu_floors import Work
from torch import Tensor

from eagleray.kernels.cuda.triton import cache_write, embedding, gate, norm, weighted_sum
from eagleray.kernels.forward_batch import DeviceNumbers
from eagleray.kernels.params import ClampedSwiglu
from eagleray.kernels.ranking import Ranking
from eagleray.kernels.rope import Rope
from eagleray.kernels.rope_spec import DefaultRope
from eagleray.kernels.torch.functional import clamped_swiglu, silu_and_mul
from eagleray.messages.sampling import Sampling
from eagleray.worker.device_sampler import DeviceSampler
from eagleray.worker.sampler import HostSampler
from eagleray.worker.sampling_state import SamplingState

EPS = 1e-6
CLAMP = ClampedSwiglu(alpha=1.702, limit=7.0)
BLOCK = 16
DRAW_MISMATCH = 0.05
"""Part of the drawn tokens that may differ from a CPU's, because exponentials differ in the last bit."""


def _rows_of(count: int, size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, size, device=device).to(dtype)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.float()


def embed(device: torch.device, dtype: torch.dtype, *, tokens: int, hidden: int, vocab: int) -> KernelRun:
    weight = _rows_of(vocab, hidden, device, dtype)
    ids = torch.randint(vocab, (tokens,), device=device, dtype=torch.int32)
    last_tokens = torch.randint(vocab, (tokens,), device=device, dtype=torch.int32)
    ids[::2] = -1 - torch.arange(tokens, device=device, dtype=torch.int32)[::2]
    out = torch.empty(tokens, hidden, device=device)
    known = torch.where(ids < 0, last_tokens, ids).long()
    return KernelRun(
        launch=lambda: embedding.embed(ids, last_tokens, weight, first=0, out=out),
        results=lambda: [out],
        expected=lambda: [weight[known].float()],
        work=Work(out.nbytes + tokens * hidden * dtype.itemsize),
        tolerance=EXACT,
    )


def rms_norm(device: torch.device, dtype: torch.dtype, *, tokens: int, hidden: int) -> KernelRun:
    x, weight = _rows_of(tokens, hidden, device), torch.randn(hidden, device=device).to(dtype)
    out = torch.empty(tokens, hidden, device=device, dtype=dtype)
    return KernelRun(
        launch=lambda: norm.rms_norm(x, weight, EPS, out=out),
        results=lambda: [out],
        expected=lambda: [_norm(x, weight)],
        work=Work(num_bytes(x, out)),
    )


def add_rms_norm(device: torch.device, dtype: torch.dtype, *, tokens: int, hidden: int) -> KernelRun:
    residual, x = _rows_of(tokens, hidden, device), _rows_of(tokens, hidden, device, dtype)
    weight, out = torch.randn(hidden, device=device).to(dtype), torch.empty(tokens, hidden, device=device, dtype=dtype)

    def expected() -> list[Tensor]:
        total = residual + x.float()
        return [total, _norm(total, weight)]

    return KernelRun(
        launch=lambda: norm.add_rms_norm(residual, x, weight, EPS, out=out),
        results=lambda: [residual, out],
        expected=expected,
        work=Work(2 * residual.nbytes + num_bytes(x, out)),
        is_poisoned=False,
    )


def add(device: torch.device, dtype: torch.dtype, *, tokens: int, hidden: int) -> KernelRun:
    residual, x = _rows_of(tokens, hidden, device), _rows_of(tokens, hidden, device, dtype)
    return KernelRun(
        launch=lambda: norm.add(residual, x),
        results=lambda: [residual],
        expected=lambda: [residual + x.float()],
        work=Work(2 * residual.nbytes + x.nbytes),
        is_poisoned=False,
    )


def gate_up(
    device: torch.device, dtype: torch.dtype, *, tokens: int, size: int, clamp: ClampedSwiglu | None = None
) -> KernelRun:
    x, out = _rows_of(tokens, 2 * size, device, dtype), torch.empty(tokens, size, device=device, dtype=dtype)
    return KernelRun(
        launch=lambda: gate.gate(x, clamp, out=out),
        results=lambda: [out],
        expected=lambda: [silu_and_mul(x.float()) if clamp is None else clamped_swiglu(x.float(), clamp)],
        work=Work(num_bytes(x, out)),
    )


def sum_experts(device: torch.device, dtype: torch.dtype, *, tokens: int, top_k: int, hidden: int) -> KernelRun:
    outputs = _rows_of(tokens * top_k, hidden, device, dtype).view(tokens, top_k, hidden)
    weights = torch.rand(tokens, top_k, device=device)
    slots = torch.zeros(tokens, top_k, device=device, dtype=torch.int32)
    out = _rows_of(tokens, hidden, device)
    return KernelRun(
        launch=lambda: weighted_sum.weighted_sum(outputs, weights, slots, out=out, accumulate=True),
        results=lambda: [out],
        expected=lambda: [out + (outputs.float() * weights[..., None]).sum(1)],
        work=Work(num_bytes(outputs, weights, slots, out, out)),
        is_poisoned=False,
    )


def write_keys_values(
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    is_normed: bool,
    is_fp8: bool = False,
) -> KernelRun:
    qkv = _rows_of(tokens, (heads + 2 * kv_heads) * head_dim, device, dtype)
    rope = Rope(DefaultRope(1e6), head_dim, dtype=torch.float32, device=device)
    positions = torch.randperm(tokens, device=device, dtype=torch.int32)
    cos, sin = rope.table(torch.arange(tokens, device=device))
    num_blocks = -(-tokens // BLOCK) + 1
    slots = torch.randperm(num_blocks * BLOCK, device=device, dtype=torch.int32)[:tokens]
    slots[-1] = -1  # padding
    cache_dtype = torch.float8_e4m3fn if is_fp8 else dtype
    cache = torch.zeros(num_blocks, BLOCK, 2 * kv_heads, head_dim, device=device, dtype=cache_dtype)
    queries = torch.empty(tokens, heads * head_dim, device=device, dtype=dtype)
    q_norm, k_norm = (torch.randn(head_dim, device=device).to(dtype) if is_normed else None for _ in range(2))

    def expected() -> list[Tensor]:
        q, k, v = qkv.float().view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = _norm(q, q_norm), _norm(k, k_norm)
        q, k = (_rotated(part, cos, sin, positions) for part in (q, k))
        cached = torch.zeros(cache.shape, device=device).flatten(0, 1)
        cached[slots[:-1].long()] = torch.cat((k, v), dim=1)[:-1]
        return [q.flatten(1), cached.view(cache.shape)]

    return KernelRun(
        launch=lambda: cache_write.write_keys_values(
            qkv, cos, sin, positions, slots, cache, queries, q_norm=q_norm, k_norm=k_norm, eps=EPS
        ),
        results=lambda: [queries, cache],
        expected=expected,
        work=Work(num_bytes(qkv, queries) + tokens * 2 * kv_heads * head_dim * cache_dtype.itemsize),
        tolerance=5e-2 if is_fp8 else 1e-2,
        is_poisoned=False,
    )


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    cos, sin = cos[positions.long()][:, None], sin[positions.long()][:, None]
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def sample(device: torch.device, dtype: torch.dtype, *, rows: int, vocab: int, **parameters: float) -> KernelRun:
    """Prepare a step of a sampler whose rows all have these parameters. The expected tokens are those of the sampler
    for CPUs."""
    logits = torch.randn(rows, vocab, device=device) * 4
    sampler = DeviceSampler(num_rows=rows, vocab_size=vocab, device=device)
    state = SamplingState(num_rows=rows, vocab_size=vocab, device=torch.device("cpu"))
    for row in range(rows):
        sampling = Sampling(seed=row, **parameters)
        sampler.add_row(row, sampling, [1, 2, 3], 3)
        state.add_row(row, sampling, [1, 2, 3], 3)
    row_ids, positions = np.arange(rows), np.full(rows, 3)
    first = sampler.prepare(row_ids, positions)  # has the parameters of the rows
    sampler.launch(logits.clone(), first, DeviceNumbers(first.words).on(device))
    prepared = sampler.prepare(row_ids, positions)
    words = DeviceNumbers(prepared.words).on(device)
    tokens = torch.zeros(rows, dtype=torch.int32, device=device)

    def launch() -> None:
        tokens.copy_(sampler.launch(logits, prepared, words).token_ids)

    wanted: list[Tensor] = []

    def expected() -> list[Tensor]:
        host_sampler = HostSampler(state, Ranking())
        for _ in range(2):  # as on the device, the tokens of the first step count in the second one's penalties
            plan = host_sampler.prepare(row_ids, positions)
            on_host = logits.to("cpu", copy=True)  # samplers change logits
            host = host_sampler.launch(on_host, plan, DeviceNumbers(plan.words).on(on_host.device)).finish([])
        wanted.append(torch.tensor(host.token_ids))
        return [torch.ones(1)]

    def differing() -> list[Tensor]:
        return [1.0 + (tokens.cpu() != wanted[0]).float().mean()[None]]

    return KernelRun(
        launch=launch,
        results=differing,
        expected=expected,
        work=Work(logits.nbytes),
        tolerance=DRAW_MISMATCH if parameters["temperature"] > 0 else EXACT,
        is_poisoned=False,
    )


SMALL_ROWS = {"tokens": 3, "hidden": 40}
QWEN3_HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128, "is_normed": True}
GPT_OSS_HEADS = {"heads": 64, "kv_heads": 8, "head_dim": 64, "is_normed": False}
SMALL_HEADS = {"tokens": 3, "heads": 4, "kv_heads": 2, "head_dim": 16}

CASES = [
    KernelCase(
        "embed",
        "256 x 4096",
        embed,
        {"tokens": 256, "hidden": 4096, "vocab": 151_936},
        SMALL_ROWS | {"vocab": 50},
    ),
    *(
        KernelCase(make.__name__, f"{tokens} x {hidden}", make, {"tokens": tokens, "hidden": hidden}, SMALL_ROWS)
        for make, tokens, hidden in [
            (rms_norm, 256, 4096),
            (add_rms_norm, 1, 4096),
            (add_rms_norm, 256, 4096),
            (add_rms_norm, 8192, 4096),
            (add_rms_norm, 32, 2880),
            (add, 256, 4096),
        ]
    ),
    *(
        KernelCase("gate", f"{tokens} x {size}", gate_up, {"tokens": tokens, "size": size}, {"tokens": 3, "size": 40})
        for tokens, size in [(1, 12_288), (256, 12_288), (8192, 12_288)]
    ),
    KernelCase(
        "clamped gate",
        "128 x 2880",
        gate_up,
        {"tokens": 128, "size": 2880, "clamp": CLAMP},
        {"tokens": 3, "size": 40},
    ),
    *(
        KernelCase(
            "write_keys_values",
            f"{tokens} tokens, {name}",
            write_keys_values,
            heads | {"tokens": tokens},
            SMALL_HEADS | {"is_fp8": False},  # the interpreter cuts numbers off where a GPU rounds them
        )
        for tokens, name, heads in [
            (2, "32/8 x 128", QWEN3_HEADS),
            (256, "32/8 x 128", QWEN3_HEADS),
            (8192, "32/8 x 128", QWEN3_HEADS),
            (256, "64/8 x 64", GPT_OSS_HEADS),
            (256, "32/8 x 128, FP8 cache", QWEN3_HEADS | {"is_fp8": True}),
        ]
    ),
    *(
        KernelCase(
            "weighted_sum",
            f"{tokens} x {top_k} x {hidden}",
            sum_experts,
            {"tokens": tokens, "top_k": top_k, "hidden": hidden},
            {"tokens": 3, "top_k": 2, "hidden": 40},
        )
        for tokens, top_k, hidden in [(1, 8, 2048), (32, 8, 2048), (8192, 8, 2048)]
    ),
    *(
        KernelCase(
            "sample",
            f"{rows} x 151936, {name}",
            sample,
            {"rows": rows, "vocab": 151_936, **parameters},
            {"rows": 3, "vocab": 300},
        )
        for rows, name, parameters in [
            (1, "greedy", {"temperature": 0.0}),
            (256, "greedy", {"temperature": 0.0}),
            (32, "temperature", {"temperature": 0.8}),
            (256, "temperature", {"temperature": 0.8}),
            (32, "top_k, top_p", {"temperature": 0.8, "top_k": 50, "top_p": 0.9}),
            (256, "top_k, top_p", {"temperature": 0.8, "top_k": 50, "top_p": 0.9}),
            (32, "penalties", {"temperature": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.2}),
            (32, "log-probabilities", {"temperature": 0.8, "logprobs": 5}),
        ]
    ),
]
