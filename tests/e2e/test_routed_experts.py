"""Routed experts as users get them: they equal the choices of transformers' routers under every parallelism and after
every disturbance."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from checkpoints import make_checkpoint
from fleets import SECONDS, connect, label, metrics, wait_until_running, wait_until_whole
from harness import random_prompt
from oracle import oracle
from router_oracle import assert_rows, assert_some_rows
from serving import serve

from eagleray import LLM, SamplingParams
from eagleray.errors import ConfigError, InvalidRequest

VOCAB = 300
TOKENS = 20
OPTIONS = {"num_threads": 1, "max_model_len": 400, "enable_return_routed_experts": True, "log_level": "warning"}
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
PROMPTS = [random_prompt(length, length, VOCAB) for length in (1, 2, 15, 16, 17, 70, 130)]

PATH = "/inference/v1/generate"

LAYOUTS: dict[str, dict[str, Any]] = {
    "without a prefix cache": {"enable_prefix_caching": False},
    "every request preempted": {"block_size": 4, "max_model_len": 160, "num_kv_blocks": 42},
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
}
GRID: dict[str, dict[str, Any]] = {
    "small chunks": {"max_num_batched_tokens": 16},
    "dp": {"data_parallel_size": 2},
    "a step at a time": {"async_scheduling": False},
    "a process": {"executor": "processes"},
    "ray": {"executor": "ray"},
    "ray-graph, pp": {"executor": "ray-graph", "pipeline_parallel_size": 2},
    "tp and pp": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "ep, all-gather": {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_dispatch": "all-gather"},
    "ep, all-to-all": {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_dispatch": "all-to-all"},
    "dp and ep": {"data_parallel_size": 2, "enable_expert_parallel": True, "expert_dispatch": "all-to-all"},
    "dp, tp and ep, moving": {
        "data_parallel_size": 2,
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "expert_dispatch": "all-to-all",
        "enable_eplb": True,
        "num_redundant_experts": 4,
        "eplb_step_interval": 7,
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3_moe")


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), max_num_batched_tokens=64, **OPTIONS) as llm:
        yield llm


def generate(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def check(checkpoint, outputs: list[Any], *, start: int = 0) -> None:
    for output in outputs:
        for completion in output.outputs:
            sequence = [*output.prompt_token_ids, *completion.token_ids]
            assert_rows(checkpoint, sequence, completion.routed_experts, start=start)
            assert completion.routed_experts_start == start


# From Python.


MANY = {"num_experts": 300, "moe_intermediate_size": 16, "num_experts_per_tok": 4}
DENSE_FIRST = {"norm_topk_prob": False, "num_hidden_layers": 4, "mlp_only_layers": [0]}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="alone", marks=pytest.mark.grid),  # as the engine of the tests below
        *(pytest.param(options, id=name) for name, options in LAYOUTS.items()),
        *(pytest.param(options, id=name, marks=pytest.mark.grid) for name, options in GRID.items()),
    ],
)
def test_routed_experts_equal_transformers_routers(checkpoint, options):
    with LLM(str(checkpoint), **OPTIONS | options) as llm:
        outputs = generate(llm, PROMPTS)
    check(checkpoint, outputs)
    for output in outputs:
        oracle(checkpoint).assert_greedy(output.prompt_token_ids, output.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param("mixtral", {}, id="mixtral", marks=pytest.mark.grid),
        pytest.param("qwen3_moe", MANY, id="300 experts", marks=pytest.mark.grid),
        pytest.param("qwen3_moe", {"decoder_sparse_step": 2}, id="every second layer", marks=pytest.mark.grid),
        pytest.param("qwen3_moe", DENSE_FIRST, id="a dense layer first", marks=pytest.mark.grid),
        pytest.param("deepseek_v2", {}, id="deepseek-v2", marks=pytest.mark.grid),
        pytest.param("deepseek_v3", {}, id="deepseek-v3"),
        pytest.param("gpt_oss", {}, id="gpt-oss"),
    ],
)
def test_routed_experts_other_families_equal_transformers(tmp_path, family, overrides):
    other = make_checkpoint(tmp_path, family, tokenizer=False, **overrides)
    with LLM(str(other), skip_tokenizer_init=True, **OPTIONS) as llm:
        check(other, generate(llm, PROMPTS[2:6]))


def test_routed_experts_prefix_cache_hits_are_reported(llm, checkpoint):
    prompt = random_prompt(100, 90, VOCAB)
    silent = SamplingParams(temperature=0, max_tokens=4, return_routed_experts=False)
    (unasked,) = generate(llm, [prompt], silent)
    assert unasked.outputs[0].routed_experts is None
    first, second, third = (generate(llm, [prompt])[0] for _ in range(3))
    assert first.num_cached_tokens == 0, "its blocks had no rows"
    assert second.num_cached_tokens == third.num_cached_tokens == 80
    check(checkpoint, [first, second, third])
    (longer,) = generate(llm, [[*prompt, *first.outputs[0].token_ids]])
    assert longer.num_cached_tokens == 96
    check(checkpoint, [longer])
    (again,) = generate(llm, [prompt], silent)
    assert again.num_cached_tokens == 80


def test_routed_experts_blocks_before_start_need_none(llm, checkpoint):
    prompt = random_prompt(101, 90, VOCAB)
    generate(llm, [prompt], SamplingParams(max_tokens=1, return_routed_experts=False))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, routed_experts_prompt_start=64)
    (output,) = generate(llm, [prompt], params)
    assert output.num_cached_tokens == 64
    check(checkpoint, [output], start=64)


@pytest.mark.parametrize("start", [0, 1, 30, 33])
def test_routed_experts_several_completions_from_start(llm, checkpoint, start):
    params = SamplingParams(
        n=3, seed=5, max_tokens=9, ignore_eos=True, routed_experts_prompt_start=start, return_routed_experts=True
    )
    outputs = generate(llm, [random_prompt(102, 33, VOCAB)], params)
    assert len({tuple(completion.token_ids) for completion in outputs[0].outputs}) == 3
    check(checkpoint, outputs, start=start)


def test_routed_experts_single_token_after_prompt_has_none(llm):
    params = SamplingParams(max_tokens=1, routed_experts_prompt_start=5)
    (output,) = generate(llm, [[5, 6, 7, 8, 9]], params)
    rows = output.outputs[0].routed_experts
    assert (rows.shape, rows.dtype) == ((0, 3, 3), np.uint8)


def test_routed_experts_stopped_completion_ends_them(llm, checkpoint):
    prompt = random_prompt(103, 12, VOCAB)
    (whole,) = generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    token_ids = whole.outputs[0].token_ids
    text = whole.outputs[0].text
    params = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=text[len(text) // 2 :][:3]),
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop_token_ids=[token_ids[20]]),
    ]
    outputs = generate(llm, [prompt, prompt], params)
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "stop"]
    assert all(len(output.outputs[0].token_ids) < 60 for output in outputs)
    check(checkpoint, outputs)


def test_routed_experts_are_batch_invariant(llm, checkpoint):
    alone = [generate(llm, [prompt])[0].outputs[0].routed_experts for prompt in PROMPTS]
    params = [GREEDY, SamplingParams(max_tokens=40, ignore_eos=True, return_routed_experts=False)]
    batch = [one for prompt in PROMPTS for one in (prompt, random_prompt(sum(prompt), 50, VOCAB))]
    together = generate(llm, batch, params * len(PROMPTS))
    assert all(output.outputs[0].routed_experts is None for output in together[1::2])
    for output, rows in zip(together[::2], alone, strict=True):
        assert np.array_equal(output.outputs[0].routed_experts, rows)


def test_routed_experts_invalid_options_are_refused(llm, tmp_path):
    with pytest.raises(InvalidRequest, match="`routed_experts_prompt_start` is 6, but the prompt has 5 tokens"):
        generate(llm, [[5] * 5], SamplingParams(routed_experts_prompt_start=6))
    dense = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    with pytest.raises(ConfigError, match="enable_return_routed_experts"):
        LLM(str(dense), skip_tokenizer_init=True, **OPTIONS)


# Over HTTP.


@pytest.fixture(scope="module")
def server(checkpoint):
    options = ("--enable-return-routed-experts", "--max-model-len", "1000", "--log-level", "debug")
    with serve(str(checkpoint), "--data-parallel-size", "2", *options) as server:
        yield server


@pytest.fixture
def http(server):
    with connect(server) as http:
        wait_until_whole(http, 2)
        yield http


def npy(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)))


def raw(fields: dict[str, Any]) -> np.ndarray:
    data = fields["data"] if isinstance(fields["data"], bytes) else base64.b64decode(fields["data"])
    return np.frombuffer(data, fields["dtype"]).reshape(fields["shape"])


def post(http: httpx.Client, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    response = http.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("form", ["npy", "raw"])
def test_routed_experts_generate_route_equal_transformers(http, checkpoint, form):
    prompt = PROMPTS[4]
    params = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
    body = {"token_ids": prompt, "sampling_params": params, "routed_experts_format": form}
    choice = post(http, PATH, body).json()["choices"][0]
    rows = (npy if form == "npy" else raw)(choice["routed_experts"])
    assert_rows(checkpoint, [*prompt, *choice["token_ids"]], rows)
    answer = msgspec.msgpack.decode(post(http, PATH, body, Accept="application/msgpack").content)
    packed = answer["choices"][0]["routed_experts"]
    assert np.array_equal(rows, np.load(io.BytesIO(packed)) if form == "npy" else raw(packed))


def test_routed_experts_completions_and_chat_equal_transformers(http, checkpoint):
    common = {"max_tokens": 9, "temperature": 0, "return_token_ids": True, "return_routed_experts": True}
    bodies = {
        "/v1/completions": {"prompt": "The quick brown fox"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "routed_experts_prompt_start": 2},
    }
    for path, body in bodies.items():
        answer = post(http, path, common | body).json()
        choice = answer["choices"][0]
        prompt = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
        start = body.get("routed_experts_prompt_start", 0)
        assert_rows(checkpoint, [*prompt, *choice["token_ids"]], npy(choice["routed_experts"]), start=start)


class Reader:
    """A stream of /inference/v1/generate, as far as it was read."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.rows: list[np.ndarray] = []

    def read(self, http: httpx.Client, prompt: list[int], max_tokens: int, *, at_most: int | None = None) -> None:
        """Read the stream to its end, or leave it after `at_most` tokens."""
        params = {"max_tokens": max_tokens, "ignore_eos": True, "seed": 3}
        body = {"token_ids": prompt, "sampling_params": params, "stream": True, "routed_experts_format": "raw"}
        with http.stream("POST", PATH, json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        self._take(choice)
                if at_most is not None and len(self.token_ids) >= at_most:
                    return

    def _take(self, choice: dict[str, Any]) -> None:
        self.token_ids += choice["token_ids"]
        if "routed_experts" in choice:
            assert choice["routed_experts"]["start"] == sum(map(len, self.rows))
            self.rows.append(raw(choice["routed_experts"]))


def test_routed_experts_streams_finished_or_left_are_complete(http, checkpoint):
    prompts = [random_prompt(200 + place, 40, VOCAB) for place in range(6)]
    readers = [Reader() for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        limits = [None if place % 2 else 5 * place + 1 for place in range(len(prompts))]
        work = [
            pool.submit(reader.read, http, prompt, 40, at_most=limit)
            for reader, prompt, limit in zip(readers, prompts, limits, strict=True)
        ]
        for one in work:
            one.result(SECONDS)
    for reader, prompt, limit in zip(readers, prompts, limits, strict=True):
        rows, sequence = np.concatenate(reader.rows), [*prompt, *reader.token_ids]
        if limit is None:
            assert len(reader.token_ids) == 40
            assert_rows(checkpoint, sequence, rows)
        else:
            assert_some_rows(checkpoint, sequence, rows)


def test_routed_experts_killed_engine_streams_miss_none(server, http, checkpoint):
    prompts = [random_prompt(300 + place, 50, VOCAB) for place in range(6)]
    readers = [Reader() for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        work = [pool.submit(reader.read, http, prompt, 400) for reader, prompt in zip(readers, prompts, strict=True)]
        rank, incarnation = wait_until_running(http)
        deadline = time.monotonic() + SECONDS
        while not all(reader.token_ids for reader in readers):
            assert time.monotonic() < deadline, "not every stream has begun"
            time.sleep(0.01)
        assert any(len(reader.token_ids) < 400 for reader in readers)
        os.kill(server.child(label(rank, incarnation)), signal.SIGKILL)
        for one in work:
            one.result(SECONDS)
    for reader, prompt in zip(readers, prompts, strict=True):
        assert len(reader.token_ids) == 400
        assert_rows(checkpoint, [*prompt, *reader.token_ids], np.concatenate(reader.rows))
    assert wait_until_whole(http, 2)[rank] == incarnation + 1


def test_routed_experts_metrics_equal_reported_experts(http):
    params = {"max_tokens": 30, "ignore_eos": True, "return_routed_experts": False}
    before = _expert_tokens(http)
    post(http, PATH, {"token_ids": random_prompt(400, 70, VOCAB), "sampling_params": params})
    deadline = time.monotonic() + SECONDS
    while sum(_expert_tokens(http).values()) < sum(before.values()) + 3 * 3 * (70 + 30 - 1):
        assert time.monotonic() < deadline, "the load of the experts does not grow"
        time.sleep(0.05)
    by_layer: dict[str, float] = {}
    for (_, layer, _), count in _expert_tokens(http).items():
        by_layer[layer] = by_layer.get(layer, 0) + count
    assert by_layer.keys() == {"0", "1", "2"}
    assert len(set(by_layer.values())) == 1, "each token has as many experts in every layer"


def _expert_tokens(http: httpx.Client) -> dict[tuple[str, str, str], float]:
    """Return the reported counts by engine, layer, expert."""
    found = {}
    for name, value in metrics(http).items():
        if name.startswith("eagleray:expert_tokens_total"):
            labels = dict(part.split("=") for part in name[name.index("{") + 1 : -1].split(","))
            found[tuple(labels[key].strip('"') for key in ("engine", "layer", "expert"))] = value
    return found
