"""Why there are no compiled kernels."""

from __future__ import annotations

from eagleray.errors import EagleRayError


class NativeUnavailable(EagleRayError):
    """The kernels cannot be compiled or loaded here; the message says why and what to do. Plain torch can compute."""
