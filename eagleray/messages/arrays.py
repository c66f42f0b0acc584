"""Types of the arrays inside messages, and of the frames that messages are sent as."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
Frame = bytes | bytearray | memoryview
