"""Offers of packed weights to the worker of another engine, and their end when the weights change or sleep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eagleray.errors import TransferBroken
from eagleray.messages.weight_transfer import OpenTransfer, ServeStorage
from eagleray.worker import storage_transfer
from eagleray.worker.storage_transfer import SharedStorage, StorageFetch, StorageOffer
from eagleray.worker.weight_update import WeightUpdater

TIMEOUT = 30.0
NUMBER = 4


def shared(tensors: list[Tensor], is_readable: Callable[[], bool] = lambda: True) -> SharedStorage:
    return SharedStorage(lambda: tensors, ("layout",), "127.0.0.1", is_readable)


def make_weights() -> list[Tensor]:
    return [torch.arange(size, dtype=torch.int64).to(torch.uint8) for size in (3000, 1)]


def fetch(handle: bytes, storage: SharedStorage) -> None:
    StorageFetch(handle, storage.tensors(), storage.header(NUMBER), timeout=TIMEOUT).run()


class PieceHook:
    """Calls a function when the second piece is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
        self._read = StorageOffer._read
        self._num_read = 0
        self._call = call
        monkeypatch.setattr(StorageOffer, "_read", lambda offer, piece: self.read(offer, piece))

    def read(self, offer: StorageOffer, piece: Tensor) -> Any:
        self._num_read += 1
        if self._num_read == 2:
            self._call()
        return self._read(offer, piece)


@pytest.mark.parametrize("change", [None, "closed", "loaded"])
def test_storage_offer_changed_between_pieces_is_not_taken(monkeypatch: pytest.MonkeyPatch, change: str | None) -> None:
    monkeypatch.setattr(storage_transfer, "PIECE_BYTES", 1024)
    weights, received = make_weights(), [torch.zeros_like(part) for part in make_weights()]
    loads = [0]
    storage = dataclasses.replace(shared(weights), num_loads=lambda: len(loads))
    offer = StorageOffer(storage, NUMBER, host="127.0.0.1", timeout=TIMEOUT)

    def at_second_piece() -> None:
        if change == "closed":
            offer.close()
        if change == "loaded":
            loads.append(1)

    PieceHook(monkeypatch, at_second_piece)
    if change is not None:
        with pytest.raises(TransferBroken, match="the other engine changed its weights while it sent them"):
            fetch(offer.handle, shared(received))
        assert not received[0][1024:].any(), "nothing was read after it"
    else:
        fetch(offer.handle, shared(received))
        assert all(map(torch.equal, received, weights))


def test_weight_updater_open_transfer_calls_on_open_once() -> None:
    calls = []
    updater = WeightUpdater(
        lambda **_: pytest.fail("no update is started"),
        rank=0,
        device=torch.device("cpu"),
        init_defaults={},
        timeout=TIMEOUT,
        on_open=lambda: calls.append(1),
    )
    updater.handle(OpenTransfer(init_info={"backend": "no such"}, first_rank=0))
    assert calls == []
    updater.handle(OpenTransfer(init_info={"backend": "shm"}, first_rank=0))
    updater.close()
    assert calls == [1]


@pytest.mark.parametrize("are_kept", [False, True])
def test_weight_updater_sleep_ends_offers_and_refuses_others(are_kept: bool) -> None:
    is_awake = True
    storage = shared(make_weights(), lambda: is_awake)
    updater = WeightUpdater(
        lambda **_: pytest.fail("no update is started"),
        rank=0,
        device=torch.device("cpu"),
        init_defaults={},
        timeout=TIMEOUT,
        storage=storage,
    )
    call = ServeStorage(number=0, timeout=TIMEOUT, host=None)
    served = updater.handle(call)
    updater.on_weights_sleep(are_kept=are_kept)
    receiver = shared([torch.zeros_like(part) for part in make_weights()])
    with pytest.raises(TransferBroken, match="changed its weights"):
        StorageFetch(served.handle, receiver.tensors(), receiver.header(0), timeout=TIMEOUT).run()
    is_awake = False
    refused = updater.handle(call).failure
    assert ("are asleep" if are_kept else "has weights of update None, not of 0") in refused.message
    is_awake = True
    served = updater.handle(call)
    assert (served.failure is None) == are_kept
    if are_kept:
        StorageFetch(served.handle, receiver.tensors(), receiver.header(0), timeout=TIMEOUT).run()
        assert all(map(torch.equal, receiver.tensors(), storage.tensors()))
    updater.close()
