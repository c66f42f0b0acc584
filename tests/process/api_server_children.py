"""Targets of the processes that `test_api_servers.py` spawns."""

from __future__ import annotations

import os
import signal

import pytest

from eagleray.process.parent import Parent
from eagleray.server import entry
from eagleray.server.http_protocol import HttpProtocol


def exit_while_reading(payload: bytes, parent: Parent) -> None:
    """Run an API server that gets SIGTERM while it reads from a connection."""

    def data_received(protocol: HttpProtocol, data: bytes) -> None:
        parent.has_told_to_exit = True
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HttpProtocol, "data_received", data_received)
        entry.run(payload, parent)
