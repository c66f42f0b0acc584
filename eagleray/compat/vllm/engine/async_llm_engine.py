"""The asynchronous interface, with internal attributes that programs use."""

from __future__ import annotations

from eagleray import async_llm


class AsyncLLMEngine(async_llm.AsyncLLM):
    """`eagleray.AsyncLLM`."""

    @property
    def output_processor(self) -> AsyncLLMEngine:
        """This object, which counts the unfinished requests as vLLM's output processor does."""
        return self
