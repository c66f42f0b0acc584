"""The choice of a backend for a device."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from eagleray.errors import ConfigError
from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.cpu.build.openmp import NativeUnavailable
from eagleray.kernels.cuda import flash_attention
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.kernels.torch.onednn import OneDnnBackend
from eagleray.log import get_logger

logger = get_logger(__name__)

AttentionBackend = Literal["auto", "triton", "fa3", "torch"]

MIN_CAPABILITY = (8, 0)
"""Compute capability that our kernels need: Ampere's."""


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Traits of a model that decide which kernels serve it."""

    dtype: torch.dtype
    feature_sizes: Sequence[int]
    """See `ModelSpec.feature_sizes`."""
    head_dim: int
    has_sinks: bool = False
    has_mla: bool = False
    has_fp8_cache: bool = False


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, and the libraries that are installed for it."""

    capability: tuple[int, int]
    has_triton: bool
    has_fa3: bool

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        return cls(
            capability=torch.cuda.get_device_capability(device),
            has_triton=importlib.util.find_spec("triton") is not None,
            has_fa3=flash_attention.is_installed(),
        )


def choose_backend(
    device: torch.device, model: ModelTraits, attention_backend: AttentionBackend = "auto"
) -> KernelBackend:
    """Return the fastest backend for a model, or the one that `attention_backend` names. Raises `ConfigError` if it
    cannot compute the model here."""
    if device.type == "cuda":
        return _gpu_backend(Gpu.of(device), model, attention_backend)
    if attention_backend in ("triton", "fa3"):
        raise ConfigError(
            f"option `attention_backend`: {attention_backend} computes on NVIDIA GPUs alone, but this worker computes "
            "on the CPU; take auto or torch"
        )
    if attention_backend == "torch":
        return OneDnnBackend()
    if not CpuBackend.serves(model.dtype, feature_sizes=model.feature_sizes, head_dim=model.head_dim):
        logger.warning(
            "computing with plain torch, which is slower: the kernels for this processor serve bfloat16 and float32, "
            "even sizes, and heads of up to %d features",
            abi.MAX_HEAD_DIM,
        )
        return OneDnnBackend()
    try:
        return CpuBackend(native_library(), model.dtype, num_threads=torch.get_num_threads())
    except NativeUnavailable as error:
        logger.warning("computing with plain torch, which is slower: %s", error)
        return OneDnnBackend()


def _gpu_backend(gpu: Gpu, model: ModelTraits, attention_backend: AttentionBackend) -> KernelBackend:
    if attention_backend == "torch":
        return TorchBackend()
    if lack := triton_lack(gpu):
        if attention_backend != "auto":
            raise ConfigError(f"option `attention_backend`: {attention_backend} needs Triton's kernels, but {lack}")
        logger.warning("computing with plain torch, which is several times slower: %s", lack)
        return TorchBackend()
    from eagleray.kernels.cuda.backend import CudaBackend  # needs Triton

    lack = fa3_lack(gpu, model)
    if attention_backend == "fa3" and lack:
        raise ConfigError(f"option `attention_backend`: fa3 cannot compute this model here, because {lack}; take auto")
    uses_fa3 = attention_backend == "fa3" or (attention_backend == "auto" and not lack)
    return CudaBackend(model.dtype, prefills_by_fa3=uses_fa3)


def triton_lack(gpu: Gpu) -> str | None:
    """Return why Triton's kernels cannot run, or None if they can."""
    if gpu.capability < MIN_CAPABILITY:
        return f"this GPU has compute capability {_shown(gpu.capability)}, and they need {_shown(MIN_CAPABILITY)}"
    if not gpu.has_triton:
        return "the module triton cannot be imported: install the build of torch for CUDA, which includes it"
    return None


def fa3_lack(gpu: Gpu, model: ModelTraits) -> str | None:
    """Return why FlashAttention-3 cannot compute the prompts of a model, or None if it can."""
    needed = flash_attention.CAPABILITY
    if gpu.capability[0] != needed[0]:
        return f"this GPU has compute capability {_shown(gpu.capability)}, and it needs {_shown(needed)}"
    if not gpu.has_fa3:
        return f"the module {flash_attention.MODULE} (FlashAttention-3) cannot be imported: install it"
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"it does not support {str(model.dtype).removeprefix('torch.')}"
    if model.has_sinks or model.has_mla:
        return f"it does not support {'attention sinks' if model.has_sinks else 'multi-head latent attention'}"
    if model.has_fp8_cache:
        return "it reads a cache of fp8 for queries of fp8 alone"
    return None


def _shown(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
