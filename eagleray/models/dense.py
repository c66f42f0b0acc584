"""The dense decoder: attention and a gated feed-forward part in every layer. Its families differ only in their spec."""

from __future__ import annotations

from eagleray.models.base import Model
from eagleray.models.layers.attention import Attention
from eagleray.models.layers.decoder import DecoderLayer
from eagleray.models.layers.mlp import MLP


class DenseModel(Model):
    """The layers of Llama, Mistral, Qwen2 and Qwen3."""

    def make_layer(self, index: int) -> DecoderLayer:
        name, part = f"model.layers.{index}", self.part
        attention = Attention(f"{name}.self_attn", part.spec.windows[index], part)
        return DecoderLayer(name, attention, MLP(f"{name}.mlp", part), part)
