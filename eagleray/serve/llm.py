"""Server class for `ray.serve.llm`: `LLMConfig(server_cls="eagleray.serve.llm:EagleRayServer", ...)`.

Importing this module fails, with a sentence that says what to install, where `ray.serve.llm` cannot be imported.
"""

from __future__ import annotations

try:
    import ray.serve.llm  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"eagleray.serve.llm needs ray.serve.llm, which cannot be imported here ({error}): Ray demands vLLM or SGLang "
        "for it, so pip install 'ray[llm]'; or use eagleray.serve.build_app, which needs neither"
    ) from error

from eagleray.serve.llm_server import EagleRayServer

__all__ = ["EagleRayServer"]
