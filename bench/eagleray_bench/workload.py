"""The requests of a benchmark: their number, lengths and tokens. The same seed gives the same requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eagleray.errors import UserError
from eagleray_bench.arrivals import arrival_times
from eagleray_bench.lengths import RequestShape, prefix_repetition, sharegpt_like, uniform

DATASETS = ("random", "sharegpt-like", "prefix-repetition")

FIRST_TOKEN = 10
"""First token id of prompts: lower ids are special tokens in many vocabularies."""

DEFAULT_NUM_PROMPTS = 100
DEFAULT_VOCAB_SIZE = 4000
"""Size for models whose own is not known; few vocabularies are smaller."""
MINIMUMS = {
    "num_prompts": 1,
    "random_input_len": 1,
    "random_output_len": 1,
    "num_prefixes": 1,
    "prefix_len": 1,
    "prefix_uses": 1,
    "max_len": 2,
    "seed": 0,
}

SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwyz" for vowel in "aeiou"]
"""Words of chat prompts: in nearly every vocabulary, two letters after a space are one token."""


class BenchRequest(NamedTuple):
    """Request of a benchmark."""

    prompt: list[int]
    """Token ids of the prompt."""
    num_output: int
    """Number of tokens to generate."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Options that determine the requests, each a flag of the same name. Raises `UserError` for impossible values."""

    dataset: str = "random"
    num_prompts: int | None = None
    """Number of requests; None stands for `DEFAULT_NUM_PROMPTS`, or for the size of the dataset."""
    random_input_len: int = 128
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    num_prefixes: int = 8
    prefix_len: int = 256
    prefix_uses: int = 8
    max_len: int | None = None
    """Limit of prompt and answer together, in tokens; longer requests are cut."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            raise UserError(f"--dataset {self.dataset}: there is none of this name; there are {', '.join(DATASETS)}")
        for name, least in MINIMUMS.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"--{name.replace('_', '-')} must be at least {least}, but it is {value}")
        if not 0 <= self.random_range_ratio < 1:
            raise UserError(
                f"--random-range-ratio must be at least 0 and below 1, but it is {self.random_range_ratio:g}"
            )
        if self.num_prompts not in (None, self.count):
            raise UserError(
                f"--num-prompts {self.num_prompts}: {self.num_prefixes} prefixes, each used {self.prefix_uses} times, "
                f"are {self.count} requests: leave it out, or change --num-prefixes and --prefix-uses"
            )

    @property
    def count(self) -> int:
        """Number of requests."""
        if self.dataset == "prefix-repetition":
            return self.num_prefixes * self.prefix_uses
        return DEFAULT_NUM_PROMPTS if self.num_prompts is None else self.num_prompts

    def within(self, max_model_len: int | None) -> Workload:
        """Return the workload with lengths limited to the model's, unless the user chose the lengths."""
        if self.dataset != "sharegpt-like" or self.max_len is not None:
            return self
        return replace(self, max_len=max_model_len)

    def shapes(self) -> list[RequestShape]:
        """Return the lengths of every request, in the order of their arrival."""
        rng = np.random.default_rng([self.seed, 0])
        if self.dataset == "sharegpt-like":
            shapes = sharegpt_like(rng, self.count)
        else:
            shapes = uniform(
                rng,
                self.count,
                input_len=self.random_input_len,
                output_len=self.random_output_len,
                range_ratio=self.random_range_ratio,
            )
        if self.dataset == "prefix-repetition":
            shapes = prefix_repetition(
                rng,
                num_prefixes=self.num_prefixes,
                prefix_len=self.prefix_len,
                uses=self.prefix_uses,
                suffixes=shapes,
            )
        return shapes if self.max_len is None else [shape.cut(self.max_len) for shape in shapes]

    def send_times(self, *, rate: float, burstiness: float) -> list[float]:
        """Return the seconds after the start at which each request is sent."""
        return arrival_times(np.random.default_rng([self.seed, 1]), self.count, rate=rate, burstiness=burstiness)


def make_requests(shapes: Sequence[RequestShape], *, vocab_size: int, seed: int) -> list[BenchRequest]:
    """Make requests of these shapes from random tokens: prompts have nothing in common but their shared prefixes."""
    if vocab_size <= FIRST_TOKEN:
        raise UserError(f"the vocabulary must have more than {FIRST_TOKEN} tokens, but has {vocab_size}")
    rng = np.random.default_rng([seed, 2])
    prefixes: dict[int, list[int]] = {}
    requests = []
    for shape in shapes:
        if shape.prefix is not None and shape.prefix not in prefixes:
            prefixes[shape.prefix] = _tokens(rng, shape.num_prefix, vocab_size)
        shared = [] if shape.prefix is None else prefixes[shape.prefix]
        requests.append(
            BenchRequest(shared + _tokens(rng, shape.num_input - len(shared), vocab_size), shape.num_output)
        )
    return requests


def as_text(token_ids: Sequence[int]) -> str:
    """Return a word for each token id, for servers that accept only text. Equal ids give equal words."""
    return " ".join(SYLLABLES[token_id % len(SYLLABLES)] for token_id in token_ids)


def vocab_size_of(checkpoint: Path) -> int | None:
    """Return the size from the checkpoint's config.json; None if the file is missing or does not contain it."""
    return _number_of(checkpoint, "vocab_size")


def max_model_len_of(checkpoint: Path) -> int | None:
    """Return the maximum length from the checkpoint's config.json; None as for `vocab_size_of`."""
    return _number_of(checkpoint, "max_position_embeddings")


def _number_of(checkpoint: Path, name: str) -> int | None:
    try:
        config = json.loads((checkpoint / "config.json").read_text())
        number = config.get(name) or config.get("text_config", {}).get(name)
    except (OSError, ValueError, AttributeError):
        return None
    return number if isinstance(number, int) else None


def _tokens(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    token_ids: list[int] = rng.integers(FIRST_TOKEN, vocab_size, size=count).tolist()
    return token_ids
