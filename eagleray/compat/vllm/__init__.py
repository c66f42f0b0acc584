"""eagleray under the names of vLLM 0.32, for programs that import `vllm`.

`PYTHONPATH=$(python -m eagleray.compat.vllm)` makes a program import it as `vllm`; so does the call
`eagleray.compat.alias.install()` before the first import. Names that are not here raise an ImportError.
"""

from __future__ import annotations

from eagleray.client.outputs import CompletionOutput, RequestOutput
from eagleray.client.pooling import PoolingParams
from eagleray.compat.vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from eagleray.compat.vllm.engine.async_llm_engine import AsyncLLMEngine
from eagleray.compat.vllm.entrypoints import LLM
from eagleray.compat.vllm.inputs import PromptType, TextPrompt, TokensPrompt
from eagleray.compat.vllm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from eagleray.messages.sampling import SamplingParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

__version__ = "0.32.0"
"""Version of vLLM whose names these are; programs compare it."""
