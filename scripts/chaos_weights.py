"""Variants of a model's weights, and the comparison of answers with those of the weights that made them.

The model's own weights are the variant 0, the others differ by noise. Each label that a trainer gives names a variant,
and an answer says which labels made which of its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from chaos_load import ChaosAnswer, Choice, find_choice_differences
from safetensors.torch import load_file
from torch import Tensor

from eagleray.config.resolve import DEMO_MODEL_DIR

NUM_VARIANTS = 3
"""With two, an engine that misses an update and gets the next one would have the right weights by chance."""

NOISE = 0.5
"""Standard deviation of the noise, as a share of that of the tensor."""

FIRST_LABEL = "default"
"""Label of the checkpoint's weights."""

Weights = list[tuple[str, Tensor]]


def make_variants(model: str | None) -> list[Weights]:
    """Return the weights of each variant under the names of the checkpoint. `model`: its directory; None: embedded."""
    directory = DEMO_MODEL_DIR if model is None else Path(model)
    stored = {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
    if json.loads((directory / "config.json").read_text()).get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)
    return [list(stored.items()), *(_with_noise(stored, seed) for seed in range(1, NUM_VARIANTS))]


def _with_noise(stored: Mapping[str, Tensor], seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return [(name, _vary(tensor, generator)) for name, tensor in stored.items()]


def _vary(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.dim() < 2 or not tensor.is_floating_point():
        return tensor
    noise = torch.randn(tensor.shape, generator=generator) * (NOISE * tensor.float().std())
    return (tensor.float() + noise).to(tensor.dtype)


class Labels:
    """The variant of each label, and the order in which labels were given."""

    def __init__(self) -> None:
        self._variants: dict[str, int] = {FIRST_LABEL: 0}

    def add(self, label: str, variant: int) -> None:
        """Give a label to a variant."""
        self._variants[label] = variant

    def variant(self, label: str) -> int | None:
        """Return the variant of a label; None if it was never given."""
        return self._variants.get(label)

    def position(self, label: str) -> int:
        """Return the place of a label in the order."""
        return list(self._variants).index(label)


def find_wrong_versions(answer: ChaosAnswer, expected: Sequence[ChaosAnswer], labels: Labels, oldest: str) -> list[str]:
    """Describe what is wrong in an answer; empty if nothing is.

    `expected`: the answer that each variant gives. `oldest`: the last label that was committed before the request was
    sent. Tokens of the first version must be those of its variant; later ones depend on the cache as well.
    """
    if answer.choices.keys() != expected[0].choices.keys():
        return [f"choices {sorted(answer.choices)} instead of {sorted(expected[0].choices)}"]
    found = []
    for index, choice in sorted(answer.choices.items()):
        spans = choice.weight_versions or [{"version": FIRST_LABEL, "start": 0, "end": len(choice.token_ids)}]
        wrong = _find_wrong_spans(choice, spans, labels, oldest)
        if not wrong:
            variant = labels.variant(spans[0]["version"])
            assert variant is not None
            wrong = _find_wrong_tokens(expected[variant].choices[index], choice, spans)
        found += [f"choice {index}: {what}; spans {spans}" for what in wrong]
    return found


def _find_wrong_spans(choice: Choice, spans: list[dict[str, Any]], labels: Labels, oldest: str) -> list[str]:
    names = [str(span["version"]) for span in spans]
    if unknown := [name for name in names if labels.variant(name) is None]:
        return [f"the version {unknown[0]!r} was never pushed"]
    found = []
    edges = [0, *(span["end"] for span in spans)]
    if [span["start"] for span in spans] != edges[:-1] or edges[-1] != len(choice.token_ids):
        found.append(f"the spans do not cover the {len(choice.token_ids)} tokens without gaps")
    positions = [labels.position(name) for name in names]
    if positions != sorted(set(positions)):
        found.append("the versions are not in the order of the updates")
    if positions[0] < labels.position(oldest):
        found.append(f"the first version is older than {oldest!r}, which was committed before the request was sent")
    return found


def _find_wrong_tokens(expected: Choice, choice: Choice, spans: list[dict[str, Any]]) -> list[str]:
    """Compare the tokens of the first version with those that its variant gives."""
    if len(spans) == 1:
        return find_choice_differences(expected, choice)
    end = spans[0]["end"]
    head = Choice(token_ids=choice.token_ids[:end], logprobs=choice.logprobs[:end])
    return find_choice_differences(Choice(token_ids=expected.token_ids[:end], logprobs=expected.logprobs[:end]), head)
