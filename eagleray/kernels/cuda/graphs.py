"""Capture of launches into something that repeats them: a CUDA graph, or on a CPU the launches themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class GraphCapture(Protocol):
    """The launches that a captured function made are repeated on the same memory, whatever it would do now."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats the launches of `function`, which may be called several times for that."""
        ...

    def renew(self) -> None:
        """Share no memory with earlier captures from now on. To be called when all of them are dropped."""
        ...


class CudaGraphCapture(GraphCapture):
    """Graphs whose temporary memory is shared, because they run one after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def renew(self) -> None:
        # torch refuses to capture into a pool whose graphs have all been freed
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        # not `torch.cuda.graph`, which waits for the device and empties the allocator's cache at every capture
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()  # loads kernels and allocates workspaces of libraries, which a capture does not allow
            # other threads may use CUDA meanwhile, for example to copy results
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay


class CallCapture(GraphCapture):
    """Calls in place of graphs, for devices without them."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        return function

    def renew(self) -> None:
        """Do nothing: nothing is shared."""
