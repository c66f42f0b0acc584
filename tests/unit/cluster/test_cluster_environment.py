"""Which environment variables of the engine its workers get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.cluster.environment import WorkerEnvironment, worker_environment
from eagleray.errors import ConfigError


def make(environ: Mapping[str, str], **options: Any) -> WorkerEnvironment:
    return worker_environment(environ, **{"runtime_env": {}, **options})


def variables(environ: Mapping[str, str], **options: Any) -> dict[str, str]:
    env_vars: dict[str, str] = make(environ, **options).runtime_env["env_vars"]
    return env_vars


def test_what_nobody_thought_of_is_passed_on() -> None:
    got = variables({"NCCL_SOCKET_IFNAME": "eth0", "SOME_NEW_SETTING": "1", "PATH": "/bin", "LANG": "C.UTF-8"})
    assert got.items() >= {"NCCL_SOCKET_IFNAME": "eth0", "SOME_NEW_SETTING": "1", "PATH": "/bin"}.items()


@pytest.mark.parametrize(
    "name",
    ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "RAY_JOB_ID",
     "RAY_ADDRESS", "HOME", "HOSTNAME", "TMPDIR", "SSH_CONNECTION", "XDG_RUNTIME_DIR", "PWD", "_"],
)  # fmt: skip
def test_what_belongs_to_one_process_or_host_is_not(name: str) -> None:
    assert name not in variables({name: "1"})


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "db_password", "MYSECRETS"]
)
def test_secrets_are_not(name: str) -> None:
    assert name not in variables({name: "x"})


def test_a_secret_is_passed_if_it_is_asked_for() -> None:
    got = variables({"HF_TOKEN": "x", "API_KEY": "y"}, include=["HF_*"])
    assert got["HF_TOKEN"] == "x"
    assert "API_KEY" not in got


def test_what_the_user_excludes_is_not_passed_even_if_it_is_included() -> None:
    got = variables({"HF_TOKEN": "x", "HF_HOME": "/a", "B": "1"}, include=["HF_TOKEN"], exclude=["HF_*"])
    assert not {"HF_TOKEN", "HF_HOME"} & got.keys()
    assert got["B"] == "1"


def test_the_users_variables_win_one_by_one() -> None:
    theirs = {"env_vars": {"A": "theirs", "CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "given"}}
    got = variables({"A": "ours", "B": "ours"}, runtime_env=theirs)
    assert got.items() >= {"A": "theirs", "B": "ours", "CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "given"}.items()


def test_the_rest_of_the_users_runtime_env_goes_through() -> None:
    theirs = {"pip": ["x"], "working_dir": "/w"}
    assert make({}, runtime_env=theirs).runtime_env.items() >= theirs.items()


def test_ray_is_told_to_leave_the_visible_devices_alone() -> None:
    assert variables({})["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"


def test_values_that_ray_would_expand_go_another_way() -> None:
    made = make({"PS1": "$HOME>", "LIBS": "/a:$ORIGIN/b", "C": "1"}, runtime_env={"env_vars": {"P": "${PATH}:/x"}})
    assert made.literal == {"PS1": "$HOME>", "LIBS": "/a:$ORIGIN/b"}
    assert not {"PS1", "LIBS"} & made.runtime_env["env_vars"].keys()
    assert made.runtime_env["env_vars"]["P"] == "${PATH}:/x"  # the user's own are Ray's to expand


@pytest.mark.parametrize("env_vars", [["A=1"], {"A": 1}])
def test_variables_that_are_no_strings_are_refused(env_vars: object) -> None:
    with pytest.raises(ConfigError, match="env_vars must map names to strings"):
        make({}, runtime_env={"env_vars": env_vars})


@given(st.dictionaries(st.text("ABC_", min_size=1), st.text("x$", max_size=3)))
def test_a_variable_travels_at_most_one_way_and_unchanged(environ: dict[str, str]) -> None:
    made = make(environ)
    env_vars = made.runtime_env["env_vars"]
    assert not env_vars.keys() & made.literal.keys()
    assert all(environ[name] == value for name, value in (env_vars | made.literal).items() if name in environ)


def test_an_actor_sees_all_devices_of_its_node_or_its_own_alone() -> None:
    assert "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in variables({})
    assert "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" not in variables({}, sees_all_devices=False)
