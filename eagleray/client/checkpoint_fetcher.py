"""Fetching of checkpoints that engines are restarted with. Owned by `Client`; one thread for each checkpoint."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from eagleray.errors import WrongState
from eagleray.identity import ClientId
from eagleray.messages.checkpoints import CheckpointFetched, FetchCheckpoint
from eagleray.messages.failure import Failure

PrepareCheckpoint = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Returns the options of a restart with the checkpoint that was found for them. Raises the reason if there is none."""


def fetch_nothing(options: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse to fetch the checkpoint of these options."""
    raise WrongState(f"this client cannot fetch {options['model']}")


class CheckpointFetcher:
    """`prepare` finds or downloads a checkpoint and checks it. `send` sends a message to the supervisor."""

    def __init__(
        self, client: ClientId, *, prepare: PrepareCheckpoint, send: Callable[[CheckpointFetched], None]
    ) -> None:
        self._client = client
        self._prepare = prepare
        self._send = send

    def begin(self, message: FetchCheckpoint) -> None:
        """Find or fetch a checkpoint in a thread, and send the outcome from the running event loop."""
        loop = asyncio.get_running_loop()

        def deliver(outcome: dict[str, Any] | Failure) -> None:
            failure, options = (outcome, {}) if isinstance(outcome, Failure) else (None, outcome)
            self._send(CheckpointFetched(self._client, message.operation_id, options=options, failure=failure))

        def fetch() -> None:
            try:
                outcome: dict[str, Any] | Failure = self._prepare(message.options)
            except Exception as error:
                outcome = Failure.of(error)
            with suppress(RuntimeError):  # the loop was closed meanwhile, and another client fetches the checkpoint
                loop.call_soon_threadsafe(deliver, outcome)

        # A daemon, so that a process that is told to stop does not wait for a download.
        threading.Thread(target=fetch, name="checkpoint-fetch", daemon=True).start()
