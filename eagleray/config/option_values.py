"""Conversions of the values of options: short forms, and the words of vLLM."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from eagleray.config.fates import is_off, parsed
from eagleray.config.json_files import shown

MULTIPLES: dict[str, int] = {"": 1} | {
    unit: base**power for base, units in ((1000, "kmgt"), (1024, "KMGT")) for power, unit in enumerate(units, 1)
}


def integer(value: Any) -> int:
    """Return an integer that may be written as in 8k (8000), 25.6k or 64K (65,536). Raises `ValueError`."""
    match = re.fullmatch(r"\s*(-?\d+)(\.\d+)?\s*([kmgtKMGT]?)\s*", str(value))
    if match is None:
        raise ValueError(f"expected an integer, which may be written as 8k (8000) or 8K (8192), but got {shown(value)}")
    whole, fraction, unit = match[1], match[2] or "", match[3]
    if not fraction:
        return int(whole) * MULTIPLES[unit]
    number = Decimal(whole + fraction) * MULTIPLES[unit]
    if unit.isupper() or number != int(number):
        raise ValueError(f"expected an integer, but got {shown(value)}")
    return int(number)


def _words(words: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return a conversion of these words, which keeps other values."""
    return lambda value: words.get(value, value) if isinstance(value, str) else value


def _dtype(name: Any) -> Any:
    """Return the name of a dtype, which may be one of torch or be short."""
    name = str(name).removeprefix("torch.")
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name)


def executor(backend: Any) -> str:
    executors = {"mp": "processes", "ray": "ray", "uni": "in-process"}
    if backend == "external_launcher":
        raise ValueError(
            "external_launcher is not supported: start one `LLM` for each node, and send it the weights by the backend "
            "ipc"
        )
    if backend not in executors:
        raise ValueError(f"must be one of {', '.join(executors)}, but it is {shown(backend)}")
    return executors[backend]


def expert_dispatch(backend: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of token dispatch for a kind of all-to-all; none without expert parallelism."""
    is_parallel = parsed(str(given.get("enable_expert_parallel")))
    if not is_parallel or backend in ("naive", "allgather_reducescatter"):
        return {}
    return {"expert_dispatch": "all-to-all"}


def eplb(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the balance of experts. Keys that say how loads are measured and logged change nothing."""
    names = {"num_redundant_experts": "num_redundant_experts", "step_interval": "eplb_step_interval"}
    entries = _mapping(value)
    return {option: entries[key] for key, option in names.items() if key in entries}


def grammar_backend(name: Any) -> str:
    """Return the library of a name of vLLM's. Raises `ValueError` for one that is not supported."""
    known = {"auto": "auto", "guidance": "llguidance", "llguidance": "llguidance", "xgrammar": "xgrammar"}
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"{shown(name)} is not supported: grammars are compiled by llguidance (`guidance`) and `xgrammar`"
        )
    return known[name]


STRUCTURED_OUTPUTS = (
    "structured_outputs_backend",
    "structured_outputs_whitespace",
    "structured_outputs_disable_additional_properties",
    "reasoning_parser",
    "reasoning_parser_plugin",
)


def structured_outputs(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of vLLM's configuration of structured outputs."""
    entries = dict(_mapping(value))
    options: dict[str, Any] = {}
    if "backend" in entries:
        options["structured_outputs_backend"] = grammar_backend(entries.pop("backend"))
    if parsed(str(entries.pop("disable_any_whitespace", False))):
        options["structured_outputs_whitespace"] = ""
    if parsed(str(entries.pop("disable_additional_properties", False))):
        options["structured_outputs_disable_additional_properties"] = True
    for name in ("reasoning_parser", "reasoning_parser_plugin"):
        if given_name := entries.pop(name, ""):
            options[name] = given_name
    if others := [name for name, entry in entries.items() if not is_off(entry)]:
        raise ValueError(f"{', '.join(others)} of structured_outputs_config is not supported")
    return options


def auxiliary_outputs(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    entries = _mapping(value)
    return {name: entries[name] for name in ("enable_return_routed_experts",) if name in entries}


def speculation(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option that flags for single fields of `speculative_config` stand for."""
    if "speculative_config" in given:
        raise ValueError("it is a field of `speculative_config`, which is given too: put it there")
    names = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
    return {"speculative_config": {field: given[name] for name, field in names.items() if name in given}}


def only(word: str) -> Callable[[Any, Mapping[str, Any]], dict[str, Any]]:
    """Return the expansion of an option that has one supported value, and where none does not mean "off"."""

    def expand(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        if value != word:
            raise ValueError(f"{shown(value)} is not supported yet, only {word} is")
        return {}

    return expand


def logging(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the log; without a configuration of vLLM the format is `none`."""
    entries = _mapping(value)
    names = {"log_level": "log_level", "formatter": "log_format", "pylogging_config_file": "log_config_file"}
    if unknown := entries.keys() - names.keys() - {"configure_logging"}:
        raise ValueError(f"there is no {min(unknown)}, but {', '.join(names)} and configure_logging")
    options = {option: entries[key] for key, option in names.items() if key in entries}
    if "log_level" in options:
        options["log_level"] = log_level(options["log_level"])
    if parsed(str(entries.get("configure_logging", True))) is False:
        options["log_format"] = "none"
    return options


def _mapping(value: Any) -> dict[str, Any]:
    entries = parsed(value) if isinstance(value, str) else value
    if not isinstance(entries, dict):
        raise ValueError(f"expected a JSON object, but got {shown(value)}")
    return {str(name): entry for name, entry in entries.items()}


def log_level(level: Any) -> Any:
    names = {"critical": "error", "fatal": "error", "warn": "warning", "trace": "debug", "notset": "debug"}
    return names.get(level.lower(), level.lower()) if isinstance(level, str) else level


def _attention_backend(name: Any) -> Any:
    """Return None for kernels of vLLM that are not told apart here."""
    if isinstance(name, str) and name.isupper():
        return "triton" if name.startswith("TRITON") else None
    return name


def _lora_modules(modules: Any) -> Any:
    """Return adapters as NAME=DIRECTORY, which may be given as JSON objects too."""
    known = [parsed(module) if isinstance(module, str) else module for module in _as_list(modules)]
    known = [entry for module in known for entry in _as_list(module)]
    return [f"{entry.get('name')}={entry.get('path')}" if isinstance(entry, dict) else entry for entry in known]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


VALUES: dict[str, Callable[[Any], Any]] = {
    "dtype": _dtype,
    "data_parallel_backend": _words({"mp": "processes"}),
    "kv_cache_dtype": _words({"fp8_e4m3": "fp8", "int8_per_token_head": "int8"}),
    "max_model_len": lambda value: "auto" if str(value).strip().lower() in ("-1", "auto") else value,
    "generation_config": _words({"vllm": "none"}),
    "hf_token": lambda token: "" if token is True else token or None,
    "load_format": _words(dict.fromkeys(("runai_streamer", "fastsafetensors", "instanttensor"), "safetensors")),
    "tool_parser_plugin": _words({"": None}),
    "reasoning_parser_plugin": _words({"": None}),
    "worker_extension_cls": _words({"": None}),
    "log_level": log_level,
    "attention_backend": _attention_backend,
    "lora_modules": _lora_modules,
}
"""Conversions of the values of options that have the same name here; None: nothing to do."""
