"""Options from environment variables: EAGLERAY_<OPTION> for each option, and some variables of vLLM."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from eagleray.config.build import field_owners, option_types
from eagleray.config.environment import (
    ADMIN_API_KEY_VARIABLE,
    API_KEY_VARIABLE,
    PREFIX,
    prefixed_variables,
    take_variable,
)
from eagleray.config.fates import parsed
from eagleray.config.option_values import log_level
from eagleray.config.suggestions import suggest
from eagleray.config.vllm_options import TranslatedOptions, translate
from eagleray.config.vllm_table import TABLE
from eagleray.errors import ConfigError

CONFIG_VARIABLE = "EAGLERAY_CONFIG"
"""Variable for the file of the flag `--config`."""

NO_OPTIONS = frozenset(
    {API_KEY_VARIABLE, ADMIN_API_KEY_VARIABLE, CONFIG_VARIABLE, "EAGLERAY_CACHE_DIR", "EAGLERAY_CPU_KERNELS"}
)
"""Variables that are read elsewhere."""

SECRETS = frozenset({"hf_token"})
"""Options whose variables are removed from the environment, so that no child inherits them."""

KUBERNETES_VALUES = ("tcp://", "udp://")
"""Beginnings of the values of variables that Kubernetes sets for a service named eagleray, such as EAGLERAY_PORT."""


@dataclass(frozen=True)
class VariableAlias:
    """Variable of vLLM that sets an option."""

    option: str
    convert: Callable[[str], Any]
    needs_ray: bool = False
    """Whether the variable counts only where workers or engines are Ray actors."""


def _gibibytes(text: str) -> str | None:
    """Return a number of GiB as a size; None for 0, which means the default. Raises `ValueError`."""
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise ValueError
    return f"{text}GiB" if float(text) else None


def _level(text: str) -> str:
    """Return the name of a log level here. Raises `ValueError` for a name that is no level."""
    level: str = log_level(text)
    if level not in get_args(option_types()["log_level"]):
        raise ValueError
    return level


def _start_method(text: str) -> str:
    """Return the start method here for one of vLLM, whose engines are forks of the process itself by default. Raises
    `ValueError` for an unknown method."""
    if text == "fork":
        return "forkserver"
    if text not in get_args(option_types()["worker_multiprocessing_method"]):
        raise ValueError
    return text


VLLM_VARIABLES = {
    "VLLM_LOGGING_LEVEL": VariableAlias("log_level", _level),
    "VLLM_LOGGING_CONFIG_PATH": VariableAlias("log_config_file", str),
    "VLLM_CONFIGURE_LOGGING": VariableAlias("log_format", lambda text: None if int(text) else "none"),
    "VLLM_RAY_BUNDLE_INDICES": VariableAlias(
        "bundle_indices", lambda text: [int(index) for index in text.split(",")], needs_ray=True
    ),
    "VLLM_RAY_PER_WORKER_GPUS": VariableAlias(
        "ray_worker_resources", lambda text: {"GPU": float(text)}, needs_ray=True
    ),
    "VLLM_CPU_KVCACHE_SPACE": VariableAlias("kv_cache_memory", _gibibytes),
    "VLLM_WORKER_MULTIPROCESSING_METHOD": VariableAlias("worker_multiprocessing_method", _start_method),
    "VLLM_SERVER_DEV_MODE": VariableAlias("enable_rl", lambda text: parsed(text) == 1 or None),
}


def with_variables(given: TranslatedOptions, own: Collection[str]) -> TranslatedOptions:
    """Return the options that were given, over those of the environment. `own`: names of the options that count.

    Raises `ConfigError` for a value that is not supported.
    """
    ours = _own_variables(own)
    known = ours.under(given)
    return _vllm_variables(known.options, own).under(known)


def _own_variables(own: Collection[str]) -> TranslatedOptions:
    given, notes = {}, []
    for variable, text in prefixed_variables(PREFIX).items():
        name = variable.removeprefix(PREFIX).lower()
        if variable in NO_OPTIONS or not text.strip() or (name in field_owners() and name not in own):
            continue
        if text.startswith(KUBERNETES_VALUES):
            if name not in own:
                continue
            notes.append(f"{variable}={text} is ignored: it describes a service of Kubernetes")
        elif name in own or name in TABLE:
            given[name] = as_list(text) if get_origin(option_types().get(name)) is list else text
        elif meant := suggest(name, own, {}):
            notes.append(f"{variable} is ignored: there is no option `{name}`; did you mean {PREFIX}{meant.upper()}?")
        if name in SECRETS:
            take_variable(variable)
    return TranslatedOptions(notes=notes).under(translate(given, own))


def _vllm_variables(known: Mapping[str, Any], own: Collection[str]) -> TranslatedOptions:
    """Return the options that variables of vLLM set, without the options in `known`, which take precedence."""
    found = TranslatedOptions()
    variables = prefixed_variables("VLLM_")
    for variable, alias in VLLM_VARIABLES.items():
        text = variables.get(variable, "").strip()
        if not text or alias.option in known or alias.option not in own or (alias.needs_ray and not _uses_ray(known)):
            continue
        try:
            value = alias.convert(text)
        except ValueError:
            raise ConfigError(
                f"the environment variable {variable} is {text!r}, which `{alias.option}` cannot be"
            ) from None
        if value is not None:
            found.options[alias.option] = value
            found.notes.append(f"{variable} is read as {PREFIX}{alias.option.upper()}")
    return found


def _uses_ray(known: Mapping[str, Any]) -> bool:
    return known.get("executor") in ("ray", "ray-graph") or known.get("data_parallel_backend") == "ray"


def as_list(text: str) -> list[Any]:
    """Return the entries of a JSON list, or of a text where commas divide them."""
    entries = parsed(text)
    return entries if isinstance(entries, list) else [entry.strip() for entry in text.split(",") if entry.strip()]
