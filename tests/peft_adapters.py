"""Random adapters as PEFT saves them, and PEFT as the reference for their logits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def make_adapter(directory: Path, checkpoint: Path, *, seed: int = 0, strength: float = 0.3, **config: Any) -> Path:
    """Write an adapter of random factors for a checkpoint, and return the directory. `config`: fields of PEFT's
    configuration."""
    with _warnings_of_peft():
        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ALL, **config}))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * strength / parameter.shape[1] ** 0.5
    model.save_pretrained(directory)
    return directory


@torch.inference_mode()
def adapted_logits(checkpoint: Path, adapter: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return logits [num_tokens, vocab_size] of the model with the adapter."""
    with _warnings_of_peft():
        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, adapter).eval()
    return model(torch.tensor([list(tokens)])).logits[0].float()


@contextmanager
def _warnings_of_peft() -> Iterator[None]:
    """Ignore that PEFT uses names of transformers that will be removed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
