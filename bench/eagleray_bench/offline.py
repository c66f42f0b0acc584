"""`LLM` measured: how much it generates when it has much to do, and how fast a single answer is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from eagleray.client.outputs import RequestOutput
from eagleray.config.resolve import checkpoint_dir
from eagleray.errors import UserError
from eagleray.llm import LLM
from eagleray.messages.sampling import SamplingParams
from eagleray_bench.figures import Summary, summary
from eagleray_bench.lengths import Shape
from eagleray_bench.workload import DEFAULT_VOCAB_SIZE, Job, make_jobs, max_model_len_of, vocab_size_of

__all__ = [
    "Batches",
    "Latency",
    "LatencyFigures",
    "ThroughputFigures",
    "answer_all",
    "max_model_len",
    "measure_latency",
    "measure_throughput",
    "vocab_size",
    "warm_up",
]

WARM_UP = Shape(num_input=16, num_output=4)
WARM_UP_SEED = 2**31


class ThroughputFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All requests given at once."""

    num_requests: int
    num_short: int
    """Completed with fewer tokens than asked for: `max_model_len` ended them."""
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class LatencyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds."""

    ttft_ms: Summary
    """Until a batch of one-token requests has ended: the prompts, a token each, and the way there and back."""
    tpot_ms: Summary
    """The rest of a batch's time, over its tokens but the first."""
    e2e_ms: Summary
    """Until the batch has ended."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each repetition."""

    ttft: list[float]
    e2e: list[float]
    tpot: list[float]

    def figures(self) -> LatencyFigures:
        return LatencyFigures(
            ttft_ms=_milliseconds(self.ttft), tpot_ms=_milliseconds(self.tpot), e2e_ms=_milliseconds(self.e2e)
        )


def vocab_size(llm: LLM) -> int:
    """Of the model that `llm` has."""
    return vocab_size_of(checkpoint_dir(llm.config.model)) or DEFAULT_VOCAB_SIZE


def max_model_len(llm: LLM) -> int | None:
    """Its longest sequence; None if the checkpoint does not say."""
    model = llm.config.model
    return model.max_model_len or max_model_len_of(checkpoint_dir(model))


def measure_throughput(llm: LLM, jobs: Sequence[Job], *, detokenize: bool) -> ThroughputFigures:
    """All of `jobs` at once. A short request warms up first."""
    warm_up(llm)
    figures, _ = answer_all(llm, jobs, detokenize=detokenize)
    return figures


def warm_up(llm: LLM) -> None:
    """With a short request."""
    _generate(llm, make_jobs([WARM_UP], vocab_size=vocab_size(llm), seed=WARM_UP_SEED), detokenize=True)


def answer_all(
    llm: LLM, jobs: Sequence[Job], *, detokenize: bool, routed_experts: bool = False
) -> tuple[ThroughputFigures, list[RequestOutput]]:
    """All of `jobs` at once. `routed_experts`: ask which experts compute each token."""
    duration, outputs = _generate(llm, jobs, detokenize=detokenize, routed_experts=routed_experts)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    num_input = sum(len(job.prompt) for job in jobs)
    figures = ThroughputFigures(
        num_requests=len(jobs),
        num_short=sum(length < job.num_output for length, job in zip(lengths, jobs, strict=True)),
        duration_s=duration,
        requests_per_s=len(jobs) / duration,
        output_tokens_per_s=sum(lengths) / duration,
        total_tokens_per_s=(num_input + sum(lengths)) / duration,
        num_input_tokens=num_input,
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
        num_output_tokens=sum(lengths),
    )
    return figures, outputs


@dataclass(frozen=True, kw_only=True)
class Batches:
    """What `measure_latency` does: `iterations` times a batch, after some for warmth. Each field is a flag by its name.

    Raises `UserError` for numbers that make no sense.
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


def measure_latency(llm: LLM, batches: Batches) -> Latency:
    """Never the same prompt twice: the prefix cache shall not help.

    Raises `UserError` if the model's length is too short.
    """
    num_batches = batches.iterations + batches.warm_up
    seeds = np.random.SeedSequence(batches.seed).generate_state(2 * num_batches).tolist()

    def seconds(num_output: int) -> float:
        shapes = [Shape(num_input=batches.input_len, num_output=num_output)] * batches.batch_size
        jobs = make_jobs(shapes, vocab_size=vocab_size(llm), seed=seeds.pop())
        duration, outputs = _generate(llm, jobs, detokenize=True)
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
    llm: LLM, jobs: Sequence[Job], *, detokenize: bool, routed_experts: bool = False
) -> tuple[float, list[RequestOutput]]:
    """Seconds, and the answers. Greedy, and on past the end-of-sequence token."""
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=job.num_output,
            ignore_eos=True,
            detokenize=detokenize,
            return_routed_experts=routed_experts,
        )
        for job in jobs
    ]
    prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began, outputs


def _milliseconds(seconds: Sequence[float]) -> Summary:
    found = summary(seconds, scale=1e3)
    assert found is not None, "there is at least one repetition"
    return found
