"""Outputs of requests."""

from eagleray.client.outputs import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
