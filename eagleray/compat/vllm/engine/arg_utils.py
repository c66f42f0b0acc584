"""Options of an engine, as vLLM names them."""

from __future__ import annotations

from typing import Any

from eagleray import engine_args
from eagleray.compat.vllm.options import eagleray_options


class EngineArgs(engine_args.EngineArgs):
    """`eagleray.EngineArgs`, which takes options of vLLM."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        super().__init__(model, **eagleray_options(options))


class AsyncEngineArgs(EngineArgs):
    """The same options, under vLLM's other name."""
