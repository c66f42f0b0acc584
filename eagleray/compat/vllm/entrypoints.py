"""`LLM` with the options of vLLM."""

from __future__ import annotations

from typing import Any

from eagleray import llm
from eagleray.compat.vllm.options import eagleray_options


class LLM(llm.LLM):
    """`eagleray.LLM`, which takes options of vLLM."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **eagleray_options(options))
