"""The layer of a DeepSeek-V3 checkpoint that predicts the token after the next: multi-token prediction.

It is made as the last stage of a pipeline that has one layer in each stage: it gets hidden states from the model, and
has the head. Before it a projection combines these with the embeddings of the tokens that follow. The formulas are
those of the technical report, arXiv 2412.19437, section 2.2; as in vLLM, the model's hidden states are those behind its
last norm, and the embedding at position 0 counts as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.kernels.backend import Context, HiddenStates
from eagleray.kernels.forward_batch import ForwardBatch
from eagleray.kernels.kv_cache import KVCache
from eagleray.models.deepseek import DeepSeekV3
from eagleray.models.layers.embedding import EMBEDDING
from eagleray.models.layers.layer import Layer, WeightGroup
from eagleray.models.layers.linear import linear
from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.part import ModelPart
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import Param
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.group import SingleRankGroup
from eagleray.parallel.groups import Groups
from eagleray.parallel.mesh import Mesh


class DeepSeekDrafts(DeepSeekV3):
    """The first layer behind those of the model, whose last layer it is in `part.spec` (see `with_draft_layer`)."""

    def __init__(
        self, part: ModelPart, experts: ExpertLayout | None = None, *, cache_dtype: torch.dtype | None = None
    ) -> None:
        spec = part.spec
        self.layer_name = f"model.layers.{spec.num_layers - 1}"
        """Beginning of the names of its tensors, without those of the embedding and the head."""
        self._embedding = _kept(EMBEDDING, spec.vocab_size, spec.hidden_size)
        self._embedding_norm = _kept(f"{self.layer_name}.enorm.weight", spec.hidden_size)
        self._hidden_norm = _kept(f"{self.layer_name}.hnorm.weight", spec.hidden_size)
        self._projection = linear(
            [f"{self.layer_name}.eh_proj"], [spec.hidden_size], 2 * spec.hidden_size, is_quantizable=False
        )
        super().__init__(part, experts, cache_dtype=cache_dtype)

    def names(self) -> Iterator[str]:
        """Yield the names of the whole model's tensors and of the layer's."""
        yield from super().names()
        for group in (self._embedding_norm, self._hidden_norm, self._projection):
            yield from group.names()

    def may_be_dropped(self, name: str) -> bool:
        """Return True: the other tensors of the checkpoint are the model's."""
        return True

    @torch.inference_mode()
    def predict(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> Tensor:
        """Return hidden states [n, hidden_size], from which `token_logits` predicts tokens.

        hidden: [n, hidden_size] hidden states at the positions [n] of the batch, from the model or, for tokens that the
        model has not computed, from an earlier call of this method; token_ids: [n] the token that follows each
        position. The next call may overwrite the result.
        """
        embedded = F.embedding(token_ids, self._embedding.operation) * (positions > 0).unsqueeze(1)
        eps = self.spec.norm_eps
        embedded = _rms_norm(embedded, self._embedding_norm.operation, eps)
        hidden = _rms_norm(hidden.to(embedded.dtype), self._hidden_norm.operation, eps)
        combined: Tensor = self._projection(torch.cat([embedded, hidden], dim=1))
        return self._run(combined.to(self._hidden_dtype).contiguous(), batch, cache)

    def token_logits(self, states: Tensor) -> Tensor:
        """Return float32 [n, vocab_size] of states [n, hidden_size]."""
        assert self._norm is not None
        logits = self.logits(_rms_norm(states.to(self.dtype), self._norm.operation, self.spec.norm_eps))
        assert logits is not None, "the layer is whole"
        return logits

    def _parts(self) -> Iterator[Layer | WeightGroup]:
        yield from super()._parts()
        yield from (self._embedding, self._embedding_norm, self._hidden_norm, self._projection)

    def _make_norm(self) -> WeightGroup:
        return _kept(f"{self.layer_name}.shared_head.norm.weight", self.spec.hidden_size)

    def _compute(self, x: HiddenStates, caches: Sequence[Tensor], context: Context) -> HiddenStates:
        for layer, cache in zip(self._layers, caches, strict=True):
            x = layer(x, cache, context)
        return x


def with_draft_layer(spec: ModelSpec) -> ModelSpec:
    """Return the geometry of a model whose last layer is the first one that predicts further tokens. It has experts."""
    assert spec.moe is not None
    moe = replace(spec.moe, layers=(*spec.moe.layers, True))
    return replace(spec, num_layers=spec.num_layers + 1, windows=(*spec.windows, None), moe=moe)


def draft_groups(spec: ModelSpec) -> Groups:
    """Return the groups of a worker that has the last layer of a model and nothing else."""
    tp = SingleRankGroup()
    return Groups(Mesh(rank=spec.num_layers - 1, pp_size=spec.num_layers), tp, None, ExpertGroup(tp))


def _kept(name: str, *shape: int) -> WeightGroup:
    """Declare a tensor that is used as it is."""
    param = Param(name, shape)
    return WeightGroup([param], lambda weights, kernels: weights.load(param))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[1],), weight.float(), eps).to(x.dtype)
