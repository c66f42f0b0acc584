"""Server class for `ray.serve.llm`: `LLMConfig(server_cls="eagleray.serve.llm:EagleRayServer", ...)`.

Its methods, those of `ray.llm._internal.serve.core.protocol.LLMServerProtocol`, become calls of our HTTP application
and of the instance. So there is one request path and one set of errors, also for fields that are not supported.
Importing this module fails, with a sentence that says what to install, where `ray.serve.llm` cannot be imported.
"""

from __future__ import annotations

import codecs
import importlib
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.types import ASGIApp

try:
    import ray.serve.llm  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"eagleray.serve.llm needs ray.serve.llm, which cannot be imported here ({error}): Ray demands vLLM or SGLang "
        "for it, so pip install 'ray[llm]'; or use eagleray.serve.build_app, which needs neither"
    ) from None

from eagleray.cluster.offered import offered_resources
from eagleray.errors import InvalidRequest, UnknownModel
from eagleray.instance_calls import METHODS_ELSEWHERE, InstanceCalls
from eagleray.serve.adapter_source import adapter_capacity
from eagleray.serve.llm_options import llm_deployment_options, llm_server_config
from eagleray.serve.replica import ServedInstance
from eagleray.server.app_calls import posted

MODELS = "ray.llm._internal.serve.core.configs.openai_api_models"
"""Module of Ray with the types of requests and answers. Needs vLLM or SGLang."""

OWN_HEADERS = frozenset({"content-length", "content-type", "content-encoding", "transfer-encoding", "host"})
"""Headers of a request that concern its body, which Ray's ingress has read."""

Answers = AsyncGenerator[Any, None]
"""Yields pieces of a stream of events as texts, or one answer or error as an object of Ray's types."""


class EagleRayServer:
    """A replica of `ray.serve.llm`, whose engines are children of this process or actors in its placement group."""

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self._llm_config = llm_config
        self._served: ServedInstance | None = None
        await self.start()

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Return the options of the deployment, with bundles for replica and workers. Raises `ConfigError`."""
        return llm_deployment_options(llm_config, offered_resources())

    async def start(self) -> None:
        """Start the engines, and wait until they serve. Idempotent."""
        if self._served is None:
            config = llm_server_config(self._llm_config)
            self._served = await ServedInstance.open(
                config,
                find_adapter=self._find_adapter,
                num_adapters=adapter_capacity(config),
                has_ray_metrics=self._llm_config.log_engine_metrics,
            )

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application, which Ray serves without its own ingress if direct streaming is on."""
        return self._instance.app

    async def __del__(self) -> None:
        """Stop the engines."""
        if self._served is not None:
            await self._served.close()

    async def llm_config(self) -> Any:
        """Return the configuration that the replica was made with."""
        return self._llm_config

    async def check_health(self) -> None:
        """Raise the cause if the instance has given up, so that Serve replaces the replica."""
        if self._served is not None:
            self._served.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers for the autoscaling policy."""
        return {} if self._served is None else self._served.autoscaling_stats()

    # Requests.

    async def chat(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Answer a conversation."""
        async for answer in self._answer("/v1/chat/completions", request, raw_request_info, "ChatCompletionResponse"):
            yield answer

    async def completions(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Continue prompts."""
        async for answer in self._answer("/v1/completions", request, raw_request_info, "CompletionResponse"):
            yield answer

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Return the vectors of texts."""
        async for answer in self._answer("/v1/embeddings", request, raw_request_info, "EmbeddingResponse"):
            yield answer

    async def score(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Return the scores of pairs of texts."""
        async for answer in self._answer("/v1/score", request, raw_request_info, "ScoreResponse"):
            yield answer

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Return an error: there are no models for speech."""
        async for answer in self._answer("/v1/audio/transcriptions", None, raw_request_info, "TranscriptionResponse"):
            yield answer

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Return the tokens of a text or a conversation."""
        async for answer in self._answer("/tokenize", request, raw_request_info, "TokenizeResponse"):
            yield answer

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> Answers:
        """Return the text of tokens."""
        async for answer in self._answer("/detokenize", request, raw_request_info, "DetokenizeResponse"):
            yield answer

    # Calls that concern the whole instance. Options are those of the methods of `AsyncLLM`.

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        await self._calls.reset_prefix_cache()

    async def sleep(self, **options: Any) -> None:
        """Free memory until `wakeup`. `options`: `level`, `mode`, `tags`."""
        await self._calls.sleep(**options)

    async def wakeup(self, **options: Any) -> None:
        """End a sleep. `options`: `tags`."""
        await self._calls.wake_up(**options)

    async def is_sleeping(self) -> bool:
        """Return whether weights, cache or steps sleep."""
        return await self._calls.is_sleeping()

    async def pause(self, **options: Any) -> None:
        """Run no steps until `resume`. `options`: `mode`, `clear_cache`."""
        await self._calls.pause_generation(**options)

    async def resume(self, **options: Any) -> None:
        """End a pause."""
        await self._calls.resume_generation(**options)

    async def is_paused(self) -> bool:
        """Return whether steps are paused."""
        return await self._calls.is_paused()

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method on every worker of every engine, see `AsyncLLM.collective_rpc`."""
        return await self._calls.collective_rpc(method, timeout, args, kwargs)

    async def start_profile(self) -> None:
        """Raise `InvalidRequest`, which says how to profile."""
        raise _missing("start_profile")

    async def stop_profile(self) -> None:
        """Raise `InvalidRequest`, which says how to profile."""
        raise _missing("stop_profile")

    @property
    def _instance(self) -> ServedInstance:
        if self._served is None:
            raise InvalidRequest("this server is not started: call `start` first")
        return self._served

    @property
    def _calls(self) -> InstanceCalls:
        return InstanceCalls(self._instance.instance)

    async def _find_adapter(self, name: str) -> str:
        """Download an adapter as `lora_config` of the LLMConfig says, and return its directory."""
        if self._llm_config.lora_config is None:
            raise UnknownModel(f"there is no adapter {name!r}: give `lora_config` in the LLMConfig")
        loaders = importlib.import_module("ray.llm._internal.serve.utils.lora_serve_utils")
        options = self._llm_config.lora_config
        loader = loaders.LoraModelLoader(
            download_timeout_s=options.download_timeout_s, max_tries=options.max_download_tries
        )
        found = await loader.load_model_from_config(lora_model_id=name, llm_config=self._llm_config)
        return str(found.local_path)

    async def _answer(self, path: str, request: Any, raw_request_info: Any, kind: str) -> Answers:
        """Post a request to a route of the application, and yield its answer as Ray's ingress expects it."""
        body = {} if request is None else request.model_dump(mode="json", exclude_unset=True)
        given = {} if raw_request_info is None else raw_request_info.headers
        headers = [(name, value) for name, value in given.items() if name.lower() not in OWN_HEADERS]
        async with posted(self._instance.app, path, json.dumps(body).encode(), headers=headers) as answer:
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                decoder = codecs.getincrementaldecoder("utf-8")()
                async for part in answer.parts():
                    if text := decoder.decode(part):
                        yield text
            elif answer.status < 400:
                yield _model(kind)(**json.loads(await answer.body()))
            else:
                yield _model("ErrorResponse")(**_with_status(json.loads(await answer.body()), answer.status))


def _model(kind: str) -> Any:
    return getattr(importlib.import_module(MODELS), kind)


def _with_status(reply: dict[str, Any], status: int) -> dict[str, Any]:
    """Return an error with the status as its code, which Ray's ingress takes as the status of its answer."""
    return {"error": {**reply["error"], "code": status}}


def _missing(method: str) -> InvalidRequest:
    return InvalidRequest(f"there is no `{method}`: {METHODS_ELSEWHERE[method]}")
