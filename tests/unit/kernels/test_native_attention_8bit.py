"""Attention over a cache of 8 bits equals float64 over the numbers in the cache, and each token has the same bits
however it is computed."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from native_layer import EPS, Layer, run
from native_requests import error, last_tokens
from torch import Tensor

from eagleray.kernels.cpu.abi import abi

FORMATS = {"int8": abi.CACHE_INT8, "fp8": abi.CACHE_FP8}
MAX_ERRORS = {"int8": 2e-4, "fp8": 1e-5}
"""Bounds for the errors of attention, as root mean squares where values have one of about 1. With int8 the other
factors are rounded to 16 bits."""

every_format = pytest.mark.parametrize("name", FORMATS)


def make_layer(library: ctypes.CDLL, name: str, dtype: torch.dtype = torch.bfloat16, **shape: int) -> Layer:
    return Layer(library, dtype, cache_format=FORMATS[name], **shape)


def quantize(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the codes of vectors [.., size], and their scales [..]."""
    exact = x.abs().amax(-1) / (127 if name == "int8" else 448)
    scales = (((exact.view(torch.int32) + 0xFFFF) >> 16) << 16).view(torch.float32)  # the next bfloat16 above
    parts = x / scales[..., None]
    if name == "int8":
        return parts.round().to(torch.int8), scales.bfloat16()
    small = torch.where(parts.abs() > 2**-7, 2**-6, 0.0).copysign(parts)
    return torch.where(parts.abs() < 2**-6, small, parts).to(torch.float8_e4m3fn), scales.bfloat16()


@every_format
@pytest.mark.parametrize(("dtype", "head_dim", "block_size"), [(torch.float32, 6, 5), (torch.bfloat16, 80, 16)])
def test_prepare_quantizes_keys_and_values(
    library: ctypes.CDLL, name: str, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    torch.manual_seed(head_dim)
    layer = make_layer(library, name, dtype, head_dim=head_dim, block_size=block_size, norm=True, threads=2)
    (request,) = layer.new_requests([70])
    request.features[:, ::7] *= 1e-3
    request.features[3] = 0
    layer.step((request, 33))
    layer.step((request, 37))
    _, keys, values = request.features.view(70, -1, head_dim).split([4, 2, 2], dim=1)
    cached_keys, cached_values = layer.prepared(request)
    codes, scales = quantize(values, name)
    codes[3] = 0
    assert torch.equal(cached_values, codes.double() * scales.double()[..., None])
    assert layer.norms[1] is not None
    normed = keys * (keys.square().mean(-1, keepdim=True) + EPS).rsqrt() * layer.norms[1]
    a, b = normed.chunk(2, dim=-1)
    cos, sin = layer.cos[:70, None], layer.sin[:70, None]
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).double()
    # Half a step: of whole numbers between 0 and the largest, or of 4 bits of each number.
    largest = turned.abs().amax(-1, keepdim=True)
    bound = largest / 127 / 2 if name == "int8" else (turned.abs() / 16).maximum(largest * 2**-7 / 448)
    assert ((cached_keys - turned).abs() <= 1.02 * bound + 1e-6).all()


@every_format
@pytest.mark.parametrize(
    ("size", "shape"),
    [
        (300, {"head_dim": 4}),
        (300, {"head_dim": 24, "block_size": 5}),
        (300, {"head_dim": 64, "heads": 8, "window": 40, "sinks": True}),
        (600, {"head_dim": 128, "heads": 3, "kv_heads": 1, "block_size": 32}),
        (270, {"head_dim": 256, "heads": 19, "kv_heads": 1}),
        (100, {"head_dim": 80, "heads": 14, "block_size": 4, "window": 1}),
    ],
)
def test_attend_8_bits_equals_float64(library: ctypes.CDLL, name: str, size: int, shape: dict[str, int]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_accuracy(library, name, dtype, size, **shape)


def check_accuracy(library: ctypes.CDLL, name: str, dtype: torch.dtype, size: int, **shape: int) -> None:
    torch.manual_seed(size)
    layer = make_layer(library, name, dtype, **shape)
    (request,) = layer.new_requests([size])
    out = run(layer, request, [size])
    truth = layer.truth(request, layer.queries)
    rounded = error(truth.to(dtype), truth)
    assert error(out, truth) <= MAX_ERRORS[name] + 1.1 * rounded


@every_format
def test_attend_8_bits_numbers_of_any_size_equal_float64(library: ctypes.CDLL, name: str) -> None:
    """Scales follow the numbers, and a token's scale does not depend on those of others."""
    layer = make_layer(library, name, torch.float32)
    (request,) = layer.new_requests([300])
    request.features[:, 4 * 16 : 6 * 16] *= torch.logspace(-6, 0, 300)[:, None]
    request.features[:, 6 * 16 :] *= torch.logspace(-6, 3, 300)[:, None]
    out = run(layer, request, [300])
    truth = layer.truth(request, layer.queries)
    largest = truth.abs().amax(-1, keepdim=True)
    assert ((out - truth).abs() / largest).max() < 20 * MAX_ERRORS[name]


def check_steps(library: ctypes.CDLL, name: str, size: int, **shape: int) -> None:
    """Check that a token has the same bits for every number of tokens in a step and of threads."""
    torch.manual_seed(size)
    layer = make_layer(library, name, **shape)
    (request,) = layer.new_requests([size])
    expected = run(layer, request, [size])
    cached = layer.cache.clone()
    assert expected.isfinite().all()
    for counts in ([1] * size, [2, 5, 20, size - 28, 1], [size - 3, 1, 1, 1]):
        request.done = 0
        layer.cache.zero_()
        assert torch.equal(run(layer, request, counts), expected)
        assert torch.equal(layer.cache, cached)
    for threads in (2, 3):
        again = make_layer(library, name, **shape, threads=threads)
        again.cache, again.num_blocks = layer.cache, layer.num_blocks
        request.done = 0
        assert torch.equal(run(again, request, [size // 2, size - size // 2]), expected)


@every_format
@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 6, "heads": 2},
        {"head_dim": 64, "heads": 7, "block_size": 8, "window": 50, "sinks": True},
        {"head_dim": 80, "heads": 4, "block_size": 5, "window": 3},
        {"head_dim": 128, "heads": 3, "block_size": 32},
    ],
)
def test_attend_8_bits_token_by_token_has_the_same_bits(library: ctypes.CDLL, name: str, shape: dict[str, int]) -> None:
    check_steps(library, name, 300, kv_heads=1, **shape)


@every_format
def test_attend_8_bits_older_processor_equals_float64(other_library: ctypes.CDLL, name: str) -> None:
    check_accuracy(other_library, name, torch.bfloat16, 300, head_dim=80)
    check_steps(other_library, name, 290, head_dim=64, heads=7, kv_heads=1, block_size=8, window=50)


@every_format
@pytest.mark.parametrize("threads", [1, 3])
def test_attend_8_bits_row_in_a_batch_has_the_same_bits(library: ctypes.CDLL, name: str, threads: int) -> None:
    torch.manual_seed(0)
    sizes, counts = [1, 17, 300, 1500, 40, 31, 700], [1, 1, 1, 1, 40, 30, 150]
    layer = make_layer(library, name, head_dim=64, threads=threads)
    requests = layer.new_requests(sizes)
    for request, count in zip(requests, counts, strict=True):
        if request.done < len(request.features) - count:
            layer.step((request, len(request.features) - count))
    together = layer.step(*last_tokens(requests, counts))
    layer.threads = 1
    for work, result in zip(last_tokens(requests, counts), together, strict=True):
        assert torch.equal(layer.step(work)[0], result)


@every_format
@pytest.mark.parametrize("number", [math.nan, math.inf, -3e38])
@pytest.mark.parametrize(("block_size", "head_dim"), [(5, 16), (16, 20)])
def test_attend_8_bits_reused_blocks_leave_no_trace(
    library: ctypes.CDLL, name: str, number: float, block_size: int, head_dim: int
) -> None:
    torch.manual_seed(0)
    layer = make_layer(library, name, block_size=block_size, head_dim=head_dim, threads=2)
    requests = layer.new_requests([270, 33, 1, 100])
    counts = [1, 33, 1, 60]

    def compute() -> list[Tensor]:
        for request, count in zip(requests, counts, strict=True):
            request.done = 0
            if count < len(request.features):
                layer.step((request, len(request.features) - count))
        return layer.step(*last_tokens(requests, counts))

    expected = compute()
    layer.poison(number)
    assert all(map(torch.equal, compute(), expected))
    assert all(result.isfinite().all() for result in expected)


@every_format
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["queries", "keys", "values"])
def test_attend_8_bits_nan_stays_in_its_row(library: ctypes.CDLL, name: str, number: float, part: str) -> None:
    torch.manual_seed(0)
    layer = make_layer(library, name, threads=2)
    requests = layer.new_requests([40, 40, 40])
    expected = layer.step(*((request, 40) for request in requests))
    first = {"queries": 0, "keys": 4 * 16, "values": 6 * 16}[part]
    requests[1].features[20, first] = number
    for request in requests:
        request.done = 0
    out = layer.step(*((request, 40) for request in requests))
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[2], expected[2])
    assert torch.equal(out[1][:20], expected[1][:20])
    assert out[1][20, 0].isnan()


@every_format
def test_attend_8_bits_zero_queries_keys_and_values_give_means(library: ctypes.CDLL, name: str) -> None:
    """A factor or a scale of 0 does not hide that later tokens are hidden."""
    layer = make_layer(library, name, torch.float32, heads=1, kv_heads=1)
    (request,) = layer.new_requests([40])
    request.features[:, :32] = 0
    out = run(layer, request, [40])
    torch.testing.assert_close(out.double(), layer.truth(request, layer.queries), atol=1e-2, rtol=1e-2)
    request.features.zero_()
    request.done = 0
    assert (run(layer, request, [40]) == 0).all()


@every_format
def test_attend_8_bits_extreme_scores_give_one_value_or_the_mean(library: ctypes.CDLL, name: str) -> None:
    for scale in (1e3, 1e-3):
        torch.manual_seed(0)
        layer = make_layer(library, name, torch.float32, heads=1, kv_heads=1)
        (request,) = layer.new_requests([500], scale)
        out = run(layer, request, [500]).double() / scale
        values = layer.prepared(request)[1][:, 0] / scale
        if scale == 1e3:  # nearly all queries have one key whose score is far above the others
            distances = torch.cdist(out, values).min(1).values
            assert (distances < 20 * MAX_ERRORS[name]).double().mean() > 0.95
        else:
            means = values.cumsum(0) / torch.arange(1, 501)[:, None]
            torch.testing.assert_close(out, means, atol=10 * MAX_ERRORS[name], rtol=0)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_block_of_8_bits_takes_about_half_the_memory(library: ctypes.CDLL, head_dim: int) -> None:
    """It holds 1.94 and 1.97 times as many tokens, with the scales."""
    sizes = {}
    for cache_format, itemsize in ((abi.CACHE_PLAIN, 2), (abi.CACHE_INT8, 1), (abi.CACHE_FP8, 1)):
        layer = Layer(library, head_dim=head_dim, cache_format=cache_format)
        sizes[cache_format] = itemsize * library.er_block_elements(layer.params)
    assert sizes[abi.CACHE_INT8] == sizes[abi.CACHE_FP8]
    assert sizes[abi.CACHE_PLAIN] / sizes[abi.CACHE_INT8] == 2 * head_dim / (head_dim + 2)
