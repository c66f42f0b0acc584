"""Options that contradict the model's files, which are found before a process is started."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from eagleray.config.build import build_config
from eagleray.config.sections import ModelConfig
from eagleray.engine_args import EngineArgs
from eagleray.errors import CheckpointError, ConfigError
from eagleray.preflight import checked_config, checked_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}


@pytest.fixture
def directory(tmp_path):
    """A checkpoint whose files are not read, except config.json."""
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def write_config(directory, **fields):
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **fields}))


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({"max_position_embeddings": 1000}, 1000),
        ({"max_position_embeddings": 1000, "rope_scaling": {"type": "linear", "factor": 2.0}}, 2000),
        ({"max_position_embeddings": 1000, "rope_parameters": YARN}, 4000),
    ],
)
def test_checked_model_length_beyond_the_files_is_refused(fields, longest, directory):
    write_config(directory, **fields)
    model = ModelConfig(model=str(directory), max_model_len=longest)
    assert checked_model(model).max_model_len == longest
    with pytest.raises(ConfigError, match=rf"`max_model_len`: 5000 is longer than the {longest} tokens .*config\.json"):
        checked_model(ModelConfig(model=str(directory), max_model_len=5000))


def test_checked_model_length_counts_overrides(directory):
    write_config(directory, max_position_embeddings=1000)
    overrides = {"rope_scaling": YARN}
    checked_model(ModelConfig(model=str(directory), max_model_len=4000, hf_overrides=overrides))


@pytest.mark.parametrize(
    ("whitespace", "backend", "reason"),
    [
        ("[ ", "auto", r"regular expression without lookaround, but got '\[ ': .*unclosed character class"),
        ("(?=a) ", "llguidance", r"look-around"),
        (" ?", "xgrammar", "xgrammar follows the default"),
    ],
)
def test_checked_model_white_space_that_no_grammar_could_have_is_refused(directory, whitespace, backend, reason):
    write_config(directory)
    checked_model(ModelConfig(model=str(directory), structured_outputs_whitespace=" ?"))
    model = ModelConfig(
        model=str(directory), structured_outputs_whitespace=whitespace, structured_outputs_backend=backend
    )
    with pytest.raises(ConfigError, match=f"option `structured_outputs_whitespace`: .*{reason}"):
        checked_model(model)


def test_checked_model_damaged_config_is_refused(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        checked_model(ModelConfig(model=str(directory)))


@pytest.mark.parametrize(
    "fields", [{}, {"max_position_embeddings": 1000, "partial_rotary_factor": 0.5}, {"max_position_embeddings": "x"}]
)
def test_checked_model_length_that_the_files_do_not_say_is_left_to_the_engine(fields, directory):
    write_config(directory, **fields)
    assert checked_model(ModelConfig(model=str(directory), max_model_len=10**6)).max_model_len == 10**6


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is not a file: give the path of a file with a Jinja template"),
        (b"{% for message in messages %}", "an error in line 1: Unexpected end of template"),
        (b"a\n{{ messages | shout }}", "an error in line 2: No filter named 'shout'"),
        (b"\xff\xfe", "'utf-8' codec can't decode byte 0xff"),
        (b" " * (2**22 + 1), "is larger than 4 MiB"),
        (b"{{" + b"(" * 100_000, "nested too deeply"),
    ],
)
def test_checked_model_chat_template_that_is_none_is_refused(content, problem, tmp_path):
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_bytes(content)
    # before the model, whose download may take long
    with pytest.raises(ConfigError) as caught:
        checked_model(ModelConfig(model="no/model", chat_template=str(path)))
    assert "option `chat_template`" in str(caught.value) and "template.jinja" in str(caught.value)
    assert problem in str(caught.value)


def test_checked_model_chat_template_text_is_no_path(tmp_path):
    template = "{% for message in messages %}{{ message.content }}{% endfor %}" * 100
    with pytest.raises(ConfigError) as caught:
        checked_model(ModelConfig(chat_template=template))
    assert "option `chat_template`" in str(caught.value) and len(str(caught.value)) < 300


def test_engine_args_config_checks_options_against_the_files():
    with pytest.raises(ConfigError, match="longer than the 2048 tokens"):
        EngineArgs(max_model_len=4096).config()


@pytest.mark.parametrize("options", [["--max-model-len", "8k"], ["--chat-template", "missing.jinja"]])
def test_serve_option_that_contradicts_the_files_starts_no_process(options, tmp_path):
    command = [sys.executable, "-m", "eagleray", "serve", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"eagleray: error: option `{options[0][2:].replace('-', '_')}`: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_checked_model_unknown_format_of_answers_is_refused(option, directory):
    write_config(directory)
    with pytest.raises(ConfigError, match=rf"{option}`?: there is no format 'my_format'; use auto, none or one of"):
        checked_model(ModelConfig(model=str(directory), **{option: "my_format"}))


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("fields", "options", "problem"),
    [
        ({}, {"quantization": "gptq"}, r"`quantization`: gptq is a format of checkpoints, but .*config\.json does not"),
        ({"quantization_config": GPTQ}, {"quantization": "int8"}, "are stored as gptq, which is kept; drop it or take"),
        (
            {"quantization_config": FP8},
            {"quantization": "int4"},
            "are stored as fp8, which is kept; drop it or take fp8",
        ),
        (
            {},
            {"quantization": "int4", "dtype": "half"},
            "`quantization`: the kernels for half have no products with int4",
        ),
        (
            {},
            {"kv_cache_dtype": "int8", "dtype": "float16"},
            "`kv_cache_dtype`: no kernel for float16 has a cache of int8",
        ),
        ({}, {"speculative_config": {"method": "mtp"}}, r"mtp needs a layer .*\(LlamaForCausalLM\) has none"),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 0},
            {"speculative_config": {"method": "mtp"}},
            r"mtp needs a layer .*\(DeepseekV3ForCausalLM\) has none",
        ),
        ({}, {"pipeline_parallel_size": 5}, "`pipeline_parallel_size`: 5 stages are more than the model's 4 layers"),
        ({}, {"num_kv_blocks": 62}, "62 means room for 992 tokens, but one sequence of 1000 tokens needs 63 blocks"),
    ],
)
def test_checked_config_options_that_no_engine_could_have_are_refused(fields, options, problem, directory):
    write_config(directory, **{"max_position_embeddings": 1000, "num_hidden_layers": 4, **fields})
    with pytest.raises(ConfigError, match=problem):
        checked_config(build_config(model=str(directory), **options))


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"quantization_config": GPTQ}, {"quantization": "gptq"}),
        ({"quantization_config": FP8}, {"quantization": "fp8", "dtype": "float16"}),
        ({}, {"quantization": "int4", "kv_cache_dtype": "int8", "pipeline_parallel_size": 4, "num_kv_blocks": 63}),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, {"speculative_config": {"method": "mtp"}}),
        ({"architectures": ["Unknown"]}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
        ({}, {"num_kv_blocks": 1, "max_model_len": "auto"}),
    ],
)
def test_checked_config_options_that_an_engine_may_have_are_kept(fields, options, directory):
    write_config(directory, **{"max_position_embeddings": 1000, "num_hidden_layers": 4, **fields})
    config = build_config(model=str(directory), **options)
    assert checked_config(config) == config


def test_checked_config_draft_model_quantization_names_the_draft_model(directory):
    write_config(directory, max_position_embeddings=1000)
    drafts = {"model": str(directory), "num_speculative_tokens": 3, "quantization": "awq"}
    config = build_config(model=str(directory), speculative_config=drafts)
    with pytest.raises(ConfigError, match=rf"the draft model {directory} .*`quantization`: awq is a format"):
        checked_config(config)
