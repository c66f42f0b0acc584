"""What travels between the stages of a pipeline: hidden states forward, sampled tokens from the end to the start."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import TCPStore, Work  # type: ignore[attr-defined]

from eagleray.errors import ChannelClosed, DeadlineExceeded
from eagleray.parallel.distributed import TorchProcessGroups, finish
from eagleray.parallel.group import OPERATION_SECONDS
from eagleray.parallel.mesh import Mesh

HIDDEN_TAG = 1

TOKENS = "tokens"


class StageLinks(Protocol):
    """The neighbouring stages, seen from one rank. Waits that last too long raise `DeadlineExceeded`."""

    def send_hidden(self, hidden: Tensor) -> None:
        """To the same tensor-parallel rank of the next stage. Does not wait for it to compute; `hidden` must stay as
        it is."""
        ...

    def receive_hidden(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the previous stage sent, in the order in which it did."""
        ...

    def send_tokens(self, token_ids: Tensor) -> None:
        """From the rank that samples to rank 0: int64 [n] of the CPU. Never waits, however much is on the way."""
        ...

    def receive_tokens(self, count: int) -> Tensor:
        """On rank 0: the next `count` tokens that were sent at once."""
        ...

    def close(self) -> None:
        """Harmless when repeated."""
        ...


class SingleStage:
    """All layers in one stage: nothing travels."""

    def send_hidden(self, hidden: Tensor) -> None:
        raise AssertionError("there is no next stage")

    def receive_hidden(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        raise AssertionError("there is no previous stage")

    def send_tokens(self, token_ids: Tensor) -> None:
        raise AssertionError("with one stage, tokens are broadcast")

    def receive_tokens(self, count: int) -> Tensor:
        raise AssertionError("with one stage, tokens are broadcast")

    def close(self) -> None:
        pass


class TorchStages:
    """Hidden states travel over `connections`, between the ranks of one tensor-parallel rank in all stages. Tokens
    travel by the store: it is in the process of rank 0, takes them without waiting, and has a connection of its own,
    so that they never stand in the way of hidden states."""

    def __init__(
        self, mesh: Mesh, connections: TorchProcessGroups, store: TCPStore, *, timeout: float = OPERATION_SECONDS
    ) -> None:
        self._mesh = mesh
        self._timeout = timeout
        self._connections: TorchProcessGroups | None = connections
        self._store: TCPStore | None = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=timeout))
        self._sent: deque[tuple[Work, Tensor]] = deque()  # kept until it is certain that they have left

    def send_hidden(self, hidden: Tensor) -> None:
        hidden = hidden.contiguous()
        peer = self._mesh.pp_rank + 1
        what = f"hidden states from stage {peer - 1} to stage {peer}"
        if len(self._sent) > self._mesh.pp_size:  # more steps than an engine has on the way
            oldest, _ = self._sent.popleft()
            finish(what, lambda: oldest, self._timeout, hidden.device)
        try:
            work = self._open(what).of(hidden.device).send([hidden], peer, HIDDEN_TAG)
        except RuntimeError as error:
            raise ChannelClosed(f"{what}: {error}") from error
        self._sent.append((work, hidden))

    def receive_hidden(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        hidden = torch.empty(shape, dtype=dtype, device=device)
        peer = self._mesh.pp_rank - 1
        what = f"hidden states from stage {peer} to stage {peer + 1}"
        backend = self._open(what).of(device)
        finish(what, lambda: backend.recv([hidden], peer, HIDDEN_TAG), self._timeout, device)
        return hidden

    def send_tokens(self, token_ids: Tensor) -> None:
        what = "tokens from the rank that samples to rank 0"
        if self._store is None:
            raise ChannelClosed(f"{what}: the stages were closed")
        try:
            self._store.queue_push(TOKENS, token_ids.numpy().tobytes())
        except RuntimeError as error:
            raise ChannelClosed(f"{what}: {error}") from error

    def receive_tokens(self, count: int) -> Tensor:
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
        self._sent.clear()
        self._connections = self._store = None

    def _open(self, what: str) -> TorchProcessGroups:
        if self._connections is None:
            raise ChannelClosed(f"{what}: the stages were closed")
        return self._connections
