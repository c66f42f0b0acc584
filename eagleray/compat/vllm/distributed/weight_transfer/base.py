"""Requests that `init_weight_transfer_engine` and `update_weights` take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class WeightTransferInitRequest:
    """Fields of a backend."""

    init_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class WeightTransferUpdateRequest:
    """Description of the tensors that come."""

    update_info: dict[str, Any] = field(default_factory=dict)
