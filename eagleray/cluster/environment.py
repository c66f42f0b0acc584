"""The environment of workers: the engine's, by default, less what belongs to one process, one host, or nobody else.

Pure. A list of what to pass on would always lack the variable that a library started to read last week; a list of
what not to pass on is short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from eagleray.errors import ConfigError

__all__ = ["WorkerEnvironment", "worker_environment"]

OF_ONE_PROCESS = (
    "*_VISIBLE_DEVICES",
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",  # Ray sets 1 in actors, an engine inside one would pass it on: `num_threads` decides
    "OMPI_*",
    "PMI_*",
    "PMIX_*",
    "RANK",
    "RAY_*",  # Ray gives each worker its own; ours have been read by then
    "ROLE_RANK",
    "SLURM_*",
    "TORCHELASTIC_*",
    "WORLD_SIZE",
    "__*",
)

OF_ONE_HOST = (
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

SECRETS = ("*_TOKEN", "*_KEY", "*SECRET*", "*PASSWORD*", "*PASSWD*", "*CREDENTIAL*")
"""Ray keeps a worker's environment in its control store and writes it to logs."""

ALL_DEVICES = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
}
"""See `devices`."""


class WorkerEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    runtime_env: dict[str, Any]
    """For Ray."""
    literal: dict[str, str]
    """Variables that the worker sets itself: Ray would replace what looks like `$NAME` in their values."""


def worker_environment(
    environ: Mapping[str, str],
    *,
    runtime_env: Mapping[str, Any],
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    sees_all_devices: bool = True,
) -> WorkerEnvironment:
    """The environment of workers, from this process's and the user's options.

    `exclude` are patterns of variables that workers do not get; `include` patterns of those that they get though they
    look like secrets. `runtime_env` is the user's: its variables win, one by one, and go to Ray as they are. An actor
    that does not see all GPUs of its node sees those that Ray has assigned to it.
    """
    theirs = runtime_env.get("env_vars", {})
    if not isinstance(theirs, Mapping) or not all(isinstance(value, str) for value in theirs.values()):
        raise ConfigError("option `ray_runtime_env`: env_vars must map names to strings")
    passed = {
        name: value
        for name, value in environ.items()
        if name not in theirs
        and not _matches(name, (*OF_ONE_PROCESS, *OF_ONE_HOST, *exclude))
        and (_matches(name, include) or not _matches(name.upper(), SECRETS))
    }
    literal = {name: value for name, value in passed.items() if "$" in value}
    plain = {name: value for name, value in passed.items() if name not in literal}
    return WorkerEnvironment(
        runtime_env={**runtime_env, "env_vars": {**plain, **(ALL_DEVICES if sees_all_devices else {}), **theirs}},
        literal=literal,
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
