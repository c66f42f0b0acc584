"""Requests that `init_weight_transfer_engine` and `update_weights` take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class WeightTransferInitRequest:
    """Request to connect to a trainer: the fields of a backend."""

    init_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class WeightTransferUpdateRequest:
    """Request to receive tensors, with their description."""

    update_info: dict[str, Any] = field(default_factory=dict)
