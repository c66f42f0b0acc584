"""Small functions."""

from __future__ import annotations

import uuid

from eagleray.compat.vllm.utils.network_utils import get_ip, get_open_port

__all__ = ["get_ip", "get_open_port", "random_uuid"]


def random_uuid() -> str:
    """Return a random id of 32 hexadecimal digits."""
    return uuid.uuid4().hex
