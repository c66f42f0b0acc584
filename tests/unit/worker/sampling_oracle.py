"""Naive definition of the sampler: one request at a time, in plain Python and float64. Random requests for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from eagleray.messages.sampling import Sampling

MARGIN = 1e-6
"""Distance to a boundary below which float32 may decide either way."""


@dataclass
class Request:
    sampling: Sampling
    prompt: list[int]
    generated: list[int]

    @property
    def known(self) -> list[int]:
        return self.prompt + self.generated


@dataclass
class Choice:
    token: int | None
    """None if no token is allowed."""
    is_certain: bool = True


def choose(logits: np.ndarray, request: Request) -> Choice:
    """Return the next token, given its raw logits [vocab_size]."""
    sampling = request.sampling
    adjusted = adjust(logits.astype(np.float32), request)
    if not np.isfinite(adjusted).any():
        return Choice(None)
    order = sorted(range(len(adjusted)), key=lambda token: (-adjusted[token], token))
    if sampling.temperature == 0:
        return Choice(order[0])
    kept, is_certain = restrict(adjusted, order, sampling)
    total, reached = math.fsum(kept.values()), 0.0
    point = splitmix_uniform(sampling.seed, len(request.known)) * total
    for token in sorted(kept):
        reached += kept[token]
        is_certain &= abs(reached - point) > MARGIN * total
        if reached > point:
            return Choice(token, is_certain)
    raise AssertionError("a uniform number below 1 picks a token")


def adjust(logits: np.ndarray, request: Request) -> np.ndarray:
    sampling, generated = request.sampling, request.generated
    forbidden = set()
    if sampling.allowed_token_ids:
        forbidden |= set(range(len(logits))) - set(sampling.allowed_token_ids)
    for *before, last in sampling.bad_words:
        if len(before) <= len(generated) and generated[len(generated) - len(before) :] == before:
            forbidden.add(last)
    if len(generated) < sampling.min_tokens:
        forbidden |= set(sampling.suppressed_token_ids)
    adjusted = logits.copy()
    adjusted[list(forbidden)] = -np.inf
    for token, bias in sampling.logit_bias.items():
        adjusted[token] += np.float32(bias)
    for token in set(request.known):
        count = generated.count(token)
        repetition = np.float32(sampling.repetition_penalty)
        adjusted[token] = adjusted[token] / repetition if adjusted[token] > 0 else adjusted[token] * repetition
        adjusted[token] -= np.float32(sampling.frequency_penalty) * np.float32(count)
        adjusted[token] -= np.float32(sampling.presence_penalty) * np.float32(count > 0)
    return adjusted


def restrict(logits: np.ndarray, order: list[int], sampling: Sampling) -> tuple[dict[int, float], bool]:
    """Return the kept tokens with their unnormalised probabilities, and whether float32 certainly keeps the same."""
    highest = float(logits[order[0]])
    weight = {token: math.exp((float(logits[token]) - highest) / sampling.temperature) for token in order}
    is_certain = all(abs(value - sampling.min_p) > MARGIN for value in weight.values()) or sampling.min_p in (0, 1)
    kept = [token for token in order if weight[token] >= sampling.min_p]
    kept = kept[: sampling.top_k] if sampling.top_k else kept
    total, reached, nucleus = math.fsum(weight[token] for token in kept), 0.0, []
    for token in kept:
        if reached >= sampling.top_p * total:
            break
        nucleus.append(token)
        reached += weight[token]
        is_certain &= sampling.top_p == 1 or abs(reached - sampling.top_p * total) > MARGIN * total
    return {token: weight[token] for token in nucleus}, is_certain


def splitmix_uniform(seed: int, position: int) -> float:
    stream = splitmix(seed, 0)
    return ((splitmix(stream, position) >> 12) + 0.5) / 2**52


def splitmix(state: int, index: int) -> int:
    """Return output number `index` of SplitMix64, from an initial state."""
    bits = (state + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def random_sampling(rng: np.random.Generator, vocab_size: int) -> Sampling:
    """Return parameters that use each feature in about a third of the requests."""

    def some(value: object, otherwise: object) -> object:
        return value if rng.random() < 0.35 else otherwise

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocab_size, size=count).tolist())

    return Sampling(
        seed=int(rng.integers(-(2**62), 2**62)),
        temperature=some(0.0, float(rng.choice([0.3, 0.8, 1.0, 1.7]))),
        top_p=some(float(rng.uniform(0.05, 1)), 1.0),
        top_k=some(int(rng.integers(1, vocab_size + 5)), 0),
        min_p=some(float(rng.uniform(0, 0.3)), 0.0),
        presence_penalty=some(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=some(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=some(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=some({token: float(rng.uniform(-8, 8)) for token in ids(4)}, {}),
        allowed_token_ids=some(ids(vocab_size // 2 + 1), ()),
        bad_words=some(tuple(ids(int(rng.integers(1, 4))) for _ in range(vocab_size)), ()),
        min_tokens=some(int(rng.integers(1, 6)), 0),
        suppressed_token_ids=some(ids(vocab_size // 3 + 1), ()),
    )


def random_request(rng: np.random.Generator, vocab_size: int) -> Request:
    prompt = rng.integers(0, vocab_size, size=rng.integers(1, 12)).tolist()
    generated = rng.integers(0, vocab_size, size=rng.integers(0, 8)).tolist()
    return Request(random_sampling(rng, vocab_size), prompt, generated)


def random_logits(rng: np.random.Generator, num_lines: int, vocab_size: int) -> torch.Tensor:
    logits = rng.normal(0, rng.choice([0.1, 2, 8]), size=(num_lines, vocab_size)).astype(np.float32)
    if rng.random() < 0.4:
        logits = np.round(logits * 2) / 2  # many equal ones, as from a model in bfloat16
    return torch.from_numpy(logits)
