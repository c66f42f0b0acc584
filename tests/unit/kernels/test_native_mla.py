"""Multi-head latent attention of the CPU kernels equals float64, and each token has the same bits however it is
computed."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from native_requests import Batch, Request, error, last_tokens, shuffled_blocks
from torch import Tensor

from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.params import MLAParams
from eagleray.kernels.torch.attention import DeviceBatch, ForwardContext, build_attention_metadata
from eagleray.kernels.torch.mla import LatentAttention

DTYPES = (torch.float32, torch.bfloat16)  # a dtype's number is its index
EPS = 1e-6
MAX_CONTEXT = 4096


class Layer:
    """A layer's weights and cache, and the requests that have blocks of it."""

    def __init__(
        self,
        library: ctypes.CDLL,
        dtype: torch.dtype = torch.bfloat16,
        *,
        heads: int = 4,
        rank: int = 32,
        plain: int = 16,
        rotated: int = 8,
        value: int = 16,
        block_size: int = 16,
        max_tokens: int = 256,
        threads: int = 1,
    ) -> None:
        self.library, self.dtype, self.block_size = library, dtype, block_size
        self.params = MLAParams(
            num_heads=heads,
            plain_dim=plain,
            rotated_dim=rotated,
            value_dim=value,
            scale=(plain + rotated) ** -0.5,
            norm=(torch.rand(rank) + 0.5).to(dtype),
            norm_eps=EPS,
            keys=(torch.randn(heads, plain, rank) * rank**-0.5).to(dtype),
            values=(torch.randn(heads, value, rank) * rank**-0.5).to(dtype),
        )
        self.weights = CpuBackend(library, dtype, num_threads=1).pack_mla(self.params)
        self.c_params = self.weights.c_params(block_size)
        self.angles = torch.arange(MAX_CONTEXT)[:, None] * 0.5 ** torch.arange(rotated // 2)
        self.cos, self.sin = self.angles.cos(), self.angles.sin()
        self.query_size, self.cached_size = plain + rotated, rank + rotated
        self.cache = torch.zeros(0, dtype=dtype)
        self.prepared = torch.zeros(0)
        self.splits = torch.zeros(0)
        self.divide(threads=threads, max_tokens=max_tokens)

    def divide(self, *, threads: int, max_tokens: int = 256) -> None:
        """Compute the next steps with this number of threads, and of tokens at a time."""
        self.threads, self.max_tokens = threads, max_tokens
        self.splits = torch.zeros(self.library.er_mla_scratch_size(self.c_params, MAX_CONTEXT, threads) // 4)
        self.latents = torch.empty(max_tokens, self.heads * len(self.params.norm), dtype=self.dtype)

    @property
    def heads(self) -> int:
        return self.params.num_heads

    def new_requests(self, sizes: list[int], scale: float = 1.0) -> list[Request]:
        """Make requests of these sizes with a new cache. A token has the queries of all heads, then its latent."""
        blocks, num_blocks = shuffled_blocks(sizes, self.block_size)
        self.cache = torch.zeros(num_blocks, self.block_size, self.cached_size, dtype=self.dtype)
        width = self.heads * self.query_size + self.cached_size
        return [Request(torch.randn(n, width) * scale, mine) for n, mine in zip(sizes, blocks, strict=True)]

    def inputs(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and latents."""
        queries, latents = features.split([self.heads * self.query_size, self.cached_size], dim=1)
        return queries.contiguous(), latents.contiguous()

    def step(self, *work: tuple[Request, int]) -> list[Tensor]:
        """Compute the next tokens of these requests, and return their results."""
        batch = Batch(work, self.block_size)
        queries, latents = self.inputs(batch.features)
        self.prepared = torch.empty(queries.shape, dtype=self.dtype)
        out = torch.full((len(queries), self.heads * self.params.value_dim), 7, dtype=self.dtype)
        scratch = abi.CMLAScratch(
            splits=self.splits.data_ptr(), latents=self.latents.data_ptr(), max_tokens=self.max_tokens
        )
        inputs = queries, latents, self.cos, self.sin, self.prepared, self.cache, out
        addresses = [x.data_ptr() for x in inputs]
        numbers = DTYPES.index(self.dtype), self.threads
        self.library.er_attend_mla(self.c_params, batch.metadata, *addresses, scratch, *numbers)
        return batch.finish(out)

    def cached(self, request: Request) -> Tensor:
        """Return what the cache has of the request, [done, rank + rotated_dim]."""
        return self.cache.flatten(0, 1)[request.slots(self.block_size)]

    def truth(self, request: Request) -> Tensor:
        """Return the attention of the last prepared queries over the cache, in float64."""
        n, rank = len(self.prepared), len(self.params.norm)
        queries = self.prepared.view(n, self.heads, -1).double()
        latents, rotated = self.cached(request).double().split([rank, self.params.rotated_dim], dim=1)
        keys = torch.einsum("kr,hpr->khp", latents, self.params.keys.double())
        keys = torch.cat((keys, rotated[:, None].expand(-1, self.heads, -1)), dim=-1)
        scores = torch.einsum("qhp,khp->hqk", queries, keys) * self.params.scale
        hidden = torch.arange(request.done - n, request.done)[:, None] < torch.arange(request.done)
        probabilities = scores.masked_fill(hidden, -math.inf).softmax(-1)
        values = torch.einsum("kr,hvr->khv", latents, self.params.values.double())
        return torch.einsum("hqk,khv->qhv", probabilities, values).flatten(1)

    def torchs(self, request: Request) -> Tensor:
        """Return what plain torch computes for the whole request."""
        size, positions = request.done, torch.arange(request.done)
        batch = DeviceBatch(
            token_ids=positions,
            positions=positions,
            slot_mapping=request.slots(self.block_size),
            block_table=torch.tensor([request.blocks]),
            seq_lens=[size],
            query_lens=[size],
            num_decodes=0,
        )
        cos, sin = self.cos[:size], self.sin[:size]
        cache = torch.zeros_like(self.cache)
        context = ForwardContext(
            cos=torch.cat((cos, cos), dim=1)[:, None],
            sin=torch.cat((-sin, sin), dim=1)[:, None],
            slot_mapping=batch.slot_mapping,
            metadata={None: build_attention_metadata(batch, cache, None)},
        )
        return LatentAttention(self.params)(*self.inputs(request.features), cache, context)


def run(layer: Layer, request: Request, counts: list[int]) -> Tensor:
    """Compute a request in steps of `counts` tokens."""
    return torch.cat([layer.step((request, count))[0] for count in counts])


def check_accuracy(library: ctypes.CDLL, dtype: torch.dtype, size: int, **shape: int) -> None:
    """Compare with float64 and with plain torch."""
    torch.manual_seed(size)
    layer = Layer(library, dtype, **shape)
    (request,) = layer.new_requests([size])
    out = run(layer, request, [size])
    truth = layer.truth(request)
    if dtype == torch.float32:
        torch.testing.assert_close(out.double(), truth, atol=3e-6, rtol=1e-5)
    # its prompts round neither absorbed queries nor weighted latents
    assert error(out, truth) <= 2.0 * error(layer.torchs(request), truth) + 1e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 16, 20, 33, 48, 71])
def test_attend_mla_numbers_of_heads_equal_float64(library: ctypes.CDLL, dtype: torch.dtype, heads: int) -> None:
    check_accuracy(library, dtype, 150, heads=heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rank", "plain", "rotated", "value"),
    [(2, 2, 2, 2), (12, 6, 4, 10), (64, 32, 8, 6), (80, 16, 16, 34), (200, 24, 2, 48), (512, 128, 64, 128)],
)
def test_attend_mla_sizes_equal_float64(
    library: ctypes.CDLL, dtype: torch.dtype, rank: int, plain: int, rotated: int, value: int
) -> None:
    check_accuracy(library, dtype, 300, rank=rank, plain=plain, rotated=rotated, value=value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 5, 16, 24, 256, 512])
@pytest.mark.parametrize("size", [256, 257, 800])
def test_attend_mla_blocks_and_contexts_equal_float64(
    library: ctypes.CDLL, dtype: torch.dtype, block_size: int, size: int
) -> None:
    check_accuracy(library, dtype, size, block_size=block_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [12, 32, 80])
@pytest.mark.parametrize("block_size", [5, 16])
def test_attend_mla_writes_latents_and_queries(
    library: ctypes.CDLL, dtype: torch.dtype, rank: int, block_size: int
) -> None:
    torch.manual_seed(rank)
    layer = Layer(library, dtype, rank=rank, block_size=block_size, threads=2)
    first, second = layer.new_requests([70, 9])
    layer.step((first, 33), (second, 9))
    layer.step((first, 37))

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = (table[:70].double().view(70, *[1] * (x.dim() - 2), -1) for table in (layer.cos, layer.sin))
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    queries, latents = (x.double() for x in layer.inputs(first.features))
    scale = (latents[:, :rank].square().mean(1, keepdim=True) + EPS).rsqrt()
    normed = latents[:, :rank] * scale * layer.params.norm.double()
    rounding = {"rtol": 2**-8 * 1.001, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    expected = torch.cat((normed, turned(latents[:, rank:])), dim=1)
    torch.testing.assert_close(layer.cached(first).double(), expected, **rounding)
    plain, rotated = queries.unflatten(1, (layer.heads, -1)).tensor_split([layer.params.plain_dim], dim=-1)
    expected = torch.cat((plain, turned(rotated)), dim=-1)[33:].flatten(1)
    torch.testing.assert_close(layer.prepared.double(), expected, **rounding)
    # nothing else was written
    taken = torch.zeros(len(layer.cache) * block_size, dtype=torch.bool)
    for request in (first, second):
        taken[request.slots(block_size)] = True
    assert (layer.cache.flatten(0, 1)[~taken] == 0).all()
    assert (layer.cache.flatten(0, 1)[taken] != 0).all()


def check_steps(library: ctypes.CDLL, dtype: torch.dtype, size: int, **shape: int) -> None:
    """Check that a token has the same bits for every number of tokens in a step and at a time, and of threads."""
    torch.manual_seed(size)
    layer = Layer(library, dtype, **shape)
    (request,) = layer.new_requests([size])
    expected = run(layer, request, [size])
    assert expected.isfinite().all()
    for counts in ([1] * size, [2, 5, 20, size - 28, 1], [size - 3, 1, 1, 1]):
        request.done = 0
        layer.cache.zero_()
        assert torch.equal(run(layer, request, counts), expected)
    for threads, max_tokens in ((1, 7), (2, 64), (3, 256), (8, 1)):
        layer.divide(threads=threads, max_tokens=max_tokens)
        request.done = 0
        assert torch.equal(run(layer, request, [size // 2, size - size // 2]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 1, "rank": 12, "plain": 6, "rotated": 2, "value": 4},
        {"heads": 3, "block_size": 5},
        {"heads": 16, "rank": 64},
        {"heads": 20, "rank": 80, "block_size": 32},
        {"heads": 71, "rank": 16},
    ],
)
def test_attend_mla_token_by_token_has_the_same_bits(
    library: ctypes.CDLL, dtype: torch.dtype, shape: dict[str, int]
) -> None:
    check_steps(library, dtype, 530, **shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_mla_other_processor_equals_float64(other_library: ctypes.CDLL, dtype: torch.dtype) -> None:
    check_accuracy(other_library, dtype, 300, rank=80, heads=5)
    check_steps(other_library, dtype, 270, heads=20, rank=24, block_size=8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("threads", "max_tokens"), [(1, 256), (2, 256), (3, 50)])
def test_attend_mla_row_in_a_batch_has_the_same_bits(
    library: ctypes.CDLL, dtype: torch.dtype, threads: int, max_tokens: int
) -> None:
    torch.manual_seed(0)
    sizes, counts = [1, 17, 300, 900, 2000, 40, 31, 700], [1, 1, 1, 1, 1, 40, 30, 150]
    layer = Layer(library, dtype)
    requests = layer.new_requests(sizes)
    for request, count in zip(requests, counts, strict=True):
        if request.done < len(request.features) - count:
            layer.step((request, len(request.features) - count))
    layer.divide(threads=threads, max_tokens=max_tokens)
    together = layer.step(*last_tokens(requests, counts))
    layer.divide(threads=1)
    for work, result in zip(last_tokens(requests, counts), together, strict=True):
        assert torch.equal(layer.step(work)[0], result)
        torch.testing.assert_close(result.double(), layer.truth(work[0]), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [3, 71])
def test_attend_mla_long_context_on_many_threads_has_the_same_bits(
    library: ctypes.CDLL, dtype: torch.dtype, heads: int
) -> None:
    torch.manual_seed(0)
    layer = Layer(library, dtype, heads=heads)
    requests = layer.new_requests([3000, 70, 1500])
    for request in requests:
        layer.step((request, len(request.features) - 1))
    expected = layer.step(*((request, 1) for request in requests))
    for threads in (2, 3, 5, 8):
        layer.divide(threads=threads)
        assert all(map(torch.equal, layer.step(*last_tokens(requests, [1, 1, 1])), expected))
        assert all(map(torch.equal, layer.step(*last_tokens(requests, [1, 1, 1])), expected)), "with the same scratch"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [math.nan, math.inf, -3e38])
@pytest.mark.parametrize(("block_size", "rank"), [(5, 12), (16, 64), (32, 80)])
def test_attend_mla_reused_blocks_leave_no_trace(
    library: ctypes.CDLL, dtype: torch.dtype, number: float, block_size: int, rank: int
) -> None:
    torch.manual_seed(0)
    layer = Layer(library, dtype, block_size=block_size, rank=rank, threads=2)
    requests = layer.new_requests([270, 33, 1, 100])
    counts = [1, 33, 1, 60]

    def compute() -> list[Tensor]:
        for request, count in zip(requests, counts, strict=True):
            request.done = 0
            if count < len(request.features):
                layer.step((request, len(request.features) - count))
        return layer.step(*last_tokens(requests, counts))

    expected = compute()
    layer.cache.fill_(number)
    assert all(map(torch.equal, compute(), expected))
    assert all(result.isfinite().all() for result in expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_mla_overflow_stays_in_its_row(library: ctypes.CDLL, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("scale", [1e3, 1e-3])
def test_attend_mla_extreme_scores_equal_float64(library: ctypes.CDLL, scale: float) -> None:
    """Large scores give one latent all the attention, small ones give all latents the same."""
    torch.manual_seed(0)
    layer = Layer(library, torch.float32, heads=1)
    (request,) = layer.new_requests([500])
    request.features[:, : layer.query_size] *= scale
    out = run(layer, request, [500])
    torch.testing.assert_close(out.double(), layer.truth(request), atol=1e-5 * max(scale, 1.0), rtol=1e-4)
