"""Environment of workers: the engine's, by default, without variables of one process or one host, and without secrets.

Pure. A list of variables to pass on would always lack the one that a library started to read last week; a list of
variables to leave out is short. They travel in a message to the actor, because Ray writes a `runtime_env` to its logs,
its control store and command lines; only variables that a process needs before it receives messages are left to Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from eagleray.cluster.secrets import may_be_secret
from eagleray.errors import ConfigError

RANK_VARIABLES = (
    "*_VISIBLE_DEVICES",
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_*",
    "PMI_*",
    "PMIX_*",
    "RANK",
    "ROLE_RANK",
    "SLURM_*",
    "TORCHELASTIC_*",
    "WORLD_SIZE",
)

PROCESS_VARIABLES = (
    *RANK_VARIABLES,
    "OMP_NUM_THREADS",  # Ray sets 1 in actors, an engine inside one would pass it on: `num_threads` decides
    "PYTHONBREAKPOINT",  # Ray sets it in each driver and worker
    "RAY_*",  # Ray gives each worker its own; ours have been read by then
    "SPT_NOENV",  # Ray sets it in each worker
    "__*",
)

HOST_VARIABLES = (
    "_",
    "DBUS_*",
    "DISPLAY",
    "HOME",
    "HOSTNAME",
    "LOGNAME",
    "MAIL",
    "OLDPWD",
    "PWD",
    "SHELL",
    "SHLVL",
    "SSH_*",
    "TEMP",
    "TERM*",
    "TMP",
    "TMPDIR",
    "TMUX*",
    "USER",
    "XDG_*",
)

START_VARIABLES = (
    "GLIBC_TUNABLES",  # the C library
    "KMP_*",  # OpenMP and BLAS, when they are loaded: RAY_preload_python_modules may load torch before the actor exists
    "LD_*",  # the dynamic loader
    "MALLOC_*",  # allocators: glibc's and, by LD_PRELOAD, jemalloc
    "MKL_*",
    "OMP_*",
    "OPENBLAS_*",
    "PYTHON*",  # the interpreter
    "TCMALLOC_*",
)
"""Patterns of variables that are read before an actor receives messages. Ray sets them as the process starts; an actor
with some of them cannot use a process that Ray has started in advance. GOMP_*, which every engine has, is read late
enough."""

ALL_DEVICES = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
}
"""Every worker of a node sees all of its GPUs: see `worker_actors.device_index`."""


class WorkerEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    runtime_env: dict[str, Any]
    """Options for Ray; empty if Ray has nothing to do."""
    variables: dict[str, str]
    """Variables that are sent to the actor, which sets them itself."""
    withheld: list[str]
    """Names of variables that workers do not get because they may be secrets."""


def inheritable(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a program's resolved runtime_env that another job may take over: without the variables for its
    rank and devices, and without the setup hook, which Ray has already put into the variables."""
    rest = {name: value for name, value in runtime_env.items() if name != "worker_process_setup_hook"}
    if env_vars := rest.pop("env_vars", {}):
        rest["env_vars"] = {name: value for name, value in env_vars.items() if not _matches(name, RANK_VARIABLES)}
    return rest


def worker_environment(
    environ: Mapping[str, str],
    *,
    runtime_env: Mapping[str, Any],
    inherited: Mapping[str, str] | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    sees_all_devices: bool = True,
) -> WorkerEnvironment:
    """Return the environment of workers, from this process's environment and the user's options.

    `exclude`: patterns of variables that workers do not get; `include`: patterns of those they get although they look
    like secrets. `runtime_env` is the user's: its variables win, one by one, and go to Ray as they are, except
    secrets. `inherited`: variables of this process's own runtime_env, which Ray hands down. An actor without
    `sees_all_devices` sees the GPUs that Ray has assigned to it.
    """
    theirs = runtime_env.get("env_vars", {})
    if not isinstance(theirs, Mapping) or not all(isinstance(value, str) for value in theirs.values()):
        raise ConfigError("option `ray_runtime_env`: env_vars must map names to strings")
    known = {*theirs, *(inherited or {})}
    wanted = {
        name: value
        for name, value in environ.items()
        if name not in known and not _matches(name, (*PROCESS_VARIABLES, *HOST_VARIABLES, *exclude))
    }
    withheld = [name for name, value in wanted.items() if is_withheld(name, value, include)]
    passed = {name: value for name, value in wanted.items() if name not in withheld}
    # Ray would expand `$NAME` in a value; in the user's own variables that is what they expect.
    at_start = {name: value for name, value in passed.items() if _matches(name, START_VARIABLES) and "$" not in value}
    secret = {name: value for name, value in theirs.items() if may_be_secret(name, value) and "$" not in value}
    env_vars = {
        **at_start,
        **(ALL_DEVICES if sees_all_devices else {}),
        **{name: value for name, value in theirs.items() if name not in secret},
    }
    rest = {name: value for name, value in runtime_env.items() if name != "env_vars"}
    return WorkerEnvironment(
        runtime_env={**rest, "env_vars": env_vars} if env_vars else rest,
        variables={**{name: value for name, value in passed.items() if name not in at_start}, **secret},
        withheld=sorted(withheld),
    )


def is_withheld(name: str, value: str, include: Sequence[str]) -> bool:
    """Whether the variable may be a secret and `include` does not name it."""
    return may_be_secret(name, value) and not _matches(name, include)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
