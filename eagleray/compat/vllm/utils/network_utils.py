"""Addresses and ports of this machine."""

from __future__ import annotations

import os
import socket

ANY_REMOTE_ADDRESS = ("8.8.8.8", 80)
"""Address to which a route is looked up; nothing is sent there."""


def get_ip() -> str:
    """Return the address of this machine: VLLM_HOST_IP, or that of its default route, or the loopback one."""
    if given := os.environ.get("VLLM_HOST_IP"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ANY_REMOTE_ADDRESS)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def get_open_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
