"""A family with a trait that no other has is one class: here norms also after attention and feed-forward part."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from checkpoints import edit_config, make_checkpoint
from harness import random_prompt
from model_runs import load, logits_in_chunks
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagleray.errors import CheckpointError
from eagleray.kernels.backend import Context, HiddenStates
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.models import registry
from eagleray.models.base import Model
from eagleray.models.config_file import ConfigFile
from eagleray.models.layers.attention import Attention
from eagleray.models.layers.decoder import DecoderLayer
from eagleray.models.layers.linear import norm
from eagleray.models.layers.mlp import MLP
from eagleray.models.llama import LLAMA
from eagleray.models.part import ModelPart
from eagleray.models.spec import ModelSpec, read_common

ARCHITECTURE = "SandwichForCausalLM"
AFTER = ("after_attention_norm", "after_mlp_norm")
PROMPT = random_prompt(0, 30, 384)


class SandwichLayer(DecoderLayer):
    def __init__(self, name: str, window: int | None, part: ModelPart) -> None:
        super().__init__(name, Attention(f"{name}.self_attn", window, part), MLP(f"{name}.mlp", part), part)
        size, eps = part.spec.hidden_size, part.spec.norm_eps
        self._after_attention, self._after_mlp = (norm(f"{name}.{which}", size, eps) for which in AFTER)

    def __call__(self, hidden: HiddenStates, cache: Tensor, context: Context) -> HiddenStates:
        attended = self._attention(self._attention_norm(hidden), cache, context)
        hidden = self._add(hidden, self._after_attention(attended))
        return self._add(hidden, self._after_mlp(self.feed_forward(self._feed_forward_norm(hidden))))


class Sandwich(Model):
    @staticmethod
    def read_spec(config: ConfigFile) -> ModelSpec:
        return replace(read_common(config, ARCHITECTURE, LLAMA), mlp_bias=False)

    def make_layer(self, index: int) -> DecoderLayer:
        return SandwichLayer(f"model.layers.{index}", self.spec.windows[index], self.part)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch) -> Path:
    """A checkpoint of the family, whose new norms have random weights."""
    monkeypatch.setitem(registry.MODULES, ARCHITECTURE, "sandwich")
    monkeypatch.setitem(registry.FAMILIES, ARCHITECTURE, Sandwich)
    monkeypatch.setitem(sys.modules, "eagleray.models.sandwich", ModuleType("sandwich"))
    directory = make_checkpoint(tmp_path, "llama", tokenizer=False)
    edit_config(directory, architectures=[ARCHITECTURE])
    tensors = load_file(directory / "model.safetensors")
    norms = {f"model.layers.{index}.{which}.weight": torch.rand(64) + 0.5 for index in range(3) for which in AFTER}
    save_file(tensors | norms, directory / "model.safetensors")
    return directory


def test_load_model_new_family_is_loaded_and_recorded(checkpoint, monkeypatch):
    model = load(checkpoint)
    logits = logits_in_chunks(model, PROMPT, 30)
    monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: TorchBackend())
    torch.testing.assert_close(logits, logits_in_chunks(load(checkpoint), PROMPT, 30), atol=1e-4, rtol=0)
    name = f"model.layers.1.{AFTER[0]}.weight"
    model.load_weights([(name, torch.zeros(64))])
    assert not torch.allclose(logits_in_chunks(model, PROMPT, 30), logits, atol=1e-2)


def test_load_model_new_family_lacks_its_tensor(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    name = f"model.layers.2.{AFTER[1]}.weight"
    del tensors[name]
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor '{name}' of shape .* is missing"):
        load(checkpoint)
