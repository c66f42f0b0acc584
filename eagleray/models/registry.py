"""The model families, by the architecture's name in config.json, and the only way to load a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Literal

import torch

from eagleray.config.json_files import shown
from eagleray.config.pooling_spec import BARE, CLASSIFYING, GENERATING, PoolingSpec
from eagleray.errors import ConfigError, EagleRayError
from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.choose import AttentionBackend, ModelTraits, choose_backend
from eagleray.kernels.expert_trace import MAX_TRACED_EXPERTS
from eagleray.kernels.quantized import WeightFormat
from eagleray.log import get_logger
from eagleray.models.base import FAMILIES, Model
from eagleray.models.checkpoint_files import read_headers, stored_dtype
from eagleray.models.config_file import ConfigFile
from eagleray.models.dummy import DummyWeights
from eagleray.models.gguf_file import GgufFile
from eagleray.models.gguf_weights import GgufWeights
from eagleray.models.loading import CheckpointWeights
from eagleray.models.moe.layout import ExpertLayout, ExpertOptions
from eagleray.models.moe.rebalance import Rebalancer
from eagleray.models.option_checks import DRAFTS, check_method, no_draft_layer, no_products
from eagleray.models.part import ModelPart
from eagleray.models.quantization import dummy_quantizers, quantizers, stored_as
from eagleray.models.quantized_formats.stored_format import StoredFormat
from eagleray.models.sharding import check_experts, check_fits
from eagleray.models.size import num_parameters, weight_bytes
from eagleray.models.spec import ModelSpec
from eagleray.models.stored_weights import WeightRules
from eagleray.models.tensor_names import is_cache_scale
from eagleray.models.weights import Weights
from eagleray.parallel.groups import Groups

logger = get_logger(__name__)

MODULES = {
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""The module of each family, by the architecture's name in config.json. Only that of the loaded model is imported."""

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}

CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Dtypes of caches of 8 bits, by the names of `kv_cache_dtype`."""

MAX_PARAMETER_RATIO = 2
"""A config.json that describes more parameters than this times those stored is refused at once; smaller differences are
reported tensor by tensor."""

SINGLE_WORKER = Groups.single()

NO_OPTIONS = ExpertOptions()


def load_model(
    directory: Path,
    *,
    config: ConfigFile | None = None,
    dtype: str,
    load_format: str,
    device: torch.device,
    seed: int | None,
    on_progress: Callable[[int, int], None] | None,
    groups: Groups = SINGLE_WORKER,
    invariant_for: str | None = None,
    experts: ExpertOptions = NO_OPTIONS,
    total_memory: int | None = None,
    wait_for_memory: Callable[[int], None] | None = None,
    attention_backend: AttentionBackend = "auto",
    quantization: Literal["fp8", "int8", "int4", "gptq", "awq", "compressed-tensors"] | None = None,
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto",
    pooling: PoolingSpec | None = None,
    drafts: bool = False,
) -> Model:
    """Load the model of a checkpoint directory, or this rank's part of it by `groups`, ready to compute.

    `config`: fields of config.json, if they are not those of the directory.
    `dtype`, `load_format` and `quantization` are those of `config.ModelConfig`, `kv_cache_dtype` is that of
    `config.CacheConfig`, `attention_backend` that of `config.ExecutionConfig`; `seed` is for dummy weights.
    `invariant_for`: the option that needs a request's numbers not to depend on the other tokens of its batch.
    `on_progress` is called with the bytes read and the total bytes of this rank's part. `total_memory`: the bytes of
    the device's memory; `wait_for_memory` is called with the bytes of this rank's weights before they are loaded.
    `pooling`: what the model pools; None: it generates. `drafts`: instead of the model, its layer that predicts further
    tokens is loaded, whole, whatever `groups` are.

    Raises `CheckpointError`, and `ConfigError` if the model cannot be divided so, does not fit into the memory, is not
    batch-invariant although it must be, or cannot have such weights or such a cache on this device.
    """
    config = config or ConfigFile.read(directory)
    family = find_family(config)
    spec = _read_spec(config, family, pooling)
    if drafts:
        family, spec, groups = _draft_layer(config, spec)
    _check_options(spec, experts, groups)
    if dtype == "auto":
        dtype = spec.dtype or ("float32" if load_format == "dummy" else stored_dtype(directory))
        has_few_bits = spec.stored_format is not None or quantization is not None
        if dtype == "float16" and has_few_bits and device.type == "cpu":
            logger.info("computing in bfloat16, not float16 as the checkpoint: on CPUs few bits are multiplied with it")
            dtype = "bfloat16"
    kind = DTYPES[dtype]
    gguf = None if load_format == "dummy" else GgufFile.find(directory)
    if load_format != "dummy":
        numbers_per_word = 1 if spec.stored_format is None else spec.stored_format.numbers_per_word
        headers = gguf.headers() if gguf is not None else read_headers(directory, numbers_per_word=numbers_per_word)
        if drafts:
            _check_draft_layer(config, spec, headers[1])
        _check_stored(config, spec, *headers)
    traits = ModelTraits(
        kind,
        spec.feature_sizes,
        spec.head_dim,
        has_sinks=spec.has_sinks,
        has_mla=spec.mla is not None,
        has_fp8_cache=kv_cache_dtype == "fp8",
    )
    kernels = choose_backend(device, traits, attention_backend)
    online = _online_format(config, spec, quantization)
    if online is not None:
        _check_quantization(config, spec, kernels, online, kind, device)
        if gguf is not None:
            gguf.check_plain()
    cache_dtype = CACHE_DTYPES.get(kv_cache_dtype)
    if cache_dtype is not None and not kernels.serves_cache(cache_dtype, device, of_latents=spec.mla is not None):
        raise _cache_refusal(spec, device, kv_cache_dtype)
    if load_format != "dummy" and groups.mesh.rank == 0:
        _log_cache_scales(headers[1], kind, cache_dtype, device)
    stored = stored_as(spec)
    keeps_stored = stored in kernels.kept_formats
    kept = stored if keeps_stored else online
    if spec.stored_format is not None and groups.mesh.rank == 0:
        _log_format(spec.stored_format, kind, is_kept=keeps_stored)
    if total_memory is not None:
        kept = kept if gguf is None else gguf.smallest_format(kernels.kept_formats) or kept
        smaller = [] if kept is not None else _online_formats(spec, kernels)
        needed = _check_memory(config, spec, kind, groups, total_memory, kept, smaller=smaller)
        if wait_for_memory is not None:
            wait_for_memory(needed)
    if invariant_for is not None:
        _check_batch_invariant(invariant_for, kernels, kind, device, groups)
        _check_pooling_invariant(pooling)
    by_role = quantizers(spec, kernels, online)
    rules = WeightRules(
        dtype=kind,
        device=device,
        fp8_block=spec.fp8_block,
        stored_format=spec.stored_format,
        kept_formats=kernels.kept_formats,
        takes_parts=kernels.takes_parts,
        quantizers=by_role,
    )
    part = ModelPart(spec=spec, groups=groups, kernels=kernels, rules=rules)
    layout = None if spec.moe is None else ExpertLayout(part, experts)
    model = family(part, layout, cache_dtype=cache_dtype)

    def open_checkpoint(
        on_progress: Callable[[int, int], None] | None = None,
    ) -> CheckpointWeights | GgufWeights:
        if gguf is not None:
            return GgufWeights(gguf, rules, params=model.params(), on_progress=on_progress)
        return CheckpointWeights(directory, rules, params=model.params(), on_progress=on_progress)

    def make_dummy() -> DummyWeights:
        return DummyWeights(
            dtype=kind,
            device=device,
            seed=seed or 0,
            has_fp8=kept is WeightFormat.FP8,
            quantizers=by_role or dummy_quantizers(spec, kernels),
        )

    def open_weights() -> AbstractContextManager[Weights]:
        if model.updates.has_replaced:
            raise EagleRayError(
                "experts were lost with another rank, and the checkpoint has older weights than this instance; it "
                "needs a complete update"
            )
        return nullcontext(make_dummy()) if load_format == "dummy" else open_checkpoint()

    def open_any_weights() -> AbstractContextManager[Weights]:
        # The groups and blocks of stored weights, also of a GGUF file, have sizes of their own.
        has_own_groups = load_format != "dummy" and keeps_stored and not spec.is_mxfp4
        return open_checkpoint() if has_own_groups or gguf is not None else nullcontext(make_dummy())

    if load_format == "dummy":
        dummy = make_dummy()
        model.load(dummy)
        kept_fp8 = dummy.kept_fp8
    else:
        with open_checkpoint(on_progress) as checkpoint:
            model.load(checkpoint)
            checkpoint.finish(model.names(), may_be_left=model.may_be_dropped)
            kept_fp8 = checkpoint.kept_fp8
    model.updates.kept_fp8 = frozenset(kept_fp8)
    if gguf is not None:
        model.updates.refusal = f"the weights of a model from a GGUF file, {gguf.path}, cannot be updated"
    if layout is not None and layout.is_divided:
        model.rebalancer = Rebalancer(
            blocks=model.moe_blocks,
            layout=layout,
            interval=experts.balance_interval,
            kernels=kernels,
            open_weights=open_weights,
            open_any_weights=open_any_weights,
        )
        if experts.gets_experts:
            model.rebalancer.allocate()
    return model


def _read_spec(config: ConfigFile, family: type[Model], pooling: PoolingSpec | None) -> ModelSpec:
    """Return the geometry with the head that the model needs. Raises `CheckpointError`."""
    spec = family.read_spec(config)
    if pooling is None:
        return spec
    if config.get("is_causal") is False:
        config.fail("`is_causal` is false, but attention to later tokens is not supported")
    name = config.fields["architectures"][0]
    if pooling.label_tokens and max(pooling.label_tokens) >= spec.vocab_size:
        config.fail(f"`classifier_from_token` names token {max(pooling.label_tokens)}, which the model does not have")
    return replace(
        spec, architecture=name, pools=True, num_labels=len(pooling.labels), label_tokens=pooling.label_tokens
    )


def _draft_layer(config: ConfigFile, spec: ModelSpec) -> tuple[type[Model], ModelSpec, Groups]:
    """Return the family, the geometry and the groups of the layer that predicts further tokens. Raises `ConfigError` if
    the model has none."""
    if spec.architecture not in DRAFTS or spec.num_draft_layers == 0:
        raise no_draft_layer(config.path, spec.architecture)
    module = import_module(f"eagleray.models.{DRAFTS[spec.architecture]}")
    spec = module.with_draft_layer(spec)
    return module.DeepSeekDrafts, spec, module.draft_groups(spec)


def _check_draft_layer(config: ConfigFile, spec: ModelSpec, names: set[str]) -> None:
    """Raise `ConfigError` if the weight files lack the last layer of `spec`."""
    name = f"model.layers.{spec.num_layers - 1}."
    if not any(one.startswith(name) for one in names):
        raise ConfigError(
            f"option `speculative_config`: the method mtp needs the tensors {name}*, which predict further tokens, but "
            f"the weight files beside {config.path} have none of them; take another method"
        )


def find_family(config: ConfigFile) -> type[Model]:
    """Return the family that config.json names, with whichever head. Raises `CheckpointError`."""
    names = config.get("architectures")
    supported = ", ".join(MODULES)
    if not isinstance(names, list) or len(names) != 1:
        config.fail(f"`architectures` must name one architecture, but it is {shown(names)}; supported are {supported}")
    name = names[0]
    if not isinstance(name, str) or (generating := _with_token_head(name)) not in MODULES:
        config.fail(
            f"the architecture {shown(name)} is not supported; supported are {supported}, and for pooling their forms "
            f"with {BARE} or {CLASSIFYING}"
        )
    return import_family(generating)


def _with_token_head(architecture: str) -> str:
    """Return the name of the architecture's form that predicts tokens."""
    for end in (CLASSIFYING, BARE):
        if architecture.endswith(end):
            return architecture.removesuffix(end) + GENERATING
    return architecture


def import_family(architecture: str) -> type[Model]:
    """Return the family of an architecture that is supported."""
    import_module(f"eagleray.models.{MODULES[architecture]}")
    return FAMILIES[architecture]


def _check_stored(config: ConfigFile, spec: ModelSpec, stored: int, names: set[str]) -> None:
    """Raise `CheckpointError` if config.json describes layers that the weight files do not have, or far more weights.
    `stored` and `names`: see `read_headers`.

    A tensor that is missing or has another shape is reported when it is read.
    """
    described = num_parameters(spec)
    last = f"model.layers.{spec.num_layers - 1}."
    if not any(name.startswith(last) for name in names):
        config.fail(
            f"`num_hidden_layers` is {spec.num_layers}, but the weight files beside it have no tensor of layer "
            f"{spec.num_layers - 1}; they do not belong together, or the download is incomplete"
        )
    if described > MAX_PARAMETER_RATIO * stored:
        config.fail(
            f"describes a model of {described:,} parameters, but the weight files beside it hold "
            f"{stored:,}; they do not belong together, or the download is incomplete"
        )


def _check_memory(
    config: ConfigFile,
    spec: ModelSpec,
    dtype: torch.dtype,
    groups: Groups,
    total_memory: int,
    kept: WeightFormat | None,
    *,
    smaller: Sequence[WeightFormat],
) -> int:
    """Return the bytes of this rank's weights. Raises `ConfigError` if they cannot fit into the memory.

    `kept`: see `weight_bytes`; `smaller`: formats of `quantization` with which they would take less memory.
    """
    num_expert_ranks = max(1, groups.experts.size)
    needed = weight_bytes(spec, itemsize=dtype.itemsize, kept=kept, mesh=groups.mesh, num_expert_ranks=num_expert_ranks)
    if needed > total_memory:
        name = _name(dtype) if kept is None else f"{kept} and {_name(dtype)}"
        advice = f", or take `quantization` {' or '.join(smaller)}" if smaller else ""
        raise ConfigError(
            f"{config.path}: the weights that it describes take {needed / 2**30:,.1f} GiB of a worker as {name}, but "
            f"there are {total_memory / 2**30:,.1f} GiB in all; divide them among more workers "
            f"(`tensor_parallel_size`, `pipeline_parallel_size`){advice}"
        )
    return needed


def _log_format(stored: StoredFormat, dtype: torch.dtype, *, is_kept: bool) -> None:
    """Log how the numbers of a quantized checkpoint are used, if they are not used as config.json says."""
    if stored.has_quantized_inputs:
        logger.info(
            "the checkpoint (%s) is made for activations of 8 bits, but only its weights are used so: activations stay "
            "in %s, and their scales are ignored",
            stored.method,
            _name(dtype),
        )
    if not is_kept:
        logger.warning(
            "the weights (%s) are decoded to %s and take more memory than in the checkpoint, because products of %s on "
            "this device do not read them; CPUs read all of them with `dtype` bfloat16, NVIDIA GPUs those of FP8",
            stored.method,
            _name(dtype),
            _name(dtype),
        )


def _log_cache_scales(
    names: Iterable[str], dtype: torch.dtype, cache_dtype: torch.dtype | None, device: torch.device
) -> None:
    """Log that scales for the cache are not used, if a checkpoint has `names` of some, and why."""
    if not (scales := sorted(filter(is_cache_scale, names))):
        return
    line = "the checkpoint has %d scales for a cache of 8 bits (%s, …), which are not used: %s"
    if cache_dtype is None:
        logger.info(line, len(scales), scales[0], f"the cache is in {_name(dtype)}, which needs none")
    elif device.type == "cpu":
        reason = "in the caches of CPUs each token and head has a scale of its own, which is more exact"
        logger.info(line, len(scales), scales[0], reason)
    else:
        reason = "the kernels of GPUs round keys and values to fp8 without scales; `kv_cache_dtype` auto rounds none"
        logger.warning(line, len(scales), scales[0], reason)


def _online_format(config: ConfigFile, spec: ModelSpec, quantization: str | None) -> WeightFormat | None:
    """Return the format that plain weights are to be quantized to. Raises `ConfigError` if the checkpoint has another
    format than `quantization` names."""
    stored = "fp8" if spec.fp8_block is not None else None
    if spec.stored_format is not None:
        stored = spec.stored_format.method
    check_method(config.path, stored, quantization)
    if quantization is None or quantization == stored:
        return None
    return WeightFormat(quantization)


def _online_formats(spec: ModelSpec, kernels: KernelBackend) -> list[WeightFormat]:
    """Return the formats that plain weights can be quantized to when they are loaded."""
    if stored_as(spec) is not None:
        return []
    return sorted(kernels.kept_formats - {WeightFormat.MXFP4})


def _check_quantization(
    config: ConfigFile,
    spec: ModelSpec,
    kernels: KernelBackend,
    online: WeightFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise `ConfigError` if linear layers cannot have weights of a format."""
    if spec.is_mxfp4:
        raise ConfigError(
            f"option `quantization`: {config.path} says that the experts are stored as mxfp4, which is kept; drop it"
        )
    if online not in _online_formats(spec, kernels):
        raise no_products(online, _name(dtype), f" on {device.type}")


def _cache_refusal(spec: ModelSpec, device: torch.device, kv_cache_dtype: str) -> ConfigError:
    """Return the error for a cache of 8 bits that attention cannot use."""
    if device.type == "cpu" and spec.mla is not None:
        return ConfigError(
            f"option `kv_cache_dtype`: {spec.architecture} caches latents, which CPUs keep in the model's `dtype`, not "
            f"in {kv_cache_dtype}; take auto"
        )
    return ConfigError(
        f"option `kv_cache_dtype`: the attention kernels of {spec.architecture} on {device.type} cannot use a cache of "
        f"{kv_cache_dtype}; the native kernels of CPUs use int8 and fp8 (with `dtype` bfloat16 or float32), Triton's "
        "kernels fp8 on a GPU of compute capability 8.9 or more; else take auto"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_options(spec: ModelSpec, experts: ExpertOptions, groups: Groups) -> None:
    """Raise `ConfigError` if the model cannot be divided so, or cannot fulfil the options for experts."""
    is_divided = experts.dispatch is not None
    check_fits(spec, groups.mesh, has_whole_experts=is_divided)
    if is_divided and not experts.gets_experts:  # else the division is that of a running group
        check_experts(spec, num_ranks=groups.experts.size, num_redundant=experts.num_redundant)
    if experts.keeps_ids and spec.moe is not None and spec.moe.num_experts > MAX_TRACED_EXPERTS:
        raise ConfigError(
            f"option `enable_return_routed_experts`: the model has {spec.moe.num_experts} experts, more than the "
            f"{MAX_TRACED_EXPERTS} that can be reported; drop it"
        )


def _check_pooling_invariant(pooling: PoolingSpec | None) -> None:
    """Raise `ConfigError` for a sum whose order depends on the steps that compute a prompt."""
    if pooling is not None and pooling.method == "mean":
        raise ConfigError(
            "option `deterministic`: the mean of a prompt's hidden states is added up in the parts that steps compute, "
            "so its last bits depend on the other requests; drop it, or pool the last token (`pooler_config`)"
        )


def _check_batch_invariant(
    option: str, kernels: KernelBackend, dtype: torch.dtype, device: torch.device, groups: Groups
) -> None:
    """Raise `ConfigError` if a request's numbers could depend on the other requests of its batch."""
    if not kernels.is_batch_invariant:
        raise ConfigError(
            f"option `{option}`: the kernels for {_name(dtype)} on {device.type} are not batch-invariant; "
            "take bfloat16 or float32 on a CPU, with a C++ compiler"
        )
    if not groups.tp.is_ordered:
        raise ConfigError(
            f"option `{option}`: sums over {groups.tp.size} tensor-parallel ranks of several hosts are added up "
            "in varying order; keep the ranks on one host, or take 2"
        )
