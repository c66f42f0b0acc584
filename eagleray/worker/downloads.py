"""Results of a step on their way from the device to the host.

A step begins the download of its results when its kernels are launched, and waits for it when the step is finished. The
device computes the next step meanwhile, so each download has memory of its own on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HostArray = npt.NDArray[Any]

ALIGNMENT = 16
"""Bytes. Each array begins at a multiple of it in the pinned memory."""


class Download(Protocol):
    """Tensors of one step on their way to the host."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self) -> list[HostArray]:
        """Wait for the arrays and return them, in the order of the tensors. Called once."""
        ...


class DownloadQueue(Protocol):
    """The downloads of one device. They end in the order in which they begin."""

    def begin(self, tensors: Sequence[Tensor]) -> Download:
        """Begin to download `tensors`, which nothing may overwrite until the download has ended."""
        ...


class HostDownloads(DownloadQueue):
    """Downloads of tensors that are in the host's memory already."""

    def begin(self, tensors: Sequence[Tensor]) -> Download:
        return _Arrived([tensor.numpy() for tensor in tensors])


class CudaDownloads(DownloadQueue):
    """Downloads by a stream of their own into pinned memory, beside the kernels of the next step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._free: list[Tensor] = []  # pinned memory that no download uses

    def begin(self, tensors: Sequence[Tensor]) -> Download:
        sources = [tensor.contiguous() for tensor in tensors]
        offsets = np.cumsum([0] + [-(-source.nbytes // ALIGNMENT) * ALIGNMENT for source in sources]).tolist()
        pinned = self._reserve(offsets[-1])
        targets = [
            pinned[offset : offset + source.nbytes].view(source.dtype).view(source.shape)
            for offset, source in zip(offsets[:-1], sources, strict=True)
        ]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            copied = self._stream.record_event()
        return _CudaDownload(copied, sources, targets, pinned, self._free)

    def _reserve(self, num_bytes: int) -> Tensor:
        pinned = self._free.pop() if self._free else torch.empty(0, dtype=torch.uint8)
        if num_bytes > len(pinned):
            return torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=True)
        return pinned


class _Arrived(Download):
    is_done = True

    def __init__(self, arrays: list[HostArray]) -> None:
        self._arrays = arrays

    def wait(self) -> list[HostArray]:
        return self._arrays


class _CudaDownload(Download):
    """Keeps the device's tensors until they are copied, so that no kernel gets their memory before."""

    def __init__(
        self, copied: torch.cuda.Event, sources: list[Tensor], targets: list[Tensor], pinned: Tensor, free: list[Tensor]
    ) -> None:
        self._copied = copied
        self._sources = sources
        self._targets = targets
        self._pinned = pinned
        self._free = free

    @property
    def is_done(self) -> bool:
        return self._copied.query()

    def wait(self) -> list[HostArray]:
        self._copied.synchronize()
        arrays = [target.numpy().copy() for target in self._targets]
        self._free.append(self._pinned)
        self._sources.clear()
        return arrays


def downloads_of(device: torch.device) -> DownloadQueue:
    """Return the downloads of `device`."""
    return CudaDownloads(device) if device.type == "cuda" else HostDownloads()
