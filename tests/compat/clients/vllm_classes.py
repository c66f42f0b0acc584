"""vLLM's own request and response classes: its requests are accepted here, and its classes read the answers."""

from __future__ import annotations

import json

from checking import MODEL, check, expect, run_checks
from pydantic import TypeAdapter
from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.openai.responses import protocol as responses
from vllm.entrypoints.scale_out.token_in_token_out import protocol as generate
from vllm.entrypoints.serve.engine import protocol as engine
from vllm.entrypoints.serve.tokenize import protocol as tokenize
from vllm.sampling_params import SamplingParams
from vllm_requests import MESSAGES, check_keys, events, get, post


@check("ChatCompletionRequest, ChatCompletionResponse")
def chat_answer():
    request = chat.ChatCompletionRequest(model=MODEL, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2)
    answer = post("/v1/chat/completions", request)
    check_keys(answer, chat.ChatCompletionResponse.model_validate_json(answer))


@check("ChatCompletionStreamResponse")
def chat_stream():
    request = chat.ChatCompletionRequest(
        model=MODEL, messages=MESSAGES, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    for event in events("/v1/chat/completions", request):
        chat.ChatCompletionStreamResponse.model_validate_json(event)


@check("BatchChatCompletionRequest")
def chat_batch():
    request = chat.BatchChatCompletionRequest(model=MODEL, messages=[MESSAGES, MESSAGES], max_tokens=4)
    answer = post("/v1/chat/completions/batch", request)
    read = chat.ChatCompletionResponse.model_validate_json(answer)
    check_keys(answer, read)
    expect(len(read.choices) == 2, "not two choices")


@check("CompletionRequest, CompletionResponse")
def completion_answer():
    request = completion.CompletionRequest(
        model=MODEL, prompt="def main():", max_tokens=4, logprobs=2, prompt_logprobs=1, return_token_ids=True
    )
    answer = post("/v1/completions", request)
    check_keys(answer, completion.CompletionResponse.model_validate_json(answer))


@check("CompletionStreamResponse")
def completion_stream():
    request = completion.CompletionRequest(model=MODEL, prompt=[5, 6, 7], max_tokens=4, stream=True)
    for event in events("/v1/completions", request):
        completion.CompletionStreamResponse.model_validate_json(event)


def generate_request(**fields):
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=1)
    return generate.GenerateRequest(model=MODEL, token_ids=[5, 6, 7], sampling_params=params, **fields)


@check("GenerateRequest, GenerateTokensResponse, GenerateTextResponse")
def generate_answer():
    for mode, kind in (("tokens", generate.GenerateTokensResponse), ("text", generate.GenerateTextResponse)):
        answer = post("/inference/v1/generate", generate_request(output_mode=mode))
        check_keys(answer, kind.model_validate_json(answer))


@check("GenerateTokensStreamResponse, GenerateTextStreamResponse")
def generate_stream():
    for mode, kind in (
        ("tokens", generate.GenerateTokensStreamResponse),
        ("text", generate.GenerateTextStreamResponse),
    ):
        for event in events("/inference/v1/generate", generate_request(output_mode=mode, stream=True)):
            kind.model_validate_json(event)


@check("GenerateRequest of a rendered chat")
def render_chat():
    request = chat.ChatCompletionRequest(model=MODEL, messages=MESSAGES, max_tokens=4, temperature=0)
    rendered = generate.GenerateRequest.model_validate_json(post("/v1/chat/completions/render", request))
    token_ids = json.loads(post("/inference/v1/generate", rendered))["choices"][0]["token_ids"]
    answer = json.loads(post("/v1/chat/completions", request.model_copy(update={"return_token_ids": True})))
    expect(token_ids == answer["choices"][0]["token_ids"], "other tokens:", token_ids, answer)


@check("ModelList")
def model_list():
    models = engine.ModelList.model_validate_json(get("/v1/models"))
    expect(models.data[0].id == MODEL, "another model")


@check("ResponsesRequest, ResponsesResponse")
def responses_answer():
    request = responses.ResponsesRequest(model=MODEL, input="What is a list?", max_output_tokens=4)
    responses.ResponsesResponse.model_validate_json(post("/v1/responses", request))


@check("StreamingResponsesResponse")
def responses_stream():
    adapter = TypeAdapter(responses.StreamingResponsesResponse)
    for max_tokens, end in ((200, "response.completed"), (4, "response.incomplete")):
        request = responses.ResponsesRequest(
            model=MODEL, input="What is a list?", max_output_tokens=max_tokens, temperature=0, stream=True
        )
        answered = [json.loads(event) for event in events("/v1/responses", request)]
        expect(answered[-1]["type"] == end, "last event:", answered[-1])
        for event in answered:
            # vLLM's union has no class for the events of texts, which its server sends too, nor for the end of an
            # incomplete answer, for which its server sends response.completed and OpenAI's response.incomplete
            if event["type"] == "response.incomplete":
                responses.ResponsesResponse.model_validate(event["response"])
            elif not event["type"].startswith("response.output_text."):
                adapter.validate_python(event)


@check("AnthropicMessagesRequest, AnthropicMessagesResponse")
def messages_answer():
    request = anthropic.AnthropicMessagesRequest(model=MODEL, messages=MESSAGES, max_tokens=4)
    anthropic.AnthropicMessagesResponse.model_validate_json(post("/v1/messages", request))


@check("AnthropicStreamEvent")
def messages_stream():
    request = anthropic.AnthropicMessagesRequest(model=MODEL, messages=MESSAGES, max_tokens=4, stream=True)
    for event in events("/v1/messages", request):
        anthropic.AnthropicStreamEvent.model_validate_json(event)


@check("AnthropicCountTokensRequest, AnthropicCountTokensResponse")
def count_tokens():
    request = anthropic.AnthropicCountTokensRequest(model=MODEL, messages=MESSAGES)
    anthropic.AnthropicCountTokensResponse.model_validate_json(post("/v1/messages/count_tokens", request))


@check("TokenizeRequest, TokenizeResponse")
def tokenize_text():
    for request in (
        tokenize.TokenizeCompletionRequest(model=MODEL, prompt="def main():", return_token_strs=True),
        tokenize.TokenizeChatRequest(model=MODEL, messages=MESSAGES),
    ):
        answer = post("/tokenize", request)
        check_keys(answer, tokenize.TokenizeResponse.model_validate_json(answer))


@check("DetokenizeRequest, DetokenizeResponse")
def detokenize():
    request = tokenize.DetokenizeRequest(model=MODEL, tokens=[5, 6, 7])
    answer = post("/detokenize", request)
    check_keys(answer, tokenize.DetokenizeResponse.model_validate_json(answer))


if __name__ == "__main__":
    run_checks()
