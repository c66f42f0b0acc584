"""eagleray: a Ray-native inference engine for large language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagleray.async_llm import AsyncLLM, AsyncLLMEngine
    from eagleray.client.outputs import CompletionOutput, RequestOutput
    from eagleray.client.pooling import PoolingParams, PoolingRequestOutput
    from eagleray.engine_args import AsyncEngineArgs, EngineArgs
    from eagleray.llm import LLM
    from eagleray.lora import LoRARequest
    from eagleray.messages.sampling import RepetitionDetectionParams, RequestOutputKind, SamplingParams
    from eagleray.messages.structured_outputs import StructuredOutputsParams
    from eagleray.prompts import PromptType, TextPrompt, TokensPrompt
    from eagleray.row_errors import RequestError

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]
__version__ = "0.1.0"

MODULES = {
    "LLM": "llm",
    "LoRARequest": "lora",
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "EngineArgs": "engine_args",
    "AsyncEngineArgs": "engine_args",
    "RepetitionDetectionParams": "messages.sampling",
    "CompletionOutput": "client.outputs",
    "PoolingParams": "client.pooling",
    "PoolingRequestOutput": "client.pooling",
    "RequestOutput": "client.outputs",
    "RequestOutputKind": "messages.sampling",
    "SamplingParams": "messages.sampling",
    "StructuredOutputsParams": "messages.structured_outputs",
    "PromptType": "prompts",
    "TextPrompt": "prompts",
    "TokensPrompt": "prompts",
    "RequestError": "row_errors",
}
"""Modules of the names that are imported when they are first used: they pull in sockets and the tokenizer, of which
`eagleray --help` needs neither, and a trainer that imports `eagleray.weights` may have torch alone."""


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(importlib.import_module(f"eagleray.{MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
