"""Tensors that a receiver yields, as copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagleray.weights.receiver import CheckTensors, NamedTensors, WeightReceiver
from eagleray.weights.tensors import SentTensor


def accept(tensors: Sequence[SentTensor]) -> None:
    """Have a place for every tensor."""


def collect(receiver: WeightReceiver, update_info: dict[str, Any], check: CheckTensors = accept) -> NamedTensors:
    """Return what the receiver yields. Each bucket is copied before the next one is requested."""
    received: NamedTensors = []
    for bucket in receiver.receive(update_info, check):
        received += [(name, tensor.clone()) for name, tensor in bucket]
    return received
