"""Weights on their way from a trainer to the workers: one module for each backend, and the trainer's side of them.

Workers receive by `receiver.open_receiver`. A trainer needs torch and this package alone: `Sender` sends to all workers
of an instance by a group of gloo, `SharedMemorySender` to those on its own node.
"""

from __future__ import annotations

from eagleray.weights.sender import Sender
from eagleray.weights.shared_memory_sender import SharedMemorySender

__all__ = ["Sender", "SharedMemorySender"]
