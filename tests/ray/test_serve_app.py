"""`eagleray.serve` on a Ray cluster: streams through Serve's proxy, health, and the end of a replica."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import ray_cluster
from checkpoints import make_checkpoint
from fleets import SECONDS, metrics, stream_tokens, tokens, wait_until_running, wait_until_whole
from grammar_walks import schema_errors
from peft_adapters import adapted_logits, make_adapter
from processes import children_of
from ray.util.placement_group import placement_group_table
from ray_cluster import ACC
from serve_apps import deployed, engine_process, replica_pids
from serving import wait_until_gone

PROMPT = [5, 6, 7]
LONG = 1500
"""Number of tokens of a stream that is still running when a process is killed."""
OPTIONS = {"dtype": "float32", "max_model_len": 2048}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("serve_app"), "qwen3", max_position_embeddings=10_000))


@pytest.mark.slow  # test_ray_serve.py kills engines on Ray
def test_replica_killed_engine_resumes_the_stream_and_nothing_is_left(cluster, checkpoint):
    with deployed(checkpoint, **OPTIONS) as http:
        expected = tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        (replica,) = replica_pids()
        events = stream_tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        got = next(events)
        wait_until_running(http)
        os.kill(engine_process(replica), signal.SIGKILL)
        for event in events:
            got += event
        assert got == expected
        assert wait_until_whole(http, 1) == {0: 1}
        assert replica_pids() == [replica]
        assert http.get("/ready").status_code == 200
        events = http.get("/dashboard/state").json()["events"]
        assert [(event["member"], event["kind"]) for event in events[:2]] == [
            ("engine-0.1", "recovered"),
            ("engine-0", "lost"),
        ]
        answer = http.get("/version", headers={"x-request-id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert http.post("/pause").status_code == 403, "a client of the proxy's host is not one of the replica's"
        there = [replica, *children_of(replica)]
    wait_until_gone(there, SECONDS)


CITIES = {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 70, "maxItems": 70}
PARAMETERS = {"type": "object", "properties": {"cities": CITIES}, "required": ["cities"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


@pytest.mark.slow
def test_replica_killed_engine_resumes_schemas_calls_and_thinking(cluster):
    """The thinking of the embedded model has characters as its markers, and begins in the prompt."""
    plugin = Path(__file__).parents[2] / "scripts" / "chaos_reasoning.py"
    options = {"tool_call_parser": "hermes", "reasoning_parser": "chaos", "reasoning_parser_plugin": str(plugin)}
    messages = [{"role": "user", "content": "Which cities?"}, {"role": "assistant", "content": "^"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    body |= {"thinking_token_budget": 50, "max_tokens": LONG, "seed": 3}
    with deployed(None, dtype="float32", **options) as http:
        (replica,) = replica_pids()
        for fields in (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "cities", "schema": CITIES}}},
            {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        ):
            whole = http.post("/v1/chat/completions", json=body | fields).json()["choices"][0]["message"]
            expected = ChatAnswer().add(whole)
            assert expected.reasoning
            if "tools" in fields:
                assert schema_errors(PARAMETERS, expected.arguments) == []
            else:
                assert schema_errors(CITIES, expected.content) == []
            deltas = stream_chat(http, body | fields)
            got = ChatAnswer().add(next(deltas))
            wait_until_running(http)
            os.kill(engine_process(replica), signal.SIGKILL)
            for delta in deltas:
                got.add(delta)
            assert got == expected
            assert wait_until_whole(http, 1)
        assert replica_pids() == [replica]


@dataclass
class ChatAnswer:
    """Message of an assistant with at most one call, put together from its deltas."""

    content: str = ""
    reasoning: str = ""
    name: str = ""
    arguments: str = ""

    def add(self, message: dict[str, Any]) -> ChatAnswer:
        """Add a delta, or a whole message."""
        self.content += message.get("content") or ""
        self.reasoning += message.get("reasoning") or ""
        for call in message.get("tool_calls") or ():
            self.name += call["function"].get("name") or ""
            self.arguments += call["function"].get("arguments") or ""
        return self


def stream_chat(http: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the deltas of a stream of /v1/chat/completions."""
    with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield from (choice["delta"] for choice in event["choices"])
    raise AssertionError("the stream broke off")


@pytest.mark.slow
def test_replica_multiplexed_adapters_are_loaded_on_demand_and_unloaded(cluster, checkpoint, tmp_path):
    paths = {}
    for seed, name in enumerate(("one", "two")):
        paths[name] = str(make_adapter(tmp_path / name, Path(checkpoint), seed=seed))
    options = {"enable_lora": True, "max_loras": 1, "adapters": str(tmp_path), "api_key": ["key"], **OPTIONS}
    with deployed(checkpoint, **options) as http:
        http.headers["authorization"] = "Bearer key"

        def answer(model: str, name: str | None = None, key: str = "key") -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"} | (
                {} if name is None else {"serve_multiplexed_model_id": name}
            )
            body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            return http.post("/v1/completions", json=body, headers=headers)

        def token_ids(model: str, name: str | None = None) -> list[int]:
            response = answer(model, name)
            assert response.status_code == 200, response.text
            found: list[int] = response.json()["choices"][0]["token_ids"]
            return found

        def models() -> list[str]:
            return [entry["id"] for entry in http.get("/v1/models").json()["data"]]

        assert answer(checkpoint, "one", key="wrong").status_code == 401
        assert models() == [checkpoint], "a request without a key loads nothing"
        base, one = token_ids(checkpoint), token_ids("one", "one")
        assert models() == [checkpoint, "one"]
        for name, found in (("one", one), ("two", token_ids(checkpoint, "two"))):
            logits = adapted_logits(Path(checkpoint), Path(paths[name]), [*PROMPT, *found])[len(PROMPT) - 1 : -1]
            assert logits.argmax(dim=-1).tolist() == found
            assert found != base
        assert models() == [checkpoint, "two"], "there is room for one"
        assert answer("two", "three").status_code == 404
        assert answer("one", "two").status_code == 400
        assert models() == [checkpoint, "two"], "an adapter that does not exist displaces none"
        assert token_ids(checkpoint, checkpoint) == base
        assert token_ids("one", "one") == one
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 200
        assert token_ids("one", "one") == one, "Serve keeps it in its list"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "deployment": {"num_replicas": 2}},
        {"data_parallel_size": 2, "data_parallel_backend": "ray"},
        {"data_parallel_size": 2, "data_parallel_backend": "ray", "tensor_parallel_size": 2},
    ],
)
def test_replica_workers_and_engines_are_in_its_placement_group(cluster, checkpoint, options):
    """The whole cluster has one placement group for each replica."""
    num_replicas = options.get("deployment", {}).get("num_replicas", 1)
    num_workers = options.get("tensor_parallel_size", 1) * options.get("data_parallel_size", 1)
    with deployed(checkpoint, ray_worker_resources=ACC, **OPTIONS, **options) as http:
        assert len(tokens(http, PROMPT, max_tokens=20, temperature=0)) == 20
        groups = [entry for entry in placement_group_table().values() if entry["state"] == "CREATED"]
        assert [len(group["bundles"]) for group in groups] == [1 + num_workers] * num_replicas
        assert {group["bundles"][0]["CPU"] for group in groups} == {1.0}
        assert all(group["bundles"][1] == ACC for group in groups)
        used = [name for name in ray_cluster.living_actors() if name["Name"].endswith("-pp0")]
        assert len(used) == num_workers * num_replicas


@pytest.mark.slow
def test_replica_experts_are_divided_over_engines_on_several_nodes(cluster, tmp_path):
    model = str(make_checkpoint(tmp_path, "qwen3_moe"))
    dp = {"data_parallel_size": 2, "data_parallel_backend": "ray", "enable_expert_parallel": True}
    group = {
        "placement_group_bundles": [{"CPU": 1}, {"far": 1}, {"far": 1}],
        "placement_group_strategy": "STRICT_SPREAD",
    }
    options = {**dp, "ray_worker_resources": {"far": 1.0}, "deployment": group, "dtype": "float32"}
    with deployed(model, **options) as http:
        assert len(wait_until_whole(http, 2)) == 2
        expected = tokens(http, PROMPT, max_tokens=100, temperature=0)
        events = stream_tokens(http, PROMPT, max_tokens=100, temperature=0)
        got = next(events)
        rank, _ = wait_until_running(http)
        os.kill(ray_cluster.pid_of(actor_name(f"engine-{rank}")), signal.SIGKILL)
        for event in events:
            got += event
        assert got == expected


@pytest.mark.slow
def test_replica_metrics_are_those_of_ray(cluster, checkpoint):
    with deployed(checkpoint, route_prefix="/llm", **OPTIONS) as http:
        tokens(http, PROMPT, max_tokens=20, temperature=0)
        assert "eagleray:generation_tokens_total" in http.get("/metrics").text
        ports = [node["MetricsExportPort"] for node in ray.nodes()]
        pattern = re.compile(
            r'^ray_eagleray_generation_tokens_total\{.*application="default".*engine="0".*\} 20\.0', re.M
        )
        found = ray_cluster.wait_until(lambda: any(pattern.search(scraped(port)) for port in ports), SECONDS)
        assert found


@pytest.mark.slow
def test_replica_whose_instance_is_given_up_is_replaced(cluster, checkpoint):
    with deployed(checkpoint, max_engine_restarts=0, deployment={"health_check_period_s": 0.2}, **OPTIONS) as http:
        (replica,) = replica_pids()
        os.kill(engine_process(replica), signal.SIGKILL)
        assert ray_cluster.wait_until(lambda: replica not in replica_pids(), SECONDS)
        assert ray_cluster.wait_until(lambda: http.get("/ready").status_code == 200, SECONDS)


@pytest.mark.slow
def test_replica_that_is_killed_takes_its_engine_and_workers_with_it(cluster, checkpoint):
    options = {"tensor_parallel_size": 2, "ray_worker_resources": ACC, **OPTIONS}
    with deployed(checkpoint, **options) as http:
        (replica,) = replica_pids()
        workers = [int(entry["Pid"]) for entry in ray_cluster.living_actors() if entry["Name"].endswith("-pp0")]
        there = [replica, *children_of(replica), *workers]
        assert len(there) >= 4
        os.kill(replica, signal.SIGKILL)
        wait_until_gone(there, SECONDS)
        assert ray_cluster.wait_until(lambda: http.get("/ready").status_code == 200, SECONDS)
        assert len(tokens(http, PROMPT, max_tokens=20, temperature=0)) == 20
        groups = [entry for entry in placement_group_table().values() if entry["state"] == "CREATED"]
        assert len(groups) == 1


@pytest.mark.slow
def test_replica_that_is_deleted_lets_running_streams_finish(cluster, checkpoint):
    from ray import serve

    with deployed(checkpoint, **OPTIONS) as http:
        expected = tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        (replica,) = replica_pids()
        there = [replica, *children_of(replica)]
        events = stream_tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        got = next(events)
        deleting = threading.Thread(target=serve.delete, args=("default",))
        deleting.start()
        for event in events:
            got += event
        assert got == expected
        deleting.join(SECONDS)
        wait_until_gone(there, SECONDS)


@pytest.mark.slow
def test_replica_client_that_disconnects_has_its_request_aborted(cluster, checkpoint):
    with deployed(checkpoint, **OPTIONS) as http:
        events = stream_tokens(http, PROMPT, max_tokens=LONG, temperature=0)
        next(events)
        wait_until_running(http)
        events.close()
        wait_until_whole(http, 1)
        (aborted,) = [count for name, count in metrics(http).items() if 'finished_reason="abort"' in name]
        assert aborted == 1


@pytest.mark.slow
def test_replicas_are_added_for_queued_sequences(cluster, checkpoint):
    """One request has many sequences, of which the engine runs one at a time. Replicas report every ten seconds."""
    autoscaling = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0.5}
    options = {"max_num_seqs": 1, "deployment": {"autoscaling_config": autoscaling}}
    with deployed(checkpoint, **OPTIONS | options) as http:
        body = {"prompt": PROMPT, "n": 100, "max_tokens": LONG, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            assert ray_cluster.wait_until(lambda: len(replica_pids()) == 2, SECONDS)


def actor_name(label: str) -> str:
    (name,) = [entry["Name"] for entry in ray_cluster.living_actors() if entry["Name"].endswith(f"/{label}")]
    return str(name)


def scraped(port: int) -> str:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5, trust_env=False).text
    except httpx.HTTPError:
        return ""
