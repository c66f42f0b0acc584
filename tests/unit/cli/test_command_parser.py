"""Command lines: spellings of flags that scripts for vLLM use, and errors of one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

import eagleray
from eagleray.cli.command_parser import CommandParser
from eagleray.cli.main import main
from eagleray.cli.options import program_options, server_config
from eagleray.config.flag_spellings import plain_arguments
from eagleray.config.flags import add_config_flags
from eagleray.errors import ConfigError, UserError

SECTIONS = ("model", "parallel", "cache", "scheduling", "execution", "observability", "serving")


def parse(line: str):
    parser = CommandParser(prog="eagleray")
    command = parser.add_subparsers(dest="command").add_parser("serve", allow_abbrev=False)
    add_config_flags(command, sections=SECTIONS)
    return parser.parse(["serve", *line.split()])


def options(line: str) -> dict[str, object]:
    return program_options(parse(line), sections=SECTIONS)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-tp 2 -pp 3 -dp 4 -dpn 1", [2, 3, 4, 1]),
        ("-tp=2 --pipeline_parallel_size=3 --data_parallel-size 4 --data-parallel-rank=1", [2, 3, 4, 1]),
    ],
)
def test_parser_short_flags_and_underscores_are_read(line, expected):
    given = options(line)
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_rank")
    assert [int(given[name]) for name in names] == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("m", {"model": "m"}),
        ("--model m", {"model": "m"}),
        ("m --model m", {"model": "m"}),
        ("-q fp8 --no-enable-prefix-caching", {"quantization": "fp8", "enable_prefix_caching": False}),
        ("-ep --enable-eplb --no-enforce-eager -dph", {"enable_expert_parallel": True, "enable_eplb": True}),
        ("-O3 -cc.mode 3 --compilation-config.pass_config.a=true -O=2 -O 1", {}),
        ("m --max-model-len 8k --kv-cache-memory 64M", {"model": "m", "max_model_len": "8k", "kv_cache_memory": "64M"}),
        ("--device-memory-utilization 0.5 --enforce-eager m", {"gpu_memory_utilization": "0.5", "model": "m"}),
        ("--weight-transfer-config.backend nccl", {"weight_transfer_config": '{"backend": "nccl"}'}),
        (
            "--served-model-name a b --cudagraph-capture-sizes 1 2 4 --port 1",
            {"served_model_name": ["a", "b"], "port": "1"},
        ),
        ("--enable-eplb --eplb-config.num_redundant_experts 3", {"enable_eplb": True, "num_redundant_experts": 3}),
    ],
)
def test_parser_flags_of_vllm_are_options(line, expected):
    assert options(line) == expected


def test_plain_arguments_help_of_a_group_is_the_whole_help():
    assert list(plain_arguments(["serve", "--help=ModelConfig"])) == ["serve", "--help"]


def test_plain_arguments_gathers_keys_of_an_object():
    line = ["--a_b.c.d", "1", "--a-b.e=x", "--a-b.f+", "2", "--a-b.f+=3", "-x.5", "--", "--y_z.a"]
    assert list(plain_arguments(line)) == ["-x.5", "--a-b", '{"c": {"d": 1}, "e": "x", "f": [2, 3]}', "--", "--y_z.a"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tensor-parallel-sise 2", "no option --tensor-parallel-sise; did you mean --tensor-parallel-size?"),
        ("--context-length 3", "no option --context-length; did you mean --max-model-len?"),
        ("--enable_chunked_prefil", "did you mean --enable-chunked-prefill?"),
        ("--frobnicate=3", "no option --frobnicate; `eagleray serve --help` lists the options"),
        ("a b", "no place for the argument 'b'"),
        ("--port", "--port: expected one argument"),
    ],
)
def test_parser_wrong_flag_is_one_sentence(line, message):
    with pytest.raises(UserError) as raised:
        parse(line)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("m --model n", "the model is given twice: 'm', and 'n' by --model"),
        ("--dtype int3", "option `dtype`: must be one of auto"),
        ("--cpu-offload-gb 4", "option `cpu_offload_gb` is not supported: weights"),
    ],
)
def test_server_config_wrong_value_is_one_sentence(line, message):
    with pytest.raises(ConfigError, match=message):
        server_config(parse(line), sections=SECTIONS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a command: serve, generate"),
        (["sreve"], "there is no command 'sreve'; did you mean `eagleray serve`?"),
        (["run"], "did you mean `eagleray serve`?"),
        (["xyzzy"], "there is no command 'xyzzy'; there are serve, generate"),
        (["bench", "latncy"], "BENCHMARK: there is no 'latncy'; did you mean latency?"),
        (["complete", "--modelname", "x"], "no option --modelname; did you mean --model-name?"),
    ],
)
def test_main_mistake_prints_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("eagleray: error: ") and error.count("\n") == 1


def test_server_config_flags_win_over_the_file_and_that_over_variables(tmp_path, monkeypatch):
    file = tmp_path / "options.yaml"
    file.write_text("max-num-seqs: 7\nblock_size: 32\nenforce-eager: true\nno-enable-prefix-caching: true\nport: 1\n")
    for name, value in {"MAX_NUM_SEQS": "5", "BLOCK_SIZE": "8", "MAX_LOGPROBS": "9", "DTYPE": "bf16"}.items():
        monkeypatch.setenv(f"EAGLERAY_{name}", value)
    monkeypatch.setenv("EAGLERAY_CONFIG", str(file))
    config = server_config(parse("--port 2"), sections=SECTIONS)
    assert (config.serving.port, config.cache.block_size, config.scheduling.max_num_seqs) == (2, 32, 7)
    assert (config.model.max_logprobs, config.model.dtype, config.cache.enable_prefix_caching) == (9, "bfloat16", False)


def test_server_config_wrong_key_of_a_file_is_named_with_the_file(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("tp-size: 2\n")
    with pytest.raises(ConfigError, match=r"--config .*options.yaml: there is no option `tp_size`; did you mean `t"):
        server_config(parse(f"--config {file}"), sections=SECTIONS)


def test_python_m_eagleray_is_the_command():
    run = subprocess.run([sys.executable, "-m", "eagleray", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == eagleray.__version__
