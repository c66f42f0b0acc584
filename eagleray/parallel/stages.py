"""Transfers between the stages of a pipeline: hidden states go forward, sampled tokens from the last to the first."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import TCPStore, Work  # type: ignore[attr-defined]

from eagleray.errors import ChannelClosed, DeadlineExceeded
from eagleray.parallel.distributed import TorchProcessGroups, run_operation
from eagleray.parallel.mesh import Mesh
from eagleray.parallel.timeouts import OPERATION_TIMEOUT_SECONDS

HIDDEN_TAG = 1

TOKENS = "tokens"


class StageLinks:
    """The links of one rank to its neighbours in the pipeline. Waits of more than `timeout` seconds raise
    `DeadlineExceeded`.

    Hidden states travel over `connections`, between the ranks that have one tensor-parallel rank in all stages. Tokens
    travel through the store. It is in the process of rank 0, accepts them without waiting, and has a connection of its
    own, so tokens never wait behind hidden states.
    """

    def __init__(
        self,
        mesh: Mesh,
        connections: TorchProcessGroups,
        store: TCPStore,
        *,
        timeout: float = OPERATION_TIMEOUT_SECONDS,
    ) -> None:
        self._mesh = mesh
        self._timeout = timeout
        self._connections: TorchProcessGroups | None = connections
        self._store: TCPStore | None = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=timeout))
        self._sent: deque[tuple[Work, Tensor]] = deque()  # kept until they have certainly left

    def warm_up(self, device: torch.device) -> None:
        """Send a number through all stages, which connects neighbours. All stages call this together."""
        number = torch.zeros((1, 1), device=device)
        if not self._mesh.is_first_stage:
            number = self.receive_hidden((1, 1), number.dtype, device)
        if not self._mesh.is_last_stage:
            self.send_hidden(number)

    def send_hidden(self, hidden: Tensor) -> None:
        """Send to the same tensor-parallel rank of the next stage, without waiting for it to compute. `hidden` must not
        change afterwards."""
        hidden = hidden.contiguous()
        peer = self._mesh.pp_rank + 1
        what = f"hidden states from stage {peer - 1} to stage {peer}"
        if len(self._sent) > self._mesh.pp_size:  # more steps than an engine has in flight
            oldest, _ = self._sent.popleft()
            run_operation(what, lambda: oldest, self._timeout, hidden.device)
        try:
            work = self._open(what).of(hidden.device).send([hidden], peer, HIDDEN_TAG)
        except RuntimeError as error:
            raise ChannelClosed(f"{what}: {error}") from error
        self._sent.append((work, hidden))

    def receive_hidden(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the next hidden states of the previous stage, in the order in which it sent them."""
        hidden = torch.empty(shape, dtype=dtype, device=device)
        peer = self._mesh.pp_rank - 1
        what = f"hidden states from stage {peer} to stage {peer + 1}"
        backend = self._open(what).of(device)
        run_operation(what, lambda: backend.recv([hidden], peer, HIDDEN_TAG), self._timeout, device)
        return hidden

    def send_tokens(self, token_ids: Tensor) -> None:
        """Send int64 [n] on the CPU from the rank that samples to rank 0. Never waits, however much is on the way."""
        what = "tokens from the rank that samples to rank 0"
        if self._store is None:
            raise ChannelClosed(f"{what}: the stages were closed")
        try:
            self._store.queue_push(TOKENS, token_ids.numpy().tobytes())
        except RuntimeError as error:
            raise ChannelClosed(f"{what}: {error}") from error

    def receive_tokens(self, count: int) -> Tensor:
        """Return on rank 0 the tokens of the next `send_tokens`, which are `count`."""
        what = "tokens from the rank that samples to rank 0"
        if self._store is None:
            raise ChannelClosed(f"{what}: the stages were closed")
        try:
            data = self._store.queue_pop(TOKENS)
        except RuntimeError as error:
            raise DeadlineExceeded(f"{what}: none came within {self._timeout:g} s ({error})") from error
        token_ids = torch.frombuffer(bytearray(data), dtype=torch.int64)
        assert len(token_ids) == count, f"{len(token_ids)} tokens came, {count} were expected"
        return token_ids

    def close(self) -> None:
        """Close the links; harmless when repeated."""
        self._sent.clear()
        self._connections = self._store = None

    def _open(self, what: str) -> TorchProcessGroups:
        if self._connections is None:
            raise ChannelClosed(f"{what}: the stages were closed")
        return self._connections
