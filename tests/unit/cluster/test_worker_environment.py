"""Environment variables of the engine that its workers get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.cluster.environment import WorkerEnvironment, inheritable, worker_environment
from eagleray.errors import ConfigError


def make(environ: Mapping[str, str], **options: Any) -> WorkerEnvironment:
    return worker_environment(environ, **{"runtime_env": {}, **options})


def variables(environ: Mapping[str, str], **options: Any) -> dict[str, str]:
    """Return everything that the workers get, by either way."""
    made = make(environ, **options)
    return {**made.runtime_env.get("env_vars", {}), **made.variables}


def by_ray(environ: Mapping[str, str], **options: Any) -> dict[str, str]:
    env_vars: dict[str, str] = make(environ, **options).runtime_env.get("env_vars", {})
    return env_vars


def test_worker_environment_unknown_variables_are_passed_on() -> None:
    got = variables({"NCCL_SOCKET_IFNAME": "eth0", "SOME_NEW_SETTING": "1", "PATH": "/bin", "LANG": "C.UTF-8"})
    assert got.items() >= {"NCCL_SOCKET_IFNAME": "eth0", "SOME_NEW_SETTING": "1", "PATH": "/bin"}.items()


@pytest.mark.parametrize(
    "name",
    ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "RAY_JOB_ID",
     "RAY_ADDRESS", "HOME", "HOSTNAME", "TMPDIR", "SSH_CONNECTION", "XDG_RUNTIME_DIR", "PWD", "_"],
)  # fmt: skip
def test_worker_environment_variables_of_one_process_or_host_are_left_out(name: str) -> None:
    assert name not in variables({name: "1"})


def test_worker_environment_secrets_are_withheld_and_named() -> None:
    secret = {"DATABASE_URL": "postgres://u:pw@db", "HF_TOKEN": "x", "DB_PWD": "y"}
    made = make({**secret, "LANG": "C.UTF-8"})
    assert made.withheld == ["DATABASE_URL", "DB_PWD", "HF_TOKEN"]
    assert made.variables == {"LANG": "C.UTF-8"}


def test_worker_environment_secrets_that_would_be_left_out_anyway_are_not_named() -> None:
    assert make({"PWD": "/a", "RAY_AUTH_TOKEN": "x", "B_KEY": "y"}, exclude=["B_*"]).withheld == []


def test_worker_environment_included_secret_is_passed_on() -> None:
    got = variables({"HF_TOKEN": "x", "API_KEY": "y"}, include=["HF_*"])
    assert got["HF_TOKEN"] == "x"
    assert "API_KEY" not in got


def test_worker_environment_exclude_wins_over_include() -> None:
    got = variables({"HF_TOKEN": "x", "HF_HOME": "/a", "B": "1"}, include=["HF_TOKEN"], exclude=["HF_*"])
    assert not {"HF_TOKEN", "HF_HOME"} & got.keys()
    assert got["B"] == "1"


def test_worker_environment_variables_of_the_user_win_one_by_one() -> None:
    theirs = {"env_vars": {"A": "theirs", "CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "given"}}
    got = variables({"A": "ours", "B": "ours"}, runtime_env=theirs)
    assert got.items() >= {"A": "theirs", "B": "ours", "CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "given"}.items()


def test_worker_environment_other_runtime_env_options_are_passed_on() -> None:
    theirs = {"pip": ["x"], "working_dir": "/w"}
    assert make({}, runtime_env=theirs).runtime_env.items() >= theirs.items()


def test_worker_environment_tells_ray_to_keep_the_visible_devices() -> None:
    assert by_ray({})["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"


def test_worker_environment_ray_sets_only_variables_that_are_read_at_start() -> None:
    early = {"LD_PRELOAD": "/a.so", "PYTHONPATH": "/p", "MALLOC_CONF": "x", "OMP_PROC_BIND": "true"}
    made = make({**early, "SOME_SETTING": "1"}, sees_all_devices=False)
    assert made.runtime_env == {"env_vars": early}
    assert made.variables == {"SOME_SETTING": "1"}


def test_worker_environment_without_start_variables_has_no_runtime_env() -> None:
    # so an actor can use a process that Ray has started in advance
    environ = {"SOME_SETTING": "1", "GOMP_SPINCOUNT": "1000", "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace"}
    assert make(environ, sees_all_devices=False).runtime_env == {}


def test_worker_environment_values_that_ray_would_expand_go_by_message() -> None:
    made = make({"PS1": "$HOME>", "LD_LIBRARY_PATH": "/a:$ORIGIN/b"}, runtime_env={"env_vars": {"P": "${PATH}:/x"}})
    assert made.variables == {"PS1": "$HOME>", "LD_LIBRARY_PATH": "/a:$ORIGIN/b"}
    assert made.runtime_env["env_vars"]["P"] == "${PATH}:/x"  # the user's own are Ray's to expand


def test_worker_environment_secrets_of_the_user_go_by_message() -> None:
    made = make({}, runtime_env={"env_vars": {"HF_TOKEN": "given", "A": "1"}}, sees_all_devices=False)
    assert made.runtime_env == {"env_vars": {"A": "1"}}
    assert made.variables == {"HF_TOKEN": "given"}


def test_worker_environment_inherited_variables_are_left_to_ray() -> None:
    made = make({"JOBVAR": "expanded", "B": "1"}, inherited={"JOBVAR": "${X}"}, sees_all_devices=False)
    assert made.variables == {"B": "1"}
    assert made.runtime_env == {}


def test_inheritable_drops_rank_devices_and_setup_hook() -> None:
    # Ray has put the hook into the variables
    hook = {"__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "module.function"}
    env_vars = {"JOBVAR": "1", "OMP_NUM_THREADS": "4", **hook}
    given = {
        "working_dir": "gcs://a.zip",
        "worker_process_setup_hook": "function",
        "env_vars": {**env_vars, "CUDA_VISIBLE_DEVICES": "", "RANK": "0", "MASTER_ADDR": "here"},
    }
    assert inheritable(given) == {"working_dir": "gcs://a.zip", "env_vars": env_vars}
    assert inheritable({"pip": ["x"]}) == {"pip": ["x"]}


@pytest.mark.parametrize("env_vars", [["A=1"], {"A": 1}])
def test_worker_environment_env_vars_that_are_not_strings_are_refused(env_vars: object) -> None:
    with pytest.raises(ConfigError, match="env_vars must map names to strings"):
        make({}, runtime_env={"env_vars": env_vars})


@given(st.dictionaries(st.text("LD_ABC", min_size=1), st.text("x$", max_size=3)))
def test_worker_environment_variable_travels_at_most_one_way_and_unchanged(environ: dict[str, str]) -> None:
    made = make(environ)
    env_vars = made.runtime_env["env_vars"]
    assert not env_vars.keys() & made.variables.keys()
    assert all(environ[name] == value for name, value in (env_vars | made.variables).items() if name in environ)


def test_worker_environment_sees_all_devices_decides_what_ray_hides() -> None:
    assert "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in by_ray({})
    assert "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" not in by_ray({}, sees_all_devices=False)
