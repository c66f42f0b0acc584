"""Storages of a GPU are freed and allocated again, and a pass that is made anew computes with them. On a CPU, with
interpreted kernels."""

from __future__ import annotations

import pytest
import torch
from cuda_passes import MIXED, Layers, Pass, batch_of
from torch import Tensor

from eagleray.kernels.cuda import program as program_module
from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.memory_release import ReleasableStorages


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module, "TOKEN_BUCKETS", (8, 16))
    monkeypatch.setattr(program_module, "DECODE_BUCKETS", (1, 2, 4))


def weights_of(layers: Layers) -> list[Tensor]:
    named = [part for part in vars(layers).values() if hasattr(part, "storage")]
    return [memory for part in (*layers.norms, *named) for memory in part.storage()]


def test_storages_released_and_restored_serve_a_new_program() -> None:
    layers = Layers(CudaBackend(torch.float32))
    run = Pass(layers.backend, lambda ids, caches, context: layers.dense(layers.embed(ids), caches[0], context)).fill()
    batch = batch_of(MIXED)
    expected = run.run(batch)
    kept = [part.clone() for part in weights_of(layers)]
    weights, cache = (ReleasableStorages(tensors) for tensors in (weights_of(layers), run.cache.layers))
    size = sum(part.nbytes for part in {part.data_ptr(): part for part in kept}.values())
    for keeps in (True, False):
        run.forward.release()
        assert weights.release(keeps=keeps) == size
        assert cache.release(keeps=False) == sum(layer.nbytes for layer in run.cache.layers)
        assert all(part.untyped_storage().nbytes() == 0 for part in (*weights_of(layers), *run.cache.layers))
        weights.restore()
        if not keeps:
            assert not any(part.any() for part in weights_of(layers))
            for target, part in zip(weights_of(layers), kept, strict=True):
                target.copy_(part)
        cache.restore()
        assert not any(layer.any() for layer in run.cache.layers)
        assert torch.equal(run.fill().run(batch), expected)


def test_storages_shared_by_tensors_are_copied_once() -> None:
    whole = torch.arange(12)
    memory = ReleasableStorages([whole[:4], whole[2:], torch.empty(0)])
    assert memory.release(keeps=True) == whole.nbytes
    memory.restore()
    assert whole.tolist() == list(range(12))


def test_storages_released_deeper_lose_their_contents() -> None:
    memory = ReleasableStorages([whole := torch.arange(12)])
    assert memory.release(keeps=True) == whole.nbytes
    assert memory.release(keeps=True) == memory.release(keeps=False) == memory.release(keeps=True) == 0
    memory.restore()
    assert whole.tolist() == [0] * 12
    memory.restore()
    assert memory.release(keeps=False) == whole.nbytes


def test_storages_restored_without_memory_remain_released(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(5), torch.arange(7)]
    memory = ReleasableStorages(tensors)
    memory.release(keeps=True)
    resize, sizes = torch.UntypedStorage.resize_, []

    def refuse(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        sizes.append(size)
        if len(sizes) == 2:
            raise torch.OutOfMemoryError("none is left")
        return resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            memory.restore()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0]
    memory.restore()
    assert [tensor.tolist() for tensor in tensors] == [list(range(5)), list(range(7))]
