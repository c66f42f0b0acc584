"""The description of a completion's thinking, made from the format of the reasoning, the prompt and the parameters."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from client_fakes import CLIENT, INFO
from client_tokenizers import byte_level_json
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from eagleray.client.answers.reasoning_formats import ReasoningConfig, choose_reasoning_format, reasoning_format
from eagleray.client.preprocess import Prompt, RequestBuilder
from eagleray.client.text.chat_template import ChatTemplate
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.client.thinking import ThinkingBuilder
from eagleray.config.resolve import DEMO_MODEL_DIR
from eagleray.config.sections import ModelConfig
from eagleray.errors import ConfigError, InvalidRequest
from eagleray.messages.grammars import Grammar
from eagleray.messages.sampling import Sampling, SamplingParams
from eagleray.messages.structured_outputs import StructuredOutputsParams
from eagleray.messages.thinking import Thinking
from eagleray.preflight import checked_model

TURN = "<|im_start|>assistant\n"
OPEN = TURN + "<think>\n"
CLOSED = TURN + "<think>\n\n</think>\n\n"
EOS = 2
REGEX = Grammar(kind="regex", source="a")
TAG = Grammar(kind="structural_tag", source="{}")


def make_tokenizer(*tokens: str) -> Tokenizer:
    backend = Backend.from_str(byte_level_json())
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])
    return Tokenizer(backend, eos_token_ids=(EOS,), chat_template=ChatTemplate({}, {}))


TOKENIZER = make_tokenizer("<think>", "</think>", "<|start|>", "<|channel|>", "<|end|>", "<|message|>")
VOCAB_SIZE = TOKENIZER.vocab_size
START, END, CALL = (TOKENIZER.token_id(name) for name in ("<think>", "</think>", "<tool_call>"))
(NEWLINE,) = TOKENIZER.encode("\n", add_special_tokens=False)


def make_builder(name: str = "qwen3", tokenizer: Tokenizer = TOKENIZER, **config: str) -> ThinkingBuilder:
    return ThinkingBuilder(reasoning_format(name), tokenizer, (EOS, 10**6), ReasoningConfig(**config))


def build(
    prompt: str,
    budget: int | None = None,
    grammar: Grammar | None = None,
    builder: ThinkingBuilder | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> Thinking | None:
    return (builder or make_builder()).build(prompt, budget=budget, grammar=grammar, vocab_size=vocab_size)


def test_thinking_without_budget_and_grammar_needs_nothing():
    assert build(OPEN) is None
    assert build(TURN) is None


def test_thinking_that_the_prompt_has_closed_needs_nothing():
    assert build(CLOSED, budget=3, grammar=REGEX) is None


def test_thinking_with_a_grammar_ends_before_it():
    starts = ((START,), (NEWLINE, START))
    assert build(OPEN, grammar=REGEX) == Thinking(
        end=(END,), starts=starts, is_open=True, forced_end=(END,), forbidden=(CALL, EOS)
    )
    assert build(TURN, grammar=REGEX) == Thinking(end=(END,), starts=starts, forced_end=(END,), forbidden=(CALL, EOS))


def test_thinking_without_a_marker_is_that_of_a_conversation():
    builder = make_builder("deepseek_r1")
    assert build(TURN, budget=3, builder=builder).is_open
    assert not build("Once", budget=3, builder=builder).is_open


def test_thinking_in_a_text_that_is_not_divided_does_not_delay_a_grammar():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    assert sampling_of(params, Prompt(OPEN), make_builder()).thinking is None
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", after_reasoning=True))
    assert sampling_of(params, Prompt(OPEN), make_builder()).thinking == build(OPEN, None, REGEX)


@pytest.mark.parametrize(
    ("budget", "limit", "forced_end"), [(0, 0, (END,)), (1, 0, (NEWLINE, END)), (9, 8, (NEWLINE, END))]
)
def test_budget_counts_the_white_space_before_the_end_marker(budget, limit, forced_end):
    thinking = build(OPEN, budget=budget)
    assert (thinking.budget, thinking.forced_end) == (limit, forced_end)
    assert thinking.interrupts == (CALL,)
    assert thinking.forbidden == ()


def test_budget_may_end_with_a_text_of_the_server():
    text = "Time is up."
    builder = make_builder(reasoning_end_str=text + "</think>", reasoning_start_str="<think>")
    ids = tuple(TOKENIZER.encode(text, add_special_tokens=False))
    assert build(OPEN, budget=100, builder=builder).forced_end == (*ids, END)
    assert build(OPEN, budget=len(ids) - 1, builder=builder).forced_end == (END,)


@pytest.mark.parametrize(("tokens", "vocab_size"), [((), 10**6), (("<think>", "</think>"), END)])
def test_end_marker_that_is_not_a_token_is_refused_where_it_is_needed(tokens, vocab_size):
    builder = make_builder(tokenizer=make_tokenizer(*tokens))
    for budget, grammar, param in ((None, REGEX, "structured_outputs"), (3, REGEX, "thinking_token_budget")):
        with pytest.raises(InvalidRequest, match="</think>, is not a token of this model") as raised:
            build(OPEN, budget, grammar, builder, vocab_size)
        assert raised.value.param == param
    assert build(TURN, None, REGEX, builder, vocab_size) is None
    assert build(CLOSED, 3, REGEX, builder, vocab_size) is None


def test_thinking_of_gpt_oss_comes_before_the_header_of_its_content():
    builder, prompt = make_builder("openai_gptoss"), "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    thinking = build(prompt, budget=3, grammar=REGEX, builder=builder)
    assert (text_of(thinking.starts[0]), text_of(thinking.end)) == ("<|channel|>analysis<|message|>", "<|end|>")
    assert (thinking.is_open, thinking.is_required, thinking.budget) == (False, True, 3)
    assert text_of(thinking.answer_header) == "<|start|>assistant<|channel|>final<|message|>"
    assert build(prompt, grammar=TAG, builder=builder).answer_header == ()  # the format of calls has the headers
    assert build(prompt, budget=3, builder=builder).answer_header == ()
    assert build(prompt + "<|channel|>analysis<|message|>", budget=3, builder=builder).is_open
    assert build(prompt + "<|channel|>final<|message|>", grammar=REGEX, builder=builder) is None


def text_of(token_ids: tuple[int, ...]) -> str:
    return TOKENIZER.decode(token_ids, skip_special_tokens=False)


def sampling_of(params: SamplingParams, prompt: Prompt, thinking: ThinkingBuilder | None) -> Sampling:
    """Return the parameters that reach the engine."""
    info = msgspec.structs.replace(INFO, vocab_size=VOCAB_SIZE)
    builder = RequestBuilder(CLIENT, tokenizer=TOKENIZER, eos_token_ids=(EOS,), max_logprobs=0, thinking=thinking)
    return builder.build(prompt, params, info, ids_in_use=()).message.sampling


@pytest.mark.parametrize("has_text", [True, False])
def test_request_has_its_thinking(has_text):
    prompt = Prompt(OPEN if has_text else None, TOKENIZER.encode(OPEN, add_special_tokens=False))
    constraint = StructuredOutputsParams(regex="a")
    params = SamplingParams(thinking_token_budget=3, structured_outputs=constraint)
    sampling = sampling_of(params, prompt, make_builder())
    assert sampling.thinking == build(OPEN, 3, REGEX)
    assert sampling_of(SamplingParams(structured_outputs=constraint), prompt, None).thinking is None
    for budget in (None, -1):
        assert not sampling_of(SamplingParams(thinking_token_budget=budget), prompt, make_builder()).is_masked
    with pytest.raises(InvalidRequest, match="`thinking_token_budget` is not supported for this model") as raised:
        sampling_of(SamplingParams(thinking_token_budget=3), prompt, None)
    assert raised.value.param == "thinking_token_budget"


def test_budget_without_a_tokenizer_is_refused():
    builder = RequestBuilder(CLIENT, tokenizer=None, eos_token_ids=(EOS,), max_logprobs=0)
    with pytest.raises(InvalidRequest, match="`thinking_token_budget` needs the tokenizer"):
        builder.build(Prompt(None, [1]), SamplingParams(thinking_token_budget=3), INFO, ids_in_use=())


def test_budget_with_given_tokens_is_refused():
    with pytest.raises(InvalidRequest, match="leave `thinking_token_budget` out"):
        SamplingParams(thinking_token_budget=3, trace_decode_token_ids=[1])


@pytest.mark.parametrize(
    ("options", "template", "name"),
    [
        ({}, "<|im_start|></think>", "qwen3"),
        ({}, "", None),
        ({"reasoning_parser": "none"}, "<|im_start|></think>", None),
        ({"reasoning_parser": ""}, "<|im_start|></think>", None),
        ({"reasoning_parser": "mistral"}, "", "mistral"),
        ({"reasoning_config": {"reasoning_parser": "glm45"}}, "", "glm45"),
        ({"reasoning_config": {"reasoning_end_str": "x</think>"}}, "<|im_start|></think>", "qwen3"),
        ({"reasoning_parser": "step3", "reasoning_config": {"reasoning_parser": "glm45"}}, "", "deepseek_r1"),
    ],
)
def test_options_choose_the_format(options, template, name):
    found = choose_reasoning_format(ModelConfig(**options), template)
    assert (found and found.name) == name


@pytest.mark.parametrize(("parser", "reason"), [("auto", "the chat template shows no"), ("none", "is not split")])
def test_markers_without_a_format_that_has_them_are_refused(parser, reason):
    model = ModelConfig(reasoning_parser=parser, reasoning_config={"reasoning_end_str": "x</think>"})
    with pytest.raises(ConfigError, match=f"option `reasoning_config`: .*{reason}.*`reasoning_parser`"):
        choose_reasoning_format(model, "")


@pytest.mark.parametrize("config", [{"reasoning_end_str": "x"}, {"reasoning_start_str": "<thought>"}])
def test_markers_of_another_format_are_refused(config):
    model = ModelConfig(reasoning_config=config)
    with pytest.raises(ConfigError, match="`reasoning_end_str` must end with </think>"):
        choose_reasoning_format(model, "<|im_start|></think>")


def test_markers_of_the_format_of_a_template_are_accepted_before_it_is_read():
    model = ModelConfig(model=str(DEMO_MODEL_DIR), reasoning_config={"reasoning_end_str": "x</think>"})
    assert checked_model(model).reasoning_config == model.reasoning_config


@pytest.mark.parametrize(
    "options",
    [
        {"reasoning_parser": "qwen4"},
        {"reasoning_config": {"end": "x"}},
        {"reasoning_config": {"reasoning_parser": 1}, "reasoning_parser": "qwen3"},
        {"reasoning_config": {"reasoning_end_str": "x"}, "reasoning_parser": "qwen3"},
        {"reasoning_config": {"reasoning_start_str": "<thought>", "reasoning_parser": "qwen3"}},
    ],
)
def test_wrong_options_are_refused_before_a_process_starts(options):
    with pytest.raises(ConfigError, match=f"option `{next(iter(options))}`: "):
        checked_model(ModelConfig(model=str(Path("nowhere")), **options))
