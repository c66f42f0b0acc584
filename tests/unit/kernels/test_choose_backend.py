"""The backend that computes a model, by device, libraries and option."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from eagleray.errors import ConfigError
from eagleray.kernels import choose
from eagleray.kernels.choose import Gpu, ModelTraits, choose_backend, fa3_lack
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.kernels.torch.onednn import OneDnnBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DENSE = ModelTraits(torch.bfloat16, feature_sizes=[64], head_dim=64)
HOPPER = Gpu(capability=(9, 0), has_triton=True, has_fa3=True)


@pytest.fixture
def gpu(monkeypatch):
    def use(gpu: Gpu) -> None:
        monkeypatch.setattr(choose.Gpu, "of", lambda device: gpu)

    return use


def test_choose_backend_on_a_cpu_is_native_or_plain_torch_when_asked_for():
    assert isinstance(choose_backend(CPU, DENSE), CpuBackend)
    assert isinstance(choose_backend(CPU, DENSE, "torch"), OneDnnBackend)


@pytest.mark.parametrize("option", ["triton", "fa3"])
def test_choose_backend_for_gpus_on_a_cpu_is_refused(option):
    with pytest.raises(ConfigError, match=f"{option} computes on NVIDIA GPUs alone"):
        choose_backend(CPU, DENSE, option)


@pytest.mark.parametrize(
    ("found", "option", "uses_fa3"),
    [
        (HOPPER, "auto", True),
        (HOPPER, "fa3", True),
        (HOPPER, "triton", False),
        (replace(HOPPER, has_fa3=False), "auto", False),
        (replace(HOPPER, capability=(8, 6)), "auto", False),
        (replace(HOPPER, capability=(10, 0)), "auto", False),
    ],
)
def test_choose_backend_on_a_gpu_takes_fa3_for_prompts_where_it_can(gpu, found, option, uses_fa3):
    gpu(found)
    backend = choose_backend(CUDA, DENSE, option)
    assert isinstance(backend, CudaBackend) and backend.prefills_by_fa3 == uses_fa3


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (replace(HOPPER, capability=(7, 5)), "compute capability 7.5, and they need 8.0"),
        (replace(HOPPER, has_triton=False), "the module triton cannot be imported"),
    ],
)
def test_choose_backend_without_triton_warns_once_or_refuses(gpu, caplog, found, reason):
    gpu(found)
    with caplog.at_level(logging.WARNING, logger="eagleray"):
        assert type(choose_backend(CUDA, DENSE)) is TorchBackend
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    for option in ("triton", "fa3"):
        with pytest.raises(ConfigError, match=reason):
            choose_backend(CUDA, DENSE, option)
    assert type(choose_backend(CUDA, DENSE, "torch")) is TorchBackend


@pytest.mark.parametrize(
    ("found", "model", "reason"),
    [
        (replace(HOPPER, has_fa3=False), DENSE, "flash_attn_interface"),
        (replace(HOPPER, capability=(8, 0)), DENSE, "needs 9.0"),
        (HOPPER, replace(DENSE, dtype=torch.float32), "does not support float32"),
        (HOPPER, replace(DENSE, has_sinks=True), "does not support attention sinks"),
        (HOPPER, replace(DENSE, has_mla=True), "does not support multi-head latent attention"),
        (HOPPER, replace(DENSE, has_fp8_cache=True), "a cache of fp8"),
    ],
)
def test_choose_backend_fa3_that_cannot_serve_the_model_is_refused(gpu, found, model, reason):
    gpu(found)
    assert fa3_lack(found, model) is not None
    with pytest.raises(ConfigError, match=reason):
        choose_backend(CUDA, model, "fa3")
    backend = choose_backend(CUDA, model)
    assert isinstance(backend, CudaBackend) and not backend.prefills_by_fa3
