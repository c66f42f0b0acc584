"""Options of vLLM: every flag of its parser has a fate here, and no fate is wrong.

`vllm_flags.json` has the flags of the version it names, taken from its parser.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from eagleray import EngineArgs, SamplingParams
from eagleray.compat.vllm.utils.argparse_utils import FlexibleArgumentParser
from eagleray.config.build import build_config, field_owners, list_options, option_types
from eagleray.config.fates import Expansion, NoEffect, Refused, Renamed
from eagleray.config.option_values import VALUES
from eagleray.config.vllm_options import option_fate, translate
from eagleray.config.vllm_table import LISTS, MEANINGS, NO_EFFECT, REFUSED, SPELLINGS, SWITCHES, TABLE
from eagleray.errors import ConfigError

PARSER = json.loads((Path(__file__).parent / "vllm_flags.json").read_text())
FLAGS = PARSER["flags"]
OWN = field_owners()

COMMAND_LINE = {"config"}
"""Flags that are no options."""

NO_ACTION_BY_DEFAULT = {
    "all2all_backend",
    "anthropic_disabled_thinking_effort",
    "fingerprint_mode",
    "reasoning_parser_plugin",
    "tool_parser_plugin",
    "worker_extension_cls",
}
"""Options whose default in vLLM sets nothing, although other values do."""

DEFAULTS_OF_OTHER_WORDS = {"data_parallel_backend": "processes"}
"""Defaults of vLLM that have another word here."""

OF_PROGRAMS = {"enable_sleep_mode"}
"""Options of the HTTP server whose fate in the table is that for programs."""

EARLIER = """max_num_partial_prefills cuda_graph_sizes max_seq_len_to_capture num_scheduler_steps
    multi_step_stream_outputs
    swap_space preemption_mode use_v2_block_manager scheduler_delay_factor lora_extra_vocab_size
    disable_mm_preprocessor_cache disable_log_requests disable_async_output_proc guided_decoding_backend rope_scaling
    rope_theta disable_frontend_multiprocessing device_config task enable_reasoning"""
"""Options of earlier versions of vLLM."""


def test_vllm_table_has_a_fate_for_every_flag_of_its_parser():
    assert PARSER["version"] == "0.32.0" and len(FLAGS) == 316  # and --help
    assert [name for name in FLAGS if name not in OWN and name not in TABLE] == sorted(COMMAND_LINE)


def test_vllm_table_has_no_option_that_exists_here_or_nowhere():
    assert TABLE.keys() & OWN.keys() == OF_PROGRAMS
    assert TABLE.keys() - FLAGS.keys() - set(PARSER["engine_args"]) == set(EARLIER.split())


def test_vllm_table_has_each_option_once():
    names = [name for groups in (NO_EFFECT, REFUSED) for text in groups.values() for name in text.split()]
    aliases = [name for name, fate in TABLE.items() if isinstance(fate, Renamed | Expansion)]
    assert len(names) + len(aliases) == len(TABLE)


def test_vllm_table_kinds_of_flags_are_those_of_its_options():
    assert TABLE.keys() >= SWITCHES and TABLE.keys() >= LISTS


def test_vllm_table_leads_to_options_that_exist():
    for fate in TABLE.values():
        targets = [fate.option] if isinstance(fate, Renamed) else fate.options if isinstance(fate, Expansion) else []
        assert set(targets) <= OWN.keys()
    assert VALUES.keys() <= OWN.keys()
    assert set(MEANINGS.values()) <= OWN.keys()
    assert not MEANINGS.keys() & (OWN.keys() | TABLE.keys())


def test_vllm_table_sentences_name_options_that_exist():
    for fate in TABLE.values():
        if isinstance(fate, NoEffect | Refused):
            named = set(re.findall(r"`([a-z_0-9]+)`", fate.reason))
            fields = {*SamplingParams.__struct_fields__, "usage", "prompt_tokens_details"}
            of_files = {"architectures", "tokenizers"}
            assert named - fields - of_files <= OWN.keys() | TABLE.keys()


def test_vllm_table_flags_take_as_many_values_as_those_of_vllm():
    for name, entry in FLAGS.items():
        if name in OWN:
            is_switch, is_list = option_types()[name] is bool, name in list_options()
        else:
            is_switch, is_list = name in SWITCHES, name in LISTS
        if name not in COMMAND_LINE:
            assert (is_switch, is_list) == (entry["kind"] == "switch", entry["kind"] == "list"), name


def test_vllm_table_has_every_other_spelling():
    others = {
        spelling: name
        for name, entry in FLAGS.items()
        for spelling in entry["spellings"]
        if spelling != "--" + name.replace("_", "-")
    }
    assert others.items() <= SPELLINGS.items()


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_translate_default_of_vllm_is_accepted(name):
    default = FLAGS[name].get("default")
    if name in COMMAND_LINE or default is None:
        return
    known = translate({name: default}, OWN)
    fate = option_fate(name, OWN)
    if isinstance(fate, Refused):
        assert (known.options, known.notes) == ({}, [])
    elif isinstance(fate, NoEffect) or name in NO_ACTION_BY_DEFAULT:
        assert known.options == {}
        (note,) = known.notes
        assert note.startswith(f"option `{name}`: nothing to do here: ")
    else:
        own = fate.option if isinstance(fate, Renamed) else name
        assert known.options == {own: DEFAULTS_OF_OTHER_WORDS.get(name, default)} and known.notes == []
    build_config(**{option: value for option, value in known.options.items() if option != "model"})


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"tensor-parallel-size": 2}, {"tensor_parallel_size": 2}),
        ({"distributed_executor_backend": "mp"}, {"executor": "processes"}),
        ({"distributed_executor_backend": "ray"}, {"executor": "ray"}),
        ({"data_parallel_backend": "mp"}, {"data_parallel_backend": "processes"}),
        ({"kv_cache_memory_bytes": "64M"}, {"kv_cache_memory": 64 * 2**20}),
        ({"num_gpu_blocks_override": 7}, {"num_kv_blocks": 7}),
        ({"max_num_queued_reqs": 7}, {"max_queued_requests": 7}),
        ({"uvicorn_log_level": "trace"}, {"log_level": "debug"}),
        ({"uvicorn_log_level": "warning", "log_level": "INFO"}, {"log_level": "info"}),
        (
            {"logging_config": {"log_level": "ERROR", "formatter": "json"}},
            {"log_level": "error", "log_format": "json"},
        ),
        ({"logging_config": {"configure_logging": "false", "formatter": "json"}}, {"log_format": "none"}),
        ({"logging_config": {"pylogging_config_file": "a.json"}}, {"log_config_file": "a.json"}),
        ({"dtype": "bf16"}, {"dtype": "bfloat16"}),
        ({"dtype": torch.float16}, {"dtype": "float16"}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
        ({"kv_cache_dtype": "int8_per_token_head"}, {"kv_cache_dtype": "int8"}),
        ({"generation_config": "vllm"}, {"generation_config": "none"}),
        ({"load_format": "runai_streamer"}, {"load_format": "safetensors"}),
        ({"attention_backend": "TRITON_ATTN"}, {"attention_backend": "triton"}),
        ({"attention_backend": "FLASHINFER"}, {}),
        ({"worker_extension_cls": ""}, {}),
        ({"lora_modules": ['{"name": "a", "path": "/b"}', "c=d"]}, {"lora_modules": ["a=/b", "c=d"]}),
        ({"all2all_backend": "deepep_low_latency"}, {}),
        (
            {"all2all_backend": "deepep_low_latency", "enable_expert_parallel": "false"},
            {"enable_expert_parallel": "false"},
        ),
        (
            {"all2all_backend": "deepep_low_latency", "enable_expert_parallel": True},
            {"expert_dispatch": "all-to-all", "enable_expert_parallel": True},
        ),
        (
            {"enable_eplb": True, "eplb_config": '{"num_redundant_experts": 2, "step_interval": 9, "window_size": 5}'},
            {"enable_eplb": True, "num_redundant_experts": 2, "eplb_step_interval": 9},
        ),
        ({"aux_output_config": {"enable_return_routed_experts": True}}, {"enable_return_routed_experts": True}),
        ({"enforce_eager": True, "trust_remote_code": True, "compilation_config": 3, "swap_space": 4}, {}),
        ({"no_enforce_eager": True, "no_enable_prefix_caching": "true"}, {"enable_prefix_caching": False}),
        ({"enforce_eager": None, "max_num_seqs": None}, {}),
        ({"limit_mm_per_prompt": '{"image": 0, "video": {"count": 0}}', "cpu_offload_gb": "0.0"}, {}),
        ({"task": "generate", "model_impl": "vllm", "decode_context_parallel_size": "1", "lora_dtype": "auto"}, {}),
        (
            {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "tool_strict_level": "function"},
            {"tool_call_parser": "hermes", "tool_strict_level": "function"},
        ),
        ({"exclude_tools_when_tool_choice_none": True}, {"exclude_tools_when_tool_choice_none": True}),
        ({"guided_decoding_backend": "guidance"}, {"structured_outputs_backend": "llguidance"}),
        (
            {"structured_outputs_config": '{"backend": "xgrammar", "disable_any_whitespace": true}'},
            {"structured_outputs_backend": "xgrammar", "structured_outputs_whitespace": ""},
        ),
        (
            {"structured_outputs_config": {"disable_additional_properties": True, "reasoning_parser": "qwen3"}},
            {"structured_outputs_disable_additional_properties": True, "reasoning_parser": "qwen3"},
        ),
        (
            {"structured_outputs_config": {"reasoning_parser": "", "reasoning_parser_plugin": "mine.py"}},
            {"reasoning_parser_plugin": "mine.py"},
        ),
        (
            {"structured_outputs_config": {"backend": "auto", "enable_in_reasoning": False}},
            {"structured_outputs_backend": "auto"},
        ),
        ({"nobody": 1}, {"nobody": 1}),
    ],
)
def test_translate_option_of_vllm_becomes_ours(given, options):
    assert translate(given, OWN).options == options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"distributed_executor_backend": "external_launcher"}, "one `LLM` for each node"),
        ({"distributed_executor_backend": "mpi"}, "must be one of mp, ray, uni"),
        ({"model_impl": "transformers"}, "`model_impl` is not supported: all models are eagleray's own"),
        ({"nnodes": 2}, "Ray places engines on several nodes"),
        ({"rope_scaling": {"factor": 2}}, "`hf_overrides` changes this"),
        ({"task": "embed"}, "use `runner` and `convert`"),
        ({"cpu_offload_gb": 4}, "use more devices"),
        ({"limit_mm_per_prompt": {"image": 1}}, "no images"),
        ({"headless": "true"}, "Ray places engines"),
        ({"kv_cache_memory_bytes": "lots"}, "option `kv_cache_memory_bytes`: expected an integer"),
        ({"eplb_config": "3"}, "option `eplb_config`: expected a JSON object"),
        ({"guided_decoding_backend": "outlines"}, "'outlines' is not supported: grammars are compiled by llguidance"),
        ({"structured_outputs_config": {"backend": "lm-format-enforcer"}}, "'lm-format-enforcer' is not supported"),
        (
            {"structured_outputs_config": {"enable_in_reasoning": True}},
            "enable_in_reasoning of",
        ),
        ({"logging_config": {"formater": "json"}}, "there is no formater, but log_level, formatter,"),
        ({"anthropic_disabled_thinking_effort": "none"}, "'none' is not supported yet, only auto is"),
        ({"fingerprint_mode": "none"}, "option `fingerprint_mode`: 'none' is not supported yet"),
        ({"fingerprint_mode": "hash"}, "option `fingerprint_mode`: 'hash' is not supported yet"),
    ],
)
def test_translate_option_that_would_change_answers_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        translate(given, OWN)


def test_translate_option_without_effect_is_noted_once():
    flags = translate({"enforce_eager": True}, OWN, as_flags=True)
    assert flags.notes == ["--enforce-eager: nothing to do here: the device and the model decide which kernels run"]
    (note,) = translate({"attention_backend": "FLASHINFER"}, OWN).notes
    assert note == "option `attention_backend`: nothing to do here: 'FLASHINFER' is the same as the default"


def test_engine_args_take_the_options_of_programs_for_vllm(capfd):
    args = EngineArgs("m", enforce_eager=True, enable_sleep_mode=True, disable_log_stats=True, dtype="bf16")
    assert (args.enforce_eager, args.max_num_seqs, args.compilation_config) == (True, 256, None)
    args.model, args.gpu_memory_utilization = None, 0.5
    config = args.config()
    assert (config.model.dtype, config.cache.gpu_memory_utilization) == ("bfloat16", 0.5)
    assert capfd.readouterr().err.count("nothing to do here") == 2


def test_engine_args_every_option_of_vllm_is_known():
    internal = {"_api_process_count", "_api_process_rank"}
    assert {name for name in PARSER["engine_args"] if name not in OWN and option_fate(name, OWN) is None} == internal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 1}, "is for the HTTP server"),
        ({"max_modl_len": 1}, "did you mean `max_model_len`"),
        ({"enable_chunked_prefil": True}, "did you mean `enable_chunked_prefill`"),
        ({"tp_size": 2}, "did you mean `tensor_parallel_size`"),
    ],
)
def test_engine_args_wrong_option_is_named_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**options)


def test_engine_args_flags_of_a_program_are_options():
    parser = FlexibleArgumentParser()
    parser.add_argument("--max-tokens", type=int)
    EngineArgs.add_cli_args(parser).set_defaults(model="m")
    line = ["--max_tokens", "3", "-tp", "2", "--enforce_eager", "--compilation-config.mode", "3", "--dtype=bf16"]
    given = vars(parser.parse_args(line))
    assert given.pop("max_tokens") == 3
    args = EngineArgs(**given)
    assert (args.model, args.tensor_parallel_size, args.enforce_eager) == ("m", "2", True)
    same = EngineArgs.from_cli_args(parser.parse_args(line))
    assert vars(same) == {name: value for name, value in given.items() if value is not None}
