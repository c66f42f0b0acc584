"""Throughput and latency of `LLM`: all requests at once, and a single request or batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from eagleray.client.outputs import RequestOutput
from eagleray.errors import UserError
from eagleray.hub.locate import checkpoint_dir
from eagleray.llm import LLM
from eagleray.messages.sampling import SamplingParams
from eagleray_bench.figures import Summary, summarize
from eagleray_bench.lengths import RequestShape
from eagleray_bench.workload import DEFAULT_VOCAB_SIZE, BenchRequest, make_requests, max_model_len_of, vocab_size_of

WARM_UP = RequestShape(num_input=16, num_output=4)
WARM_UP_SEED = 2**31


class ThroughputFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run in which all requests were submitted at once."""

    num_requests: int
    num_short: int
    """Requests that `max_model_len` ended before they had the requested number of tokens."""
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class LatencyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of a batch in milliseconds."""

    ttft_ms: Summary
    """Duration of a batch of one-token requests: prompts, one token each, and the way there and back."""
    tpot_ms: Summary
    """Remaining duration of a batch, divided by its tokens but the first."""
    e2e_ms: Summary
    """Duration of the whole batch."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of every repetition."""

    ttft: list[float]
    e2e: list[float]
    tpot: list[float]

    def figures(self) -> LatencyFigures:
        return LatencyFigures(
            ttft_ms=_milliseconds(self.ttft), tpot_ms=_milliseconds(self.tpot), e2e_ms=_milliseconds(self.e2e)
        )


def vocab_size(llm: LLM) -> int:
    """Return the size of the model's vocabulary, or the default if the checkpoint does not give it."""
    return vocab_size_of(checkpoint_dir(llm.config.model)) or DEFAULT_VOCAB_SIZE


def max_model_len(llm: LLM) -> int | None:
    """Return the model's maximum length in tokens; None if the checkpoint does not give it."""
    model = llm.config.model
    wanted = model.max_model_len
    return wanted if isinstance(wanted, int) else max_model_len_of(checkpoint_dir(model))


def measure_throughput(llm: LLM, requests: Sequence[BenchRequest], *, detokenize: bool) -> ThroughputFigures:
    """Submit all of `requests` at once, after a short request that warms up."""
    warm_up(llm)
    figures, _ = run_all(llm, requests, detokenize=detokenize)
    return figures


def warm_up(llm: LLM) -> None:
    """Run one short request."""
    _generate(llm, make_requests([WARM_UP], vocab_size=vocab_size(llm), seed=WARM_UP_SEED), detokenize=True)


def run_all(
    llm: LLM, requests: Sequence[BenchRequest], *, detokenize: bool, routed_experts: bool = False
) -> tuple[ThroughputFigures, list[RequestOutput]]:
    """Submit all of `requests` at once. `routed_experts`: request the experts that compute each token."""
    duration, outputs = _generate(llm, requests, detokenize=detokenize, routed_experts=routed_experts)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    num_input = sum(len(request.prompt) for request in requests)
    figures = ThroughputFigures(
        num_requests=len(requests),
        num_short=sum(length < request.num_output for length, request in zip(lengths, requests, strict=True)),
        duration_s=duration,
        requests_per_s=len(requests) / duration,
        output_tokens_per_s=sum(lengths) / duration,
        total_tokens_per_s=(num_input + sum(lengths)) / duration,
        num_input_tokens=num_input,
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
        num_output_tokens=sum(lengths),
    )
    return figures, outputs


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """Options of `measure_latency`, each a flag of the same name. A batch is measured `iterations` times.

    Raises `UserError` for a number that is too small.
    """

    batch_size: int = 1
    input_len: int = 32
    output_len: int = 128
    iterations: int = 10
    warm_up: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "input_len": 1, "output_len": 2, "iterations": 1, "warm_up": 0, "seed": 0}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise UserError(
                    f"--{name.replace('_', '-')} must be at least {number}, but it is {getattr(self, name)}"
                )


def measure_latency(llm: LLM, batches: LatencyOptions) -> Latency:
    """Measure batches whose prompts never repeat, so that the prefix cache has no hits.

    Raises `UserError` if prompt and answer do not fit into the model's length.
    """
    num_batches = batches.iterations + batches.warm_up
    seeds = np.random.SeedSequence(batches.seed).generate_state(2 * num_batches).tolist()

    def seconds(num_output: int) -> float:
        shapes = [RequestShape(num_input=batches.input_len, num_output=num_output)] * batches.batch_size
        requests = make_requests(shapes, vocab_size=vocab_size(llm), seed=seeds.pop())
        duration, outputs = _generate(llm, requests, detokenize=True)
        if any(len(output.outputs[0].token_ids) < num_output for output in outputs):
            raise UserError(
                f"{batches.input_len} tokens in and {num_output} out do not fit into the model's length: ask for less, "
                "or raise --max-model-len"
            )
        return duration

    pairs = [(seconds(1), seconds(batches.output_len)) for _ in range(num_batches)][batches.warm_up :]
    return Latency(
        ttft=[first for first, _ in pairs],
        e2e=[whole for _, whole in pairs],
        tpot=[(whole - first) / (batches.output_len - 1) for first, whole in pairs],
    )


def _generate(
    llm: LLM, requests: Sequence[BenchRequest], *, detokenize: bool, routed_experts: bool = False
) -> tuple[float, list[RequestOutput]]:
    """Generate greedily, past end-of-sequence tokens; return the duration in seconds and the outputs."""
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=request.num_output,
            ignore_eos=True,
            detokenize=detokenize,
            return_routed_experts=routed_experts,
        )
        for request in requests
    ]
    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began, outputs


def _milliseconds(seconds: Sequence[float]) -> Summary:
    found = summarize(seconds, scale=1e3)
    assert found is not None, "there is at least one repetition"
    return found
