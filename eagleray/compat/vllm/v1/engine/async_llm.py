"""The asynchronous interface."""

from eagleray.compat.vllm.engine.async_llm_engine import AsyncLLMEngine as AsyncLLM

__all__ = ["AsyncLLM"]
