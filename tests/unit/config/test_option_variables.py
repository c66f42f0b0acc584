"""Options from environment variables."""

from __future__ import annotations

import os

import pytest

from eagleray.config.api_keys import with_api_keys
from eagleray.config.build import build_config, field_owners
from eagleray.config.option_variables import with_variables
from eagleray.config.vllm_options import TranslatedOptions
from eagleray.engine_args import EngineArgs
from eagleray.errors import ConfigError

OWN = field_owners()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("EAGLERAY_", "VLLM_"))]:
        monkeypatch.delenv(name)


def read(monkeypatch, variables: dict[str, str], **given: object) -> TranslatedOptions:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return with_variables(TranslatedOptions(given), OWN)


@pytest.mark.parametrize(
    ("variables", "given", "options"),
    [
        ({"EAGLERAY_MAX_NUM_SEQS": "5"}, {}, {"max_num_seqs": "5"}),
        ({"EAGLERAY_MAX_NUM_SEQS": "5"}, {"max_num_seqs": 3}, {"max_num_seqs": 3}),
        ({"EAGLERAY_SERVED_MODEL_NAME": "a, b"}, {}, {"served_model_name": ["a", "b"]}),
        ({"EAGLERAY_ALLOWED_ORIGINS": "https://a, https://b"}, {}, {"allowed_origins": ["https://a", "https://b"]}),
        ({"EAGLERAY_BUNDLE_INDICES": "[1, 2]"}, {}, {"bundle_indices": [1, 2]}),
        ({"EAGLERAY_ENFORCE_EAGER": "1", "EAGLERAY_HEADLESS": "false"}, {}, {}),
        ({"EAGLERAY_CACHE_DIR": "/x", "EAGLERAY_API_KEY": "k", "EAGLERAY_DTYPE": " "}, {}, {}),
        ({"EAGLERAY_PORT": "tcp://10.0.0.1:80", "EAGLERAY_SERVICE_HOST": "10.0.0.1"}, {}, {}),
        ({"VLLM_LOGGING_LEVEL": "WARNING"}, {}, {"log_level": "warning"}),
        ({"VLLM_LOGGING_LEVEL": "WARNING", "EAGLERAY_LOG_LEVEL": "debug"}, {}, {"log_level": "debug"}),
        ({"VLLM_CONFIGURE_LOGGING": "0"}, {}, {"log_format": "none"}),
        ({"VLLM_CONFIGURE_LOGGING": "1"}, {}, {}),
        ({"VLLM_LOGGING_CONFIG_PATH": "/a"}, {}, {"log_config_file": "/a"}),
        ({"VLLM_CPU_KVCACHE_SPACE": "4"}, {}, {"kv_cache_memory": "4GiB"}),
        ({"VLLM_CPU_KVCACHE_SPACE": "0.5"}, {}, {"kv_cache_memory": "0.5GiB"}),
        ({"VLLM_CPU_KVCACHE_SPACE": "0", "VLLM_SERVER_DEV_MODE": "0"}, {}, {}),
        ({"VLLM_SERVER_DEV_MODE": "1"}, {}, {"enable_rl": True}),
        ({"VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn"}, {}, {"worker_multiprocessing_method": "spawn"}),
        (
            {"VLLM_WORKER_MULTIPROCESSING_METHOD": "fork"},
            {},
            {"worker_multiprocessing_method": "forkserver"},
        ),
        ({"VLLM_RAY_BUNDLE_INDICES": "3,4", "VLLM_RAY_PER_WORKER_GPUS": "0.2"}, {}, {}),
        (
            {"VLLM_RAY_BUNDLE_INDICES": "3,4", "VLLM_RAY_PER_WORKER_GPUS": "0.2"},
            {"executor": "ray"},
            {"executor": "ray", "bundle_indices": [3, 4], "ray_worker_resources": {"GPU": 0.2}},
        ),
    ],
)
def test_with_variables_gives_options_below_those_given(monkeypatch, variables, given, options):
    assert read(monkeypatch, variables, **given).options == options


@pytest.mark.parametrize(
    ("variables", "note"),
    [
        ({"EAGLERAY_PORT": "tcp://10.0.0.1:80"}, "EAGLERAY_PORT=tcp://10.0.0.1:80 is ignored: it describes a service"),
        ({"EAGLERAY_MAX_NUM_SEQ": "1"}, "no option `max_num_seq`; did you mean EAGLERAY_MAX_NUM_SEQS?"),
        ({"VLLM_LOGGING_LEVEL": "INFO"}, "VLLM_LOGGING_LEVEL is read as EAGLERAY_LOG_LEVEL"),
        ({"EAGLERAY_ENFORCE_EAGER": "1"}, "option `enforce_eager`: nothing to do here"),
    ],
)
def test_with_variables_notes_what_it_ignores_and_translates(monkeypatch, variables, note):
    (only,) = read(monkeypatch, variables).notes
    assert note in only


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"EAGLERAY_CPU_OFFLOAD_GB": "4"}, "option `cpu_offload_gb` is not supported"),
        ({"VLLM_RAY_BUNDLE_INDICES": "a"}, "environment variable VLLM_RAY_BUNDLE_INDICES is 'a'"),
        ({"VLLM_WORKER_MULTIPROCESSING_METHOD": "x"}, "VLLM_WORKER_MULTIPROCESSING_METHOD is 'x'"),
        ({"VLLM_CPU_KVCACHE_SPACE": "foo"}, "environment variable VLLM_CPU_KVCACHE_SPACE is 'foo'"),
        ({"VLLM_CPU_KVCACHE_SPACE": "4GiB"}, "environment variable VLLM_CPU_KVCACHE_SPACE is '4GiB'"),
        ({"VLLM_LOGGING_LEVEL": "loud"}, "environment variable VLLM_LOGGING_LEVEL is 'loud', which `log_level` cannot"),
    ],
)
def test_with_variables_wrong_value_is_refused(monkeypatch, variables, message):
    with pytest.raises(ConfigError, match=message):
        read(monkeypatch, variables, executor="ray")


def test_with_variables_secret_leaves_the_environment(monkeypatch):
    monkeypatch.setenv("EAGLERAY_HF_TOKEN", "secret")
    assert with_variables(TranslatedOptions(), {"hf_token"}).options == {"hf_token": "secret"}
    assert "EAGLERAY_HF_TOKEN" not in os.environ


def test_with_api_keys_takes_that_of_vllm(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert with_api_keys(build_config()).serving.api_key == ["secret"]
    assert "VLLM_API_KEY" not in os.environ


def test_engine_args_take_variables_but_not_those_of_the_server(monkeypatch):
    monkeypatch.setenv("EAGLERAY_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("EAGLERAY_BLOCK_SIZE", "8")
    monkeypatch.setenv("EAGLERAY_PORT", "99")
    config = EngineArgs(block_size=16).config()
    assert (config.scheduling.max_num_seqs, config.cache.block_size, config.serving.port) == (5, 16, 8000)
