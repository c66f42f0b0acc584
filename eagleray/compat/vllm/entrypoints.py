"""`LLM`, where vLLM has it."""

from eagleray.llm import LLM

__all__ = ["LLM"]
