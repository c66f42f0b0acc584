"""Stages for Ray Data on a real engine, without Ray: the columns that they compute for a row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint, make_pooling_checkpoint
from peft_adapters import ATTENTION, make_adapter

from eagleray import LLM, PoolingParams, SamplingParams
from eagleray.client.answers.requested_tools import OfferedTools
from eagleray.data.conversations import Conversations
from eagleray.data.stages import GenerationStage, PoolingStage, ScoreStage, Stage
from eagleray.errors import InvalidRequest, PromptTooLong

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")

SCRIPTS = Path(__file__).parents[2] / "scripts"
OPTIONS: dict[str, Any] = {"num_threads": 1, "num_kv_blocks": 128, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = "The quick brown fox"
MESSAGES = [{"role": "user", "content": "Hello there"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ tail or '' }}\n{% endfor %}"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Yield a mixture-of-experts model with an adapter."""
    directory = tmp_path_factory.mktemp("data")
    checkpoint = make_checkpoint(directory / "model", "qwen3_moe")
    adapter = make_adapter(directory / "adapter", checkpoint, target_modules=ATTENTION)
    template = directory / "template.jinja"
    template.write_text(TEMPLATE)
    with LLM(
        str(checkpoint),
        enable_return_routed_experts=True,
        enable_lora=True,
        lora_modules=[f"pirate={adapter}"],
        chat_template=str(template),
        tool_call_parser="hermes",
        reasoning_parser="chaos",
        reasoning_parser_plugin=str(SCRIPTS / "chaos_reasoning.py"),
        **OPTIONS,
    ) as llm:
        yield llm


def generation(**fields: Any) -> GenerationStage:
    defaults: dict[str, Any] = {
        "prompt_column": "prompt",
        "conversations": None,
        "sampling_params": GREEDY,
        "sampling_params_column": None,
        "seed_column": None,
        "lora_column": None,
        "outputs": ("generated_token_ids",),
    }
    return GenerationStage(**{**defaults, **fields})


def conversations(**fields: Any) -> Conversations:
    return Conversations(**{"column": "chat", "offered": OfferedTools(), **fields})


def compute(llm: LLM, stage: Stage, row: dict[str, Any]) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        return await stage.open(llm._instance)(row)

    return llm._thread.run(run())


def tokens(llm: LLM, prompt: Any, params: SamplingParams = GREEDY, **options: Any) -> list[int]:
    (output,) = llm.generate([prompt], params, use_tqdm=False, **options)
    return output.outputs[0].token_ids


def test_generation_stage_outputs_are_those_of_llm(llm: LLM) -> None:
    outputs = ("generated_text", "finish_reason", "num_prompt_tokens", "num_generated_tokens", "prompt_token_ids")
    (expected,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    prompt = expected.prompt_token_ids
    values = (expected.outputs[0].text, "length", len(prompt), GREEDY.max_tokens, prompt)
    for given in (PROMPT, prompt):
        assert compute(llm, generation(outputs=outputs), {"prompt": given}) == dict(zip(outputs, values, strict=True))


def test_generation_stage_routed_experts_and_logprobs_are_those_of_llm(llm: LLM) -> None:
    stage = generation(outputs=("routed_experts", "logprobs", "cumulative_logprob"))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    (expected,) = llm.generate([PROMPT], params, use_tqdm=False)
    found = compute(llm, stage, {"prompt": PROMPT})
    np.testing.assert_array_equal(found["routed_experts"], expected.outputs[0].routed_experts)
    assert [entry[0]["token_id"] for entry in found["logprobs"]] == expected.outputs[0].token_ids
    assert found["cumulative_logprob"] == pytest.approx(sum(entry[0]["logprob"] for entry in found["logprobs"]))


def test_generation_stage_conversation_is_rendered_with_its_kwargs(llm: LLM) -> None:
    stage = generation(conversations=conversations(chat_template_kwargs={"tail": "!"}))
    assert stage.inputs == {"messages_column": "chat"}
    assert compute(llm, stage, {"chat": MESSAGES})["generated_token_ids"] == tokens(llm, "user: Hello there!\n")


def test_generation_stage_parts_of_answers_are_those_of_llm(llm: LLM) -> None:
    """A constraint begins after the thinking, and calls follow the tools of their row."""
    thinking = {"chat_template_kwargs": {"tail": "^"}}
    fields = {"structured_outputs": {"regex": "[a-c]{4}"}, "thinking_token_budget": 5, "max_tokens": 60, "seed": 3}
    (expected,) = llm.chat(MESSAGES, fields, use_tqdm=False, **thinking)
    parts = expected.outputs[0]
    outputs = ("content", "reasoning", "generated_text")
    stage = generation(
        conversations=conversations(**thinking), sampling_params=None, sampling_params_column="params", outputs=outputs
    )
    found = compute(llm, stage, {"chat": MESSAGES, "params": {**fields, "stop": None}})
    assert found == {"content": parts.content, "reasoning": parts.reasoning, "generated_text": parts.text}
    assert re.fullmatch("[a-c]{4}", found["content"]) and found["reasoning"]

    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    calls = conversations(tools_column="tools", tool_choice="required", parallel_tool_calls=False)
    params = SamplingParams(max_tokens=200, thinking_token_budget=5, seed=3)
    stage = generation(conversations=calls, sampling_params=params, outputs=("tool_calls",))
    assert stage.inputs == {"messages_column": "chat", "tools_column": "tools"}
    (call,) = compute(llm, stage, {"chat": MESSAGES, "tools": json.dumps(tools)})["tool_calls"]
    assert call.keys() == {"id", "name", "arguments"} and call["name"] == "f"
    assert json.loads(call["arguments"])["n"] in (1, 22)
    with pytest.raises(InvalidRequest, match="asks for a call, but the request has no `tools`"):
        compute(llm, stage, {"chat": MESSAGES, "tools": None})


def test_generation_stage_seed_adapter_and_parameters_of_a_row(llm: LLM) -> None:
    stage = generation(sampling_params_column="params", seed_column="seed", lora_column="adapter")
    row = {"prompt": PROMPT, "params": {"temperature": 1.0, "max_tokens": 4}, "seed": 3, "adapter": None}
    seeded = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, seed=3)
    assert compute(llm, stage, row)["generated_token_ids"] == tokens(llm, PROMPT, seeded)
    with_adapter = compute(llm, stage, {**row, "params": None, "adapter": "pirate"})["generated_token_ids"]
    assert with_adapter != tokens(llm, PROMPT)
    with pytest.raises(InvalidRequest, match="names adapter 'poet'"):
        compute(llm, stage, {**row, "adapter": "poet"})


def test_generation_stage_prompt_too_long_raises(llm: LLM) -> None:
    with pytest.raises(PromptTooLong):
        compute(llm, generation(), {"prompt": [5] * 100_000})


def test_pooling_stages_of_a_model_that_generates_are_refused(llm: LLM) -> None:
    embedding = PoolingStage(task="embed", prompt_column="prompt", params=PoolingParams())
    for stage in (embedding, ScoreStage(query_column="query", document_column="document")):
        with pytest.raises(InvalidRequest, match="the model is served to generate"):
            stage.open(llm._instance)


@pytest.mark.slow
def test_pooling_stages_outputs_are_those_of_llm(tmp_path) -> None:
    checkpoint = make_pooling_checkpoint(tmp_path, "qwen3", modules={"Pooling": "mean", "Normalize": ""})
    stage = PoolingStage(task="embed", prompt_column="prompt", params=PoolingParams())
    with LLM(str(checkpoint), **OPTIONS) as llm:
        (expected,) = llm.embed([PROMPT], use_tqdm=False)
        np.testing.assert_array_equal(compute(llm, stage, {"prompt": PROMPT})["embedding"], expected.outputs.embedding)
        (expected,) = llm.score(PROMPT, "Hello", use_tqdm=False)
        pair = ScoreStage(query_column="query", document_column="document")
        assert compute(llm, pair, {"query": PROMPT, "document": "Hello"}) == {"score": expected.outputs.score}
        classes = PoolingStage(task="classify", prompt_column="prompt", params=PoolingParams())
        with pytest.raises(InvalidRequest, match="this is an embedding model"):
            classes.open(llm._instance)
        with pytest.raises(InvalidRequest, match="model"):
            generation().open(llm._instance)
