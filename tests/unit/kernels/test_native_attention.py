"""Attention over the paged cache equals float64, and each token has the same bits however it is computed."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from native_layer import DTYPES, EPS, Layer, run
from native_requests import error, last_tokens
from torch import Tensor

from eagleray.kernels.torch.attention import attend_with_sinks


def check_accuracy(library: ctypes.CDLL, dtype: torch.dtype, size: int, **shape: int) -> None:
    """Compare with torch for the same queries, keys and values."""
    torch.manual_seed(size)
    layer = Layer(library, dtype, **shape)
    (request,) = layer.new_requests([size])
    out = run(layer, request, [size])
    truth = layer.truth(request, layer.queries)
    if dtype == torch.float32:
        torch.testing.assert_close(out.double(), truth, atol=3e-6, rtol=1e-5)
    keys, values = (x.repeat_interleave(layer.group, dim=1).transpose(0, 1) for x in layer.prepared(request))
    queries = layer.queries.view(size, layer.params.num_heads, -1).transpose(0, 1)
    distance = torch.arange(size)[:, None] - torch.arange(size)
    seen = (distance >= 0) & ((distance < layer.params.window) | (layer.params.window == 0))
    batch = queries[None], keys[None], values[None]
    if layer.sinks is None:
        torchs = torch.nn.functional.scaled_dot_product_attention(*batch, attn_mask=seen)
    else:
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
        torchs = attend_with_sinks(*batch, mask, layer.sinks[:, None])
    assert error(out, truth) <= 1.2 * error(torchs[0].transpose(0, 1).flatten(1), truth) + 1e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [4, 6, 16, 24, 64, 80, 96, 128, 256])
def test_attend_head_dims_equal_float64(library: ctypes.CDLL, dtype: torch.dtype, head_dim: int) -> None:
    check_accuracy(library, dtype, 300, head_dim=head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (2, 1), (8, 2), (14, 2), (71, 1)])
def test_attend_grouped_heads_equal_float64(
    library: ctypes.CDLL, dtype: torch.dtype, heads: int, kv_heads: int
) -> None:
    check_accuracy(library, dtype, 100, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 5, 8, 16, 24, 32, 256, 512])
@pytest.mark.parametrize("window", [0, 1, 40])
def test_attend_blocks_and_windows_equal_float64(
    library: ctypes.CDLL, dtype: torch.dtype, block_size: int, window: int
) -> None:
    check_accuracy(library, dtype, 600, block_size=block_size, window=window, heads=2, kv_heads=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (71, 1)])
def test_attend_sinks_equal_float64(
    library: ctypes.CDLL, dtype: torch.dtype, heads: int, kv_heads: int, window: int
) -> None:
    check_accuracy(library, dtype, 300, heads=heads, kv_heads=kv_heads, window=window, sinks=True)


@pytest.mark.parametrize("score", [-1e4, 1e4])
def test_attend_extreme_sinks_take_nothing_or_everything(library: ctypes.CDLL, score: float) -> None:
    layer, plain = (Layer(library, torch.float32, sinks=sinks) for sinks in (True, False))
    assert layer.sinks is not None
    layer.sinks.fill_(score)
    (request,) = layer.new_requests([40])
    (twin,) = plain.new_requests([40])
    twin.features = request.features
    expected = run(plain, twin, [40]) if score < 0 else torch.zeros(40, layer.params.num_heads * layer.params.head_dim)
    assert torch.equal(run(layer, request, [40]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head_dim", [4, 6, 16, 80, 128, 256])
@pytest.mark.parametrize("block_size", [5, 16, 32])
def test_prepare_writes_queries_keys_and_values(
    library: ctypes.CDLL, dtype: torch.dtype, norm: bool, head_dim: int, block_size: int
) -> None:
    torch.manual_seed(head_dim)
    layer = Layer(library, dtype, head_dim=head_dim, block_size=block_size, norm=norm, threads=2)
    first, second = layer.new_requests([70, 9])
    layer.step((first, 33), (second, 9))
    layer.step((first, 37))
    heads = first.features.double().view(70, -1, head_dim)
    queries, keys, values = heads.split([4, 2, 2], dim=1)

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        a, b = x.chunk(2, dim=-1)
        cos, sin = (table[:70, None].double() for table in (layer.cos, layer.sin))
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    rounding = {"rtol": 2**-8 * 1.001, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    cached = layer.prepared(first)
    torch.testing.assert_close(cached[0].double(), turned(keys, layer.norms[1]), **rounding)
    assert torch.equal(cached[1], values.to(dtype))
    expected = turned(queries, layer.norms[0])[33:].flatten(1)
    torch.testing.assert_close(layer.queries.double(), expected, **rounding)
    # nothing else was written
    keys, values = layer.views()
    taken = torch.zeros(layer.num_blocks, layer.lanes, dtype=torch.bool)
    for request in (first, second):
        for p in range(request.done):
            taken[request.blocks[p // block_size], p % block_size] = True
    for x in (keys, values):
        assert (x.transpose(1, 2)[~taken] == 0).all()
        assert (x.transpose(1, 2)[taken] != 0).all()


def check_steps(library: ctypes.CDLL, dtype: torch.dtype, size: int, **shape: int) -> None:
    """Check that a token has the same bits for every number of tokens in a step and of threads."""
    torch.manual_seed(size)
    layer = Layer(library, dtype, **shape)
    (request,) = layer.new_requests([size])
    expected = run(layer, request, [size])
    assert expected.isfinite().all()
    for counts in ([1] * size, [2, 5, 20, size - 28, 1], [size - 3, 1, 1, 1]):
        request.done = 0
        layer.cache.zero_()
        assert torch.equal(run(layer, request, counts), expected)
    for threads in (2, 3):
        again = Layer(library, dtype, **shape, threads=threads)
        again.cache, again.num_blocks = layer.cache, layer.num_blocks
        request.done = 0
        assert torch.equal(run(again, request, [size // 2, size - size // 2]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "heads"), [(6, 2), (16, 1), (16, 7), (64, 2), (80, 4), (128, 3), (256, 2)])
def test_attend_token_by_token_has_the_same_bits(
    library: ctypes.CDLL, dtype: torch.dtype, head_dim: int, heads: int
) -> None:
    check_steps(library, dtype, 300, head_dim=head_dim, heads=heads, kv_heads=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 5, 8, 16, 32])
@pytest.mark.parametrize("window", [0, 3, 50, 300])
def test_attend_token_by_token_with_windows_has_the_same_bits(
    library: ctypes.CDLL, dtype: torch.dtype, block_size: int, window: int
) -> None:
    check_steps(library, dtype, 330, block_size=block_size, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 50])
def test_attend_token_by_token_with_sinks_has_the_same_bits(
    library: ctypes.CDLL, dtype: torch.dtype, window: int
) -> None:
    check_steps(library, dtype, 1100, window=window, sinks=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_older_processor_equals_float64(other_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    check_accuracy(other_library, dtype, 300, head_dim=80)
    check_steps(other_library, dtype, 300, head_dim=128)
    check_steps(other_library, dtype, 290, head_dim=64, heads=7, kv_heads=1, block_size=8, window=50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_attend_row_in_a_batch_has_the_same_bits(
    library: ctypes.CDLL, dtype: torch.dtype, window: int, threads: int
) -> None:
    torch.manual_seed(0)
    sizes, counts = [1, 17, 300, 900, 2000, 40, 31, 700], [1, 1, 1, 1, 1, 40, 30, 150]
    layer = Layer(library, dtype, head_dim=64, window=window, threads=threads)
    requests = layer.new_requests(sizes)
    for request, count in zip(requests, counts, strict=True):
        if request.done < len(request.features) - count:
            layer.step((request, len(request.features) - count))
    together = layer.step(*last_tokens(requests, counts))
    layer.threads = 1
    for work, result in zip(last_tokens(requests, counts), together, strict=True):
        assert torch.equal(layer.step(work)[0], result)
        queries = layer.queries
        torch.testing.assert_close(result.double(), layer.truth(work[0], queries), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 700])
def test_attend_long_context_on_many_threads_has_the_same_bits(
    library: ctypes.CDLL, dtype: torch.dtype, window: int
) -> None:
    torch.manual_seed(0)
    shape = {"heads": 3, "kv_heads": 1, "head_dim": 32, "window": window}
    layer = Layer(library, dtype, **shape)
    requests = layer.new_requests([3000, 70, 1500])
    for request in requests:
        layer.step((request, len(request.features) - 3))
    expected = [layer.step(*((request, 1) for request in requests)) for _ in range(3)]
    for threads in (2, 3, 5):
        again = Layer(library, dtype, **shape, threads=threads)
        again.cache, again.num_blocks = layer.cache, layer.num_blocks
        for step, results in enumerate(expected):
            for request in requests:
                request.done = len(request.features) - 3 + step
            assert all(map(torch.equal, again.step(*((request, 1) for request in requests)), results))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [math.nan, math.inf, -3e38])
@pytest.mark.parametrize(("block_size", "head_dim"), [(5, 16), (16, 64), (32, 20)])
def test_attend_reused_blocks_leave_no_trace(
    library: ctypes.CDLL, dtype: torch.dtype, number: float, block_size: int, head_dim: int
) -> None:
    torch.manual_seed(0)
    layer = Layer(library, dtype, block_size=block_size, head_dim=head_dim, threads=2)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_overflow_stays_in_its_row(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Layer(library, dtype, threads=2)
    requests = layer.new_requests([40, 40, 40])
    expected = layer.step(*((request, 40) for request in requests))
    requests[1].features[20:] = math.inf
    for request in requests:
        request.done = 0
    out = layer.step(*((request, 40) for request in requests))
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[2], expected[2])
    assert out[1][20:].isnan().all()


def test_attend_extreme_scores_equal_float64(library: ctypes.CDLL) -> None:
    """Large scores give one key all the attention, small ones give all keys the same."""
    for scale in (1e3, 1e-3):
        layer = Layer(library, torch.float32, heads=1, kv_heads=1)
        (request,) = layer.new_requests([500], scale)
        out = run(layer, request, [500])
        torch.testing.assert_close(out.double(), layer.truth(request, layer.queries), atol=1e-5 * scale, rtol=1e-4)
