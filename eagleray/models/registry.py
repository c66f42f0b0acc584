"""The model families by the architecture's name in config.json, and the one way to load a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from eagleray.errors import ConfigError
from eagleray.models.base import Model
from eagleray.models.config_file import ConfigFile
from eagleray.models.dummy import DummyWeights
from eagleray.models.kernels.choose import kernels_for
from eagleray.models.kernels.reference import Kernels
from eagleray.models.layers.decoder import DecoderLayer, load_dense_layer
from eagleray.models.layers.embedding import load_embedding_and_head
from eagleray.models.layers.rope import Rope
from eagleray.models.llama import read_llama, read_mistral
from eagleray.models.loading import CheckpointWeights
from eagleray.models.mixtral import load_layer as load_mixtral_layer
from eagleray.models.mixtral import read_mixtral
from eagleray.models.qwen2 import read_qwen2
from eagleray.models.qwen3 import read_qwen3
from eagleray.models.qwen3_moe import load_layer as load_qwen3_moe_layer
from eagleray.models.qwen3_moe import read_qwen3_moe
from eagleray.models.shares import check_fits
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import Weights
from eagleray.parallel import Group, Groups, Mesh

__all__ = ["FAMILIES", "Family", "load_model"]


@dataclass(frozen=True, slots=True)
class Family:
    read_spec: Callable[[ConfigFile], ModelSpec]
    load_layer: Callable[[int, ModelSpec, Weights, Kernels, Group], DecoderLayer] = load_dense_layer


FAMILIES = {
    "LlamaForCausalLM": Family(read_llama),
    "MistralForCausalLM": Family(read_mistral),
    "MixtralForCausalLM": Family(read_mixtral, load_mixtral_layer),
    "Qwen2ForCausalLM": Family(read_qwen2),
    "Qwen3ForCausalLM": Family(read_qwen3),
    "Qwen3MoeForCausalLM": Family(read_qwen3_moe, load_qwen3_moe_layer),
}

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}

ALONE = Groups.alone()

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def load_model(
    directory: Path,
    *,
    dtype: str,
    load_format: str,
    device: torch.device,
    seed: int | None,
    on_progress: Callable[[int, int], None] | None,
    groups: Groups = ALONE,
    deterministic: bool = False,
) -> Model:
    """The model of a checkpoint directory, or the part that `groups` leaves to this rank, ready to compute.

    `dtype`, `load_format` and `deterministic` are those of `config.ModelConfig`; `seed` is that of dummy weights.
    `on_progress` is told bytes read and bytes in all, of this rank's share. Raises `CheckpointError`, and `ConfigError`
    if the model cannot be divided so, or `deterministic` not be kept.
    """
    config = ConfigFile.read(directory)
    family = _family(config)
    spec = family.read_spec(config)
    check_fits(spec, groups.mesh)
    kind = DTYPES[spec.dtype if dtype == "auto" else dtype]
    kernels = kernels_for(device, kind, spec)
    if deterministic:
        _check_invariant(kernels, kind, device, groups)
    if load_format == "dummy":
        dummies = DummyWeights(dtype=kind, device=device, seed=seed or 0)
        return _build(family, spec, dummies, kernels, kind, device, groups)
    with CheckpointWeights(
        directory,
        dtype=kind,
        device=device,
        on_progress=on_progress,
        is_elsewhere=lambda name: _is_elsewhere(name, spec, groups.mesh),
        num_sharing=groups.mesh.tp_size,
    ) as weights:
        model = _build(family, spec, weights, kernels, kind, device, groups)
        weights.finish(may_be_left=lambda name: _is_not_a_weight(name, spec))
    return model


def _family(config: ConfigFile) -> Family:
    names = config.get("architectures")
    supported = ", ".join(FAMILIES)
    if not isinstance(names, list) or len(names) != 1:
        config.fail(f"`architectures` must name one architecture, but it is {names!r}; supported are {supported}")
    if names[0] not in FAMILIES:
        config.fail(f"the architecture {names[0]!r} is not supported; supported are {supported}")
    return FAMILIES[names[0]]


def _check_invariant(kernels: Kernels, dtype: torch.dtype, device: torch.device, groups: Groups) -> None:
    """Raises `ConfigError` if a request's numbers could depend on its company."""
    if not kernels.is_invariant:
        raise ConfigError(
            f"option `deterministic`: what computes {str(dtype).removeprefix('torch.')} on {device.type} here cannot "
            "promise it; take bfloat16 or float32 on a CPU, with a C++ compiler"
        )
    if not groups.tp.is_ordered:
        raise ConfigError(
            f"option `deterministic`: sums over {groups.tp.size} tensor-parallel ranks of several hosts are added up "
            "in varying order; keep the ranks on one host, or take 2"
        )


def _build(
    family: Family,
    spec: ModelSpec,
    weights: Weights,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    groups: Groups,
) -> Model:
    mesh = groups.mesh

    def load_layer(index: int) -> DecoderLayer:
        return family.load_layer(index, spec, weights, kernels, groups.tp)

    # reading and packing go on in one thread for each core
    pool = ThreadPoolExecutor(torch.get_num_threads() if device.type == "cpu" else 1, "load")
    try:
        ends = pool.submit(load_embedding_and_head, spec, weights, kernels, mesh, groups.tp)
        layers = list(pool.map(load_layer, mesh.layers(spec.num_layers)))
        embedding, head = ends.result()
    finally:
        pool.shutdown(cancel_futures=True)
    norm = None
    if mesh.is_last_stage:
        norm = kernels.norm(weights.take("model.norm.weight", (spec.hidden_size,)), spec.norm_eps)
    return Model(
        spec=spec,
        groups=groups,
        dtype=dtype,
        device=device,
        kernels=kernels,
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        rope=Rope(spec.rope, spec.head_dim, dtype=dtype, device=device),
        num_parameters=weights.num_parameters,
    )


def _is_elsewhere(name: str, spec: ModelSpec, mesh: Mesh) -> bool:
    """Whether another stage has this tensor, and this one has not."""
    if (match := LAYER.match(name)) is not None:
        index = int(match[1])
        return index < spec.num_layers and index not in mesh.layers(spec.num_layers)
    if name == "model.embed_tokens.weight":
        return not (mesh.is_first_stage or (mesh.is_last_stage and spec.tie_embeddings))
    return name in ("model.norm.weight", "lm_head.weight") and not mesh.is_last_stage


def _is_not_a_weight(name: str, spec: ModelSpec) -> bool:
    """Old checkpoints hold computed tables; some with tied embeddings hold the tied weight twice."""
    return name.endswith("rotary_emb.inv_freq") or (spec.tie_embeddings and name == "lm_head.weight")
