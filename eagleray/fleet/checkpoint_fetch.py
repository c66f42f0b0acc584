"""The operation whose checkpoint is being fetched, and the client that fetches it.

Pure: owned by `Scaling`. One of the instance's own clients finds or downloads the checkpoint, and compares it with that
of the start, because the supervisor has neither time nor the tokenizer for that. If the client exits, another one goes
on. Other operations run meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagleray.fleet import timeouts
from eagleray.identity import FIRST_EXTERNAL_INDEX, ClientId
from eagleray.messages.checkpoints import CheckpointFetched, FetchCheckpoint
from eagleray.messages.scaling import RestartEngines

if TYPE_CHECKING:
    from eagleray.fleet.membership import Membership
    from eagleray.fleet.scaling_operations import ScalingOperation
    from eagleray.fleet.turn import Turn


def needs_fetch(request: object) -> bool:
    """Whether a request names a checkpoint, which has to be found, and perhaps downloaded, before it begins."""
    return isinstance(request, RestartEngines) and "model" in request.options


class CheckpointFetch:
    def __init__(self, membership: Membership, turn: Turn) -> None:
        self._membership = membership
        self._turn = turn
        self.operation: ScalingOperation | None = None
        """The operation whose checkpoint is being fetched."""
        self._client: ClientId | None = None
        """The client that fetches it; None while there is no client."""

    def begin(self, operation: ScalingOperation, caller: ClientId | None) -> None:
        """Have the caller fetch the checkpoint of an operation, or another client if the caller is external."""
        operation.phase = "fetching"
        operation.deadline = self._turn.now + timeouts.FETCH_CHECKPOINT_SECONDS
        self.operation, self._client = operation, None
        self._choose(caller)

    def end(self) -> None:
        """Forget the operation, because it goes on or has failed."""
        if self.operation is not None:
            self.operation.deadline = None
        self.operation = self._client = None

    def take(self, message: CheckpointFetched) -> ScalingOperation | None:
        """Return the operation that an outcome is about, which fetches nothing from now on; None for the outcome of an
        operation that was replaced, or of a client that was given up."""
        operation = self.operation
        if operation is None or (message.operation_id, message.client) != (operation.operation_id, self._client):
            return None
        self.end()
        return operation

    def on_clients_changed(self) -> None:
        """Handle that a client was attached, or has left."""
        if self.operation is not None and (self._client is None or self._client not in self._membership):
            self._client = None
            self._choose(None)

    @property
    def is_late(self) -> bool:
        """Whether it has taken too long."""
        deadline = None if self.operation is None else self.operation.deadline
        return deadline is not None and self._turn.now >= deadline

    @property
    def reason(self) -> str:
        """What the operation waits for."""
        assert self.operation is not None and isinstance(self.operation.request, RestartEngines)
        model = self.operation.request.options["model"] or "the demo model"
        by = "a client, of which none is attached," if self._client is None else self._client.label
        return f"{by} must find or download {model} and check it"

    def _choose(self, preferred: ClientId | None) -> None:
        assert self.operation is not None and isinstance(self.operation.request, RestartEngines)
        own = [client for client in self._membership.clients if client.index < FIRST_EXTERNAL_INDEX]
        if own:
            self._client = preferred if preferred in own else own[0]
            self._turn.send(FetchCheckpoint(self.operation.operation_id, self.operation.request.options), self._client)
