"""torch's default process group over the ranks of an engine, for worker extensions that call `torch.distributed`.

The engine itself uses groups of its own (`distributed`). The default group is global to a process, so it is left alone
where the process has one already.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from eagleray.log import get_logger
from eagleray.parallel.gloo_connections import connect_gloo
from eagleray.parallel.rendezvous import LOOPBACK

logger = get_logger(__name__)

BACKEND = "eagleray_gloo"
"""gloo, listening on the address of this rank: torch's own `gloo` takes what the host's name resolves to."""


class DefaultGroup:
    """The default process group of this process, which `close` destroys. Made by `open_default_group`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    def close(self) -> None:
        """Destroy the group, and with it all groups of `torch.distributed`; harmless when repeated. A group that the
        extension has put in its place is left."""
        if self._group is not None and dist.is_initialized() and dist.group.WORLD is self._group:
            dist.destroy_process_group()
        self._group = None


def open_default_group(
    store: Store | None, *, rank: int, size: int, host: str, device: torch.device, timeout: float
) -> DefaultGroup | None:
    """Initialize the default process group, and return it; None if this process has one already.

    All ranks call this at the same time; a rank that is alone needs no `store`. On GPUs the group also has NCCL, which
    connects at its first operation. Raises `DeadlineExceeded` if the ranks are not connected within `timeout` seconds,
    which is also the time limit of an operation.
    """
    if dist.is_initialized():
        logger.warning(
            "torch's default process group exists already and is left as it is: `torch.distributed.get_rank()` is %d, "
            "and the rank in the engine is %d",
            dist.get_rank(),
            rank,
        )
        return None
    assert store is not None or size == 1, "several ranks meet in a store"
    _maker.host = host
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _maker.make, devices=["cpu"])
    dist.init_process_group(
        f"cpu:{BACKEND},cuda:nccl" if device.type == "cuda" else BACKEND,
        store=HashStore() if store is None else PrefixStore("default group", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    assert dist.group.WORLD is not None
    return DefaultGroup(dist.group.WORLD)


class _GlooMaker:
    """Makes the connections when torch initializes a group. torch keeps one for the whole process."""

    def __init__(self) -> None:
        self.host = LOOPBACK

    def make(self, store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        return connect_gloo(store, "the default group", rank=rank, size=size, host=self.host, timeout=timeout)


_maker = _GlooMaker()
