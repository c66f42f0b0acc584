"""/generate: SGLang's fields in and out."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest
from server_fakes import Call, FinishReason, serving, settle, write_checkpoint
from server_fakes import Chunk as EngineChunk

from eagleray.messages.adapters import Adapter
from eagleray.messages.control import InstanceState, StateChanged
from eagleray.messages.membership import RoutingInfo

PATH = "/generate"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(write_checkpoint(tmp_path_factory.mktemp("sglang")), enable_sglang_api=True) as api:
        yield api


@pytest.fixture
def sglang(served):
    served.engine.script = served.recite
    served.engine.sent.clear()
    return served


def generate(api, *, status=200, **fields):
    body = {"input_ids": [5, 6, 7], **fields}
    if "text" in fields:
        del body["input_ids"]
    response = api.post(PATH, body, headers={"X-Request-Id": "mine"})
    assert response.status_code == status, response.text
    return response.json()


def test_sglang_routes_without_the_option_do_not_exist(api):
    for path in (PATH, "/pause_generation", "/update_weights_from_distributed", "/health_generate"):
        assert api.post(path, {}).json()["error"]["code"] == "unknown_url"
    assert "tp_size" not in api.get("/server_info").json()


def test_generate_answer_has_text_tokens_and_meta_info(sglang):
    answer = generate(sglang, sampling_params={"max_new_tokens": 2})
    assert answer["meta_info"].pop("e2e_latency") > 0
    assert answer == {
        "text": "hello world",
        "output_ids": sglang.speech[:2],
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 1,
            "weight_version": "default",
            "weight_versions": [{"version": "default", "start": 0, "end": 2}],
        },
    }


def test_generate_end_of_sequence_token_is_what_matched(sglang):
    answer = generate(sglang, rid="one")
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": sglang.eos}
    assert answer["output_ids"] == [*sglang.speech, sglang.eos]
    assert answer["meta_info"]["id"] == "one"
    stopped = generate(sglang, sampling_params={"stop": ["world"], "no_stop_trim": True})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "world"}
    assert stopped["text"] == "hello world"
    assert generate(sglang, sampling_params={"stop": "world"})["text"] == "hello "


def test_generate_sampling_parameters_have_their_own_names_and_defaults(sglang):
    generate(sglang, text="hello")
    request = sglang.engine.requests[-1]
    assert request.prompt_token_ids == sglang.speech[:1]
    # not those of generation_config.json
    assert (request.sampling.temperature, request.sampling.top_k) == (1.0, 0)
    assert request.stopping.max_tokens == 64 - len(request.prompt_token_ids)  # the model's length, below 128
    params = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": -1,
        "min_p": 0.25,
        "frequency_penalty": 1.0,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.5,
        "sampling_seed": 11,
        "stop_token_ids": [9],
        "logit_bias": {"4": 1.0},
        "ignore_eos": True,
        "spaces_between_special_tokens": False,
        "custom_params": None,
    }
    generate(sglang, sampling_params=params)
    sampling, stopping = sglang.engine.requests[-1].sampling, sglang.engine.requests[-1].stopping
    found = [sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed, sampling.logit_bias]
    assert found == [0.5, 0.75, 0, 0.25, 11, {4: 1.0}]
    found = [sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty]
    assert found == [1.0, 0.5, 1.5]
    assert (stopping.max_tokens, stopping.min_tokens, stopping.stop_token_ids) == (9, 2, (9,))
    assert stopping.eos_token_ids == ()


@pytest.mark.parametrize(("name", "kind"), [("json_schema", "json_schema"), ("regex", "regex"), ("ebnf", "ebnf")])
def test_generate_text_is_constrained_by_fields_of_sglang(sglang, name, kind):
    generate(sglang, input_ids=[5], sampling_params={name: '{"type": "object"}'})
    grammar = sglang.engine.requests[-1].sampling.grammar
    assert (grammar.kind, grammar.source) == (kind, '{"type": "object"}')


def test_generate_names_the_constraint_that_the_engine_refuses(sglang, monkeypatch):
    def refuse(request):
        fields = {"error": "odd", "is_user_error": True, "param": "structured_outputs"}
        yield EngineChunk(request_id=request.request_id, finish_reason=FinishReason.ERROR, **fields)

    monkeypatch.setattr(sglang.engine, "script", refuse)
    error = generate(sglang, status=400, sampling_params={"ebnf": "x"})["error"]
    assert (error["param"], error["message"]) == ("sampling_params.ebnf", "odd")


def test_generate_null_is_the_default(sglang):
    params = dict.fromkeys(("temperature", "top_p", "top_k", "stop", "stop_token_ids", "n", "max_new_tokens"))
    generate(sglang, sampling_params=params, return_logprob=None, rid=None, stream=None)
    assert sglang.engine.requests[-1].sampling.temperature == 1.0


def test_generate_logprobs_are_lists_of_number_token_and_text(sglang):
    fields = {"return_logprob": True, "sampling_params": {"max_new_tokens": 2}}
    first, second = sglang.speech[:2]
    meta_info = generate(sglang, **fields)["meta_info"]
    assert meta_info["output_token_logprobs"] == [[-1.5, first, None], [-1.5, second, None]]
    assert meta_info["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta_info
    fields |= {"top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True}
    meta_info = generate(sglang, **fields)["meta_info"]
    text = sglang.client.tokenizer.token_to_text
    assert meta_info["output_token_logprobs"][0] == [-1.5, first, text(first)]
    likeliest = [[-1.0, first + 1, text(first + 1)], [-1.5, first, text(first)]]
    assert meta_info["output_top_logprobs"][0] == likeliest
    assert meta_info["input_token_logprobs"] == [[None, 5, text(5)], [-1.5, 6, text(6)], [-1.5, 7, text(7)]]
    assert meta_info["input_top_logprobs"][0] is None
    assert [entry[1] for entry in meta_info["input_top_logprobs"][1]] == [7, 6]


def test_generate_logprobs_of_asked_tokens(sglang):
    meta_info = generate(sglang, return_logprob=True, token_ids_logprob=[3, 4], sampling_params={"max_new_tokens": 1})[
        "meta_info"
    ]
    assert meta_info["output_token_ids_logprobs"] == [[[-20.0, 3, None], [-20.0, 4, None]]]


def test_generate_no_new_tokens_scores_the_prompt(sglang):
    """As on-policy distillation asks its teacher."""
    answer = generate(
        sglang,
        return_logprob=True,
        logprob_start_len=0,
        sampling_params={"max_new_tokens": 0, "temperature": 0, "skip_special_tokens": False},
    )
    assert (answer["text"], answer["output_ids"]) == ("", [])
    meta_info = answer["meta_info"]
    assert [entry[0] for entry in meta_info["input_token_logprobs"][1:]] == [-1.5, -1.5]
    assert (meta_info["completion_tokens"], meta_info["output_token_logprobs"]) == (0, [])
    assert meta_info["finish_reason"] == {"type": "length", "length": 0}


def test_generate_prompt_logprobs_begin_where_asked(sglang):
    answer = generate(sglang, return_logprob=True, logprob_start_len=2, sampling_params={"max_new_tokens": 1})
    assert answer["meta_info"]["input_token_logprobs"] == [[-1.5, 7, None]]
    answer = generate(sglang, return_logprob=True, logprob_start_len=9, sampling_params={"max_new_tokens": 1})
    assert answer["meta_info"]["input_token_logprobs"] == []


def test_generate_stream_events_show_everything_so_far(sglang):
    params = {"max_new_tokens": 3}
    events = sglang.events(
        PATH, {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 0, "sampling_params": params}
    )
    whole = generate(sglang, return_logprob=True, logprob_start_len=0, sampling_params=params)
    assert [event["output_ids"] for event in events] == [sglang.speech[:count] for count in (1, 2, 3)]
    for event in events:
        meta_info = event["meta_info"]
        assert whole["text"].startswith(event["text"])
        assert [entry[1] for entry in meta_info["output_token_logprobs"]] == event["output_ids"]
        assert meta_info["input_token_logprobs"] == whole["meta_info"]["input_token_logprobs"]
        assert (meta_info["completion_tokens"], meta_info["cached_tokens"]) == (len(event["output_ids"]), 1)
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None, None]
    last = events[-1]
    for answer in (last, whole):
        del answer["meta_info"]["e2e_latency"], answer["meta_info"]["id"]
    assert last == whole


def test_generate_batch_is_answered_in_order(sglang):
    answers = generate(
        sglang,
        text=["hello", "again"],
        rid=["a", "b"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        return_logprob=[True, False],
    )
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]
    assert [len(answer["output_ids"]) for answer in answers] == [1, 2]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [True, False]
    (alone,) = generate(sglang, input_ids=[[5, 6]])
    assert alone["meta_info"]["id"] == "mine_0"
    prefixed = generate(sglang, input_ids=[[5], [6]], rid="p")
    assert [answer["meta_info"]["id"] for answer in prefixed] == ["p_0", "p_1"]


def test_generate_several_completions_are_a_list(sglang):
    params = {"n": 2, "max_new_tokens": 1}
    answers = generate(sglang, sampling_params=params)
    assert [answer["output_ids"] for answer in answers] == [sglang.speech[:1]] * 2
    events = sglang.events(PATH, {"input_ids": [[5], [6]], "sampling_params": params})
    assert sorted(event["index"] for event in events) == [0, 1, 2, 3]


def test_generate_adapters_are_chosen_by_name(sglang):
    adapter = Adapter(name="style", number=1, path="/a")
    sglang.deliver(StateChanged(InstanceState(adapters=(adapter,))))
    generate(sglang, input_ids=[[5], [6]], lora_path=["style", None])
    assert [request.adapter for request in sglang.engine.requests] == ["style", ""]
    assert generate(sglang, status=404, lora_path="other")["error"]["code"] == "model_not_found"
    sglang.deliver(StateChanged(InstanceState()))


def test_generate_batch_one_fails_all_fail(sglang):
    error = generate(sglang, status=400, input_ids=[[5], [320]])["error"]
    assert error["param"] == "input_ids"


def test_generate_routed_experts_are_int32_in_base64(sglang):
    sglang.join(routing=RoutingInfo(num_layers=2, num_experts=8, top_k=2, layers=(1, 2), num_model_layers=3))
    experts = np.arange(16, dtype=np.uint8).reshape(4, 2, 2) % 8

    def script(message):
        yield EngineChunk(
            request_id=message.request_id,
            token_ids=[9, 10],
            routed_experts=experts.tobytes(),
            finish_reason=FinishReason.LENGTH,
        )

    sglang.engine.script = script
    fields = {"return_routed_experts": True, "sampling_params": {"max_new_tokens": 2}}
    whole = generate(sglang, **fields)["meta_info"]["routed_experts"]
    (event,) = sglang.events(PATH, {"input_ids": [5, 6, 7], **fields})
    sglang.join()
    assert event["meta_info"]["routed_experts"] == whole
    found = np.frombuffer(base64.b64decode(whole), np.int32).reshape(4, 3, 2)
    assert found[:, 1:].tolist() == experts.tolist()
    assert not found[:, 0].any()


def test_generate_version_of_the_weights_is_that_of_the_last_token(sglang):
    def script(message):
        yield EngineChunk(request_id=message.request_id, token_ids=[9], weight_version="v1")
        last = EngineChunk(
            request_id=message.request_id, token_ids=[10], weight_version="v2", finish_reason=FinishReason.LENGTH
        )
        yield last

    sglang.engine.script = script
    meta_info = generate(sglang, sampling_params={"max_new_tokens": 2})["meta_info"]
    assert meta_info["weight_version"] == "v2"
    assert [span["version"] for span in meta_info["weight_versions"]] == ["v1", "v2"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[5], 6]}, "input_ids"),
        ({"input_ids": [[5], [6]], "rid": ["a"]}, "rid"),
        ({"rid": "a b"}, "rid"),
        ({"top_logprobs_num": 2}, "return_logprob"),
        ({"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"sampling_params": {"top_p": 7}}, "sampling_params.top_p"),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"json_schema": {}}}, "sampling_params.json_schema"),
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.regex"),
        ({"sampling_params": {"custom_params": {"return_top_p_token_ids": True}}}, "sampling_params.custom_params"),
        ({"sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens"),
        ({"image_data": ["x"]}, "image_data"),
        ({"lora_path": ["x", "y"]}, "lora_path"),
        ({"routed_dp_rank": 3}, "routed_dp_rank"),
    ],
)
def test_generate_wrong_field_is_named(sglang, fields, param):
    assert generate(sglang, status=400, **fields)["error"]["param"] == param
    assert sglang.engine.requests == []


def test_generate_client_disconnects_ends_all_requests_of_the_batch(sglang):
    async def disconnect():
        sglang.engine.script = None
        call = Call(sglang.app, PATH, {"input_ids": [[5], [6]]})
        await settle()
        sent = [request.request_id for request in sglang.engine.requests]
        call.leave()
        await asyncio.wait_for(call.task, 10)
        return sent

    sent = sglang.run(disconnect())
    assert len(sent) == 2
    assert sorted(sglang.engine.aborted) == sorted(sent)


def test_generate_without_a_tokenizer_answers_tokens(tmp_path):
    with serving(write_checkpoint(tmp_path), enable_sglang_api=True, skip_tokenizer_init=True) as api:

        def script(message):
            yield EngineChunk(request_id=message.request_id, token_ids=[9], finish_reason=FinishReason.LENGTH)

        api.engine.script = script
        answer = generate(api, sampling_params={"max_new_tokens": 1}, return_logprob=False)
        assert (answer["text"], answer["output_ids"]) == ("", [9])
        for fields in ({"text": "hello"}, {"return_text_in_logprobs": True}, {"sampling_params": {"stop": "x"}}):
            generate(api, status=400, **fields)
