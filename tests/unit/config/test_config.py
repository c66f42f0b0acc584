from __future__ import annotations

import msgspec
import pytest

from eagleray.config.build import build_config, field_owners
from eagleray.config.resolve import DEMO_MODEL_DIR, cache_bytes, served_names
from eagleray.config.sections import Config, ModelConfig
from eagleray.config.vllm_options import translate
from eagleray.errors import CheckpointError, ConfigError
from eagleray.hub.locate import checkpoint_dir


def test_build_config_options_are_set_in_their_sections():
    config = build_config(model="m", port="81", max_num_seqs=3, enable_prefix_caching=False)
    assert (config.model.model, config.serving.port, config.scheduling.max_num_seqs) == ("m", 81, 3)
    assert config.cache.enable_prefix_caching is False


@pytest.mark.parametrize(
    ("text", "number"),
    [("8k", 8000), ("8K", 8192), ("25.6k", 25_600), (" 2M", 2**21), ("300", 300), ("1.5g", 15 * 10**8)],
)
def test_build_config_integer_with_a_unit_is_a_number(text, number):
    assert build_config(max_model_len=text).model.max_model_len == number


@pytest.mark.parametrize("text", ["1.5K", "1.00001k", "k", "8x", ""])
def test_build_config_wrong_unit_of_an_integer_is_refused(text):
    with pytest.raises(ConfigError, match="option `max_num_seqs`: expected an integer"):
        build_config(max_num_seqs=text)


def test_config_option_names_are_unique():
    fields = [f.name for s in msgspec.structs.fields(Config) for f in msgspec.structs.fields(s.type)]
    assert len(fields) == len(set(fields)) == len(field_owners())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prt": 1}, "did you mean `port`"),
        ({"port": 99999}, "option `port`: expected `int` <= 65535"),
        ({"dtype": "int3"}, "option `dtype`: must be one of auto, bfloat16, .*but it is 'int3'"),
        ({"quantization": "int3"}, "option `quantization`: must be one of fp8, int8, .*, but it is 'int3'"),
        ({"kv_cache_dtype": "fp16"}, "option `kv_cache_dtype`: must be one of auto, int8, fp8, but it is 'fp16'"),
        ({"max_num_seqs": "lots"}, "option `max_num_seqs`: expected an integer, which may be written as 8k"),
        ({"context_length": 8}, "no option `context_length`; did you mean `max_model_len`"),
        ({"temperature": 1}, "no option `temperature`$"),
        ({"max_num_seqs": 0}, "option `max_num_seqs`: expected `int` >= 1"),
        ({"max_num_seqs": "99999999999999999999"}, "option `max_num_seqs`: a number is too large"),
        ({"hf_overrides": {"a": [2**64]}}, "option `hf_overrides`: a number is too large"),
        ({"hf_overrides": '{"a":' * 3000 + "1" + "}" * 3000}, "option `hf_overrides`: .* nested too deeply"),
        ({"served_model_name": ["a\udcff"]}, "option `served_model_name`: the text is not valid Unicode"),
        ({"served_model_name": ""}, "option `served_model_name`: a name is empty"),
        ({"model": " "}, "option `model` is empty"),
        ({"kv_cache_memory": "lots"}, "`kv_cache_memory` must be a number of bytes or a size"),
        ({"executor": "threads"}, "option `executor`"),
        ({"executor": "in-process", "tensor_parallel_size": 2}, "needs 2: take processes"),
        ({"executor": "processes", "placement_group": "ab"}, "`placement_group` is for executors ray and ray-graph"),
        ({"bundle_indices": [0, 1]}, "2 were given, but there are 1 workers"),
        ({"bundle_indices": [1, 1], "tensor_parallel_size": 2}, "must be different"),
        ({"bundle_indices": [-1, 1], "tensor_parallel_size": 2}, "not negative"),
        ({"placement_group": "ab", "ray_placement_strategy": "SPREAD"}, "is for a group of the engine's own"),
        ({"executor": "ray", "ray_graph_timeout": 5}, "is for executor ray-graph"),
        ({"ray_worker_resources": "GPU=1"}, "expected a JSON object"),
        ({"ray_worker_resources": {"GPU": 1.5}}, "a whole number or a fraction of one"),
    ],
)
def test_build_config_wrong_option_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        build_config(**options)


@pytest.mark.parametrize(
    ("text", "count"), [("4GiB", 4 * 2**30), ("1.5GB", 1_500_000_000), ("512 MiB", 2**29), ("100", 100), (77, 77)]
)
def test_cache_bytes_memory_sizes_are_parsed(text, count):
    assert cache_bytes(build_config(kv_cache_memory=text).cache) == count


def test_checkpoint_dir_no_model_is_embedded_one():
    assert checkpoint_dir(ModelConfig()) == DEMO_MODEL_DIR
    assert served_names(ModelConfig()) == ["eagleray-demo"]


def test_checkpoint_dir_missing_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such directory"):
        checkpoint_dir(ModelConfig(model=str(tmp_path / "nowhere")))
    with pytest.raises(CheckpointError, match=r"config\.json: not found"):
        checkpoint_dir(ModelConfig(model=str(tmp_path)))


def test_config_round_trip_is_equal():
    config = build_config(model="m", api_key=["k"], kv_cache_memory="4GiB", max_model_len=100)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config) == config


@pytest.mark.parametrize("value", [-1, "-1", "auto", "AUTO"])
def test_translate_length_that_fits_is_auto(value):
    options = translate({"max_model_len": value}, field_owners()).options
    assert build_config(**options).model.max_model_len == "auto"
