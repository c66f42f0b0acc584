"""transformers as the reference for the logits of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

MARGIN = 1e-4
"""Two logits this close may be ordered either way by a different but equally exact computation."""


class Oracle:
    def __init__(self, checkpoint: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return logits [num_tokens, vocab_size], of which row i predicts token i + 1."""
        return self.model(torch.tensor([list(token_ids)])).logits[0].float()

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.log_softmax(self.logits(token_ids), dim=-1)

    def assert_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Assert that every token of `output` is the likeliest one after its prefix, within `MARGIN`.

        This takes one pass over prompt and output. By induction it is the same as comparing with `generate` token by
        token.
        """
        logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        behind = logits.max(dim=-1).values - chosen
        wrong = torch.nonzero(behind > MARGIN)[:, 0].tolist()
        assert not wrong, f"prompt of {len(prompt)}: tokens {wrong} are not the likeliest (behind {behind[wrong[:5]]})"

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        out = self.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()


@cache
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)
