"""Options of an engine, as vLLM names them."""

from __future__ import annotations

from eagleray.engine_args import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
