"""An `LLMConfig` of `ray.serve.llm` as options, and the answers of the server class, without Ray's types."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from starlette.responses import JSONResponse, StreamingResponse

from eagleray.errors import ConfigError, InvalidRequest
from eagleray.serve.llm_options import llm_deployment_options, llm_server_config

GPUS = [{"CPU": 8.0, "GPU": 4.0}]


def llm_config(**fields: Any) -> Any:
    """Return an object with the attributes of an LLMConfig that names a model alone, and these."""
    default = {
        "model_loading_config": SimpleNamespace(model_id="mine", model_source="org/model", tokenizer_source=None),
        "engine_kwargs": {},
        "deployment_config": {},
        "placement_group_config": None,
        "accelerator_type": None,
        "accelerator_config": SimpleNamespace(kind="gpu"),
        "lora_config": None,
        "runtime_env": None,
        "experimental_configs": {},
        "callback_config": SimpleNamespace(callback_class="CallbackBase"),
        "log_engine_metrics": True,
    }
    return SimpleNamespace(**default | fields)


def test_llm_server_config_has_the_model_under_its_id():
    config = llm_server_config(llm_config(engine_kwargs={"tensor_parallel_size": 2, "enforce_eager": True}))
    assert (config.model.model, config.model.served_model_name) == ("org/model", ["mine"])
    assert (config.parallel.tensor_parallel_size, config.execution.executor) == (2, "ray")


def test_llm_server_config_mirror_and_adapters():
    loading = SimpleNamespace(
        model_id="mine", model_source=SimpleNamespace(bucket_uri="s3://b/m"), tokenizer_source="t"
    )
    lora = SimpleNamespace(max_num_adapters_per_replica=3)
    config = llm_server_config(llm_config(model_loading_config=loading, lora_config=lora))
    assert (config.model.model, config.model.tokenizer) == ("s3://b/m", "t")
    assert (config.lora.enable_lora, config.lora.max_loras) == (True, 3)


def test_llm_deployment_options_have_bundles_and_keep_those_of_the_user():
    given = llm_config(
        engine_kwargs={"tensor_parallel_size": 2},
        deployment_config={"num_replicas": 3, "ray_actor_options": {"num_cpus": 2}},
        accelerator_type="L4",
        runtime_env={"env_vars": {"A": "b"}},
    )
    options = llm_deployment_options(given, GPUS)
    worker = {"GPU": 1.0, "accelerator_type:L4": 0.001}
    assert options["placement_group_bundles"] == [{"CPU": 2.0}, worker, worker]
    assert options["ray_actor_options"] == {"num_cpus": 2.0, "runtime_env": {"env_vars": {"A": "b"}}}
    assert options["num_replicas"] == 3
    assert "name" not in options, "Ray's builder names the deployment after the model"


def test_llm_deployment_options_bundles_of_the_placement_group_config():
    given = {"bundle_per_worker": {"CPU": 2, "GPU": 1}, "strategy": "SPREAD"}
    options = llm_deployment_options(llm_config(placement_group_config=given), GPUS)
    assert options["placement_group_bundles"] == [{"CPU": 1.0}, {"CPU": 2, "GPU": 1}]
    assert options["placement_group_strategy"] == "SPREAD"
    options = llm_deployment_options(llm_config(placement_group_config={"bundles": [{"GPU": 1}] * 2}), GPUS)
    assert options["placement_group_bundles"] == [{"CPU": 1.0}, {"GPU": 1}, {"GPU": 1}]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"accelerator_config": SimpleNamespace(kind="tpu")}, "runs on CPUs and GPUs"),
        ({"experimental_configs": {"stream_batching_interval_ms": 50}}, "`stream_batching_interval_ms` must be 0"),
        ({"experimental_configs": {"other": 1}}, "may not have `other`"),
        ({"callback_config": SimpleNamespace(callback_class="my.Callback")}, "`callback_config` is for Ray's own"),
        ({"deployment_config": {"request_router_config": "KVAwareRouter"}}, "no events of its cache"),
        ({"deployment_config": {"user_config": {}}}, "may not have `user_config`"),
        ({"deployment_config": {"placement_group_bundles": []}}, "give `placement_group_config`"),
        ({"engine_kwargs": {"kv_transfer_config": {"kv_connector": "x"}}}, "kv_transfer_config"),
    ],
)
def test_llm_deployment_options_what_has_no_effect_is_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        llm_deployment_options(llm_config(**fields), GPUS)


def test_llm_module_without_an_engine_of_ray_says_what_to_install(monkeypatch):
    real_import = builtins.__import__

    def without_llm(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("ray.serve.llm"):
            raise ImportError("neither vLLM nor SGLang")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_llm)
    monkeypatch.delitem(sys.modules, "eagleray.serve.llm", raising=False)
    with pytest.raises(ImportError, match=r"neither vLLM nor SGLang.*pip install 'ray\[llm\]'; or use .*build_app"):
        importlib.import_module("eagleray.serve.llm")


class Body:
    """Stands for a request that Ray's ingress has decoded."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def model_dump(self, *, mode: str, exclude_unset: bool) -> dict[str, Any]:
        assert (mode, exclude_unset) == ("json", True)
        return self._fields


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the request, as a stream, or with an error."""
    body = json.loads((await receive())["body"])
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    if scope["path"] == "/v1/audio/transcriptions":
        response: Any = JSONResponse({"error": {"message": "no such route", "type": "x", "code": "y"}}, 404)
    elif body.get("stream"):
        parts = ["data: ä\n\n".encode()[:7], "data: ä\n\n".encode()[7:], b"data: [DONE]\n\n"]
        response = StreamingResponse(iter(parts), media_type="text/event-stream")
    else:
        response = JSONResponse({"path": scope["path"], "body": body, "key": headers.get("authorization")})
    await response(scope, receive, send)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a server whose application is `app`, and whose answers are tuples instead of objects of Ray's types."""
    replica = ModuleType("eagleray.serve.replica")
    replica.ServedInstance = object  # type: ignore[attr-defined]
    for module in (ModuleType("ray.serve.llm"), replica):  # what they import takes seconds
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "eagleray.serve.llm", raising=False)
    llm = importlib.import_module("eagleray.serve.llm")
    del sys.modules["eagleray.serve.llm"]  # it has the stand-ins
    monkeypatch.setattr(llm, "_model", lambda kind: lambda **fields: (kind, fields))

    class UndeployedServer(llm.EagleRayServer):  # type: ignore[misc, name-defined]
        def __del__(self) -> None:
            """Do nothing: only Serve awaits the coroutine."""

    made = UndeployedServer.__new__(UndeployedServer)
    made._served = SimpleNamespace(app=app)
    return made


def answers(call: Any) -> list[Any]:
    async def collect() -> list[Any]:
        return [answer async for answer in call]

    return asyncio.run(collect())


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("chat", "/v1/chat/completions", "ChatCompletionResponse"),
        ("completions", "/v1/completions", "CompletionResponse"),
        ("embeddings", "/v1/embeddings", "EmbeddingResponse"),
        ("score", "/v1/score", "ScoreResponse"),
        ("tokenize", "/tokenize", "TokenizeResponse"),
        ("detokenize", "/detokenize", "DetokenizeResponse"),
    ],
)
def test_server_method_posts_the_request_to_its_route(server, method, path, kind):
    raw = SimpleNamespace(headers={"Authorization": "Bearer k", "Content-Length": "999"})
    call = getattr(server, method)(Body(model="mine", tools=[1]), raw)
    assert answers(call) == [(kind, {"path": path, "body": {"model": "mine", "tools": [1]}, "key": "Bearer k"})]


def test_server_stream_is_yielded_as_texts(server):
    assert answers(server.chat(Body(stream=True))) == ["data: ", "ä\n\n", "data: [DONE]\n\n"]


def test_server_error_has_the_status_as_code(server):
    error = {"message": "no such route", "type": "x", "code": 404}
    assert answers(server.transcriptions(Body())) == [("ErrorResponse", {"error": error})]


def test_server_methods_without_equivalent_say_what_to_do(server):
    with pytest.raises(InvalidRequest, match="no `start_profile`: profile the workers by a worker extension"):
        asyncio.run(server.start_profile())


def test_server_that_is_not_started_says_so(server):
    server._served = None
    with pytest.raises(InvalidRequest, match="call `start` first"):
        asyncio.run(server.is_paused())
