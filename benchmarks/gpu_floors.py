"""The least work of a model's steps: bytes that must be read and operations that must be computed. Pure.

What a step computes besides products and attention is left out, so the floor is never above the best possible time. A
floor is a sum of parts, each of which takes the longer of its bytes at the read bandwidth and its operations at the
rate of products: the products of a pass share weights, while the attention of every row has its own keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eagleray.models.spec import ModelSpec

MXFP4_BYTES = 0.5 + 1 / 32
"""Bytes of a weight: four bits, and a byte of scale for 32 of them."""
FP8_BYTES = 1.0
"""Bytes of a weight; a scale for each block of 128 x 128 weights does not count."""
BF16_BYTES = 2.0


@dataclass(frozen=True)
class DeviceRates:
    """The rates that the device reached in the same run."""

    read: float
    """Bytes per second."""
    products: float
    """Operations per second of products in bfloat16."""


@dataclass(frozen=True)
class Work:
    """Bytes to read and operations to compute, which overlap."""

    num_bytes: float = 0.0
    operations: float = 0.0

    def seconds(self, rates: DeviceRates) -> float:
        return max(self.num_bytes / rates.read, self.operations / rates.products)


@dataclass(frozen=True)
class StepWork:
    """The two parts of a step, which follow each other."""

    products: Work
    attention: Work

    def seconds(self, rates: DeviceRates) -> float:
        return self.products.seconds(rates) + self.attention.seconds(rates)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a weight, by its place in the model."""

    layers: float = BF16_BYTES
    experts: float = BF16_BYTES
    head: float = BF16_BYTES

    @classmethod
    def of(cls, spec: ModelSpec, *, is_fp8: bool = False) -> WeightBytes:
        """Return the bytes of weights as the checkpoint has them, or with layers in FP8."""
        if is_fp8:
            return cls(layers=FP8_BYTES, experts=FP8_BYTES)
        is_mxfp4 = spec.moe is not None and spec.moe.is_mxfp4
        return cls(experts=MXFP4_BYTES if is_mxfp4 else BF16_BYTES)


@dataclass(frozen=True)
class RowWork:
    """One row of a step, with `num_tokens` new tokens after `num_cached` cached ones."""

    num_tokens: int
    num_cached: int


def decode_rows(num_rows: int, context: int) -> list[RowWork]:
    """Return rows that compute one token each, which sees `context` keys with its own."""
    return [RowWork(1, context - 1)] * num_rows


def expected_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Return the expected number of experts that `num_tokens` tokens use, if each token chooses `top_k` at random."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def step_work(
    spec: ModelSpec,
    rows: Iterable[RowWork],
    *,
    weights: WeightBytes | None = None,
    cache_bytes: float = BF16_BYTES,
    num_used_experts: float | None = None,
) -> StepWork:
    """Return the work of a step in which every row samples.

    `cache_bytes`: bytes of a cached number. `num_used_experts`: experts of a layer that have a token, on average over
    the layers; by default those of a random choice. Attention by latents is not counted.
    """
    assert spec.mla is None, "the floor of latent attention is not known here"
    rows, weights = list(rows), weights or WeightBytes.of(spec)
    num_tokens = sum(row.num_tokens for row in rows)
    return StepWork(
        products=_products(spec, weights, num_tokens, len(rows), num_used_experts),
        attention=_attention(spec, rows, cache_bytes),
    )


def throughput_seconds(
    spec: ModelSpec, rates: DeviceRates, *, num_requests: int, num_prompt: int, num_output: int
) -> float:
    """Return the least seconds of requests that are computed side by side: their prompts, and then the steps in which
    each has one token, with keys of the average length."""
    prompts = step_work(spec, [RowWork(num_prompt, 0)] * num_requests).seconds(rates)
    decodes = step_work(spec, decode_rows(num_requests, num_prompt + num_output // 2)).seconds(rates)
    return prompts + num_output * decodes


def _products(
    spec: ModelSpec, weights: WeightBytes, num_tokens: int, num_logits: int, num_used_experts: float | None
) -> Work:
    shared, dense, expert = _weights_of_parts(spec)
    num_moe = 0 if spec.moe is None else sum(spec.moe.layers)
    num_dense = spec.num_layers - num_moe
    head = spec.hidden_size * spec.vocab_size
    in_layers = spec.num_layers * shared + num_dense * dense
    in_experts = operations_of_experts = 0.0
    if spec.moe is not None:
        router = spec.hidden_size * (spec.moe.num_experts + 3 * spec.moe.shared_intermediate_size)
        in_layers += num_moe * router
        if num_used_experts is None:
            num_used_experts = expected_experts(spec.moe.num_experts, spec.moe.top_k, num_tokens)
        in_experts = num_moe * num_used_experts * expert
        operations_of_experts = 2.0 * num_tokens * num_moe * spec.moe.top_k * expert
    return Work(
        num_bytes=in_layers * weights.layers + in_experts * weights.experts + head * weights.head,
        operations=2.0 * num_tokens * in_layers + operations_of_experts + 2.0 * num_logits * head,
    )


def _weights_of_parts(spec: ModelSpec) -> tuple[int, int, int]:
    """Return the weights of a layer's attention, of a dense layer's projections, and of one expert."""
    attention = 2 * spec.hidden_size * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    expert = 0 if spec.moe is None else 3 * spec.hidden_size * spec.moe.intermediate_size
    return attention, 3 * spec.hidden_size * spec.intermediate_size, expert


def _attention(spec: ModelSpec, rows: list[RowWork], cache_bytes: float) -> Work:
    key_and_value = 2 * spec.num_kv_heads * spec.head_dim * cache_bytes
    num_bytes = operations = 0.0
    for window in spec.windows:
        for row in rows:
            num_bytes += _keys_read(row, window) * key_and_value
            # a query's product with a key, and that of its weight with a value
            operations += 4.0 * spec.num_heads * spec.head_dim * _pairs(row, window)
    return Work(num_bytes, operations)


def _keys_read(row: RowWork, window: int | None) -> int:
    context = row.num_cached + row.num_tokens
    return context if window is None else min(context, row.num_tokens + window - 1)


def _pairs(row: RowWork, window: int | None) -> int:
    """Return the number of pairs of a query and a key that it sees."""
    if window is None:
        return row.num_tokens * row.num_cached + row.num_tokens * (row.num_tokens + 1) // 2
    # the first queries see all keys, the later ones a whole window
    num_short = min(max(window - row.num_cached, 0), row.num_tokens)
    short = num_short * row.num_cached + num_short * (num_short + 1) // 2
    return short + (row.num_tokens - num_short) * window
