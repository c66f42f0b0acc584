"""Building a `Config` from flat names and values (keyword arguments, flags, a YAML file)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from eagleray.config.http_options import check_http
from eagleray.config.log_config import with_log_config
from eagleray.config.lora_modules import check_lora
from eagleray.config.option_values import integer
from eagleray.config.resolve import (
    autoscale_limits,
    cache_bytes,
    check_executor,
    check_experts,
    check_fleet,
    check_instance_name,
    check_names,
    option_that_needs_ray,
)
from eagleray.config.sections import Config
from eagleray.config.serving import JSON_LISTS, REPEATED
from eagleray.config.speculation import speculation
from eagleray.config.suggestions import suggest
from eagleray.config.traces import check_traces
from eagleray.config.vllm_table import MEANINGS, TABLE
from eagleray.errors import ConfigError


@cache
def field_owners() -> Mapping[str, str]:
    """Return the section that owns each option, by the option's name. Names are unique over all sections."""
    return {
        field.name: section.name
        for section in msgspec.structs.fields(Config)
        for field in msgspec.structs.fields(section.type)
    }


def build_config(**options: Any) -> Config:
    """Build a configuration from options by name; None means "not given" where the option's default is not None.

    Strings are converted to the option's type. Raises `ConfigError` that names the option.
    """
    owners = field_owners()
    sections: dict[str, dict[str, Any]] = {section.name: {} for section in msgspec.structs.fields(Config)}
    for name, value in options.items():
        if name not in owners:
            raise unknown_option(name)
        if value is not None:
            sections[owners[name]][name] = _shape(name, value)
    built = {}
    for section in msgspec.structs.fields(Config):
        try:
            built[section.name] = msgspec.convert(sections[section.name], section.type, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(_explain(error)) from None
    config = _with_least_engines(Config(**built))
    _check_sendable(config)
    check_names(config.model)
    cache_bytes(config.cache)  # a size that cannot be read is an error now, not when the cache is allocated
    check_instance_name(config)
    check_http(config.serving)
    check_fleet(config)
    check_executor(config)
    check_experts(config)
    check_lora(config)
    speculation(config.scheduling.speculative_config)
    check_traces(config.observability)
    _check_ray_is_installed(config)
    return msgspec.structs.replace(config, observability=with_log_config(config.observability))


def _with_least_engines(config: Config) -> Config:
    """Raise `data_parallel_size` to the minimum of `autoscale`."""
    limits, parallel = autoscale_limits(config), config.parallel
    if limits is None or parallel.data_parallel_size >= limits[0]:
        return config
    return msgspec.structs.replace(config, parallel=msgspec.structs.replace(parallel, data_parallel_size=limits[0]))


def unknown_option(name: str) -> ConfigError:
    """Return the error for an option that does not exist, which names one that is meant."""
    meant = suggest(name, field_owners().keys() | TABLE.keys(), MEANINGS)
    return ConfigError(f"there is no option `{name}`" + (f"; did you mean `{meant}`?" if meant else ""))


@cache
def option_types() -> dict[str, Any]:
    """Return the type of each option, without its annotations and without None."""
    return {
        name: plain_type(hint)
        for section in msgspec.structs.fields(Config)
        for name, hint in get_type_hints(section.type).items()
    }


@cache
def list_options() -> frozenset[str]:
    """Return the names of the options that are lists, and whose flags take several values."""
    return frozenset(name for name, kind in option_types().items() if get_origin(kind) is list) - JSON_LISTS - REPEATED


def plain_type(hint: Any) -> Any:
    """Return a type without None; an integer or a word is an integer, an integer or any text is a text."""
    if type(None) not in get_args(hint):
        return hint
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return next((kind for kind in (str, int) if kind in kinds), kinds[0])


def _shape(name: str, value: Any) -> Any:
    """Accept shorthands: `served_model_name="m"` is a list of one, a mapping may be JSON, and 8k is 8000."""
    if name in JSON_LISTS and (text := _only_text(value)) is not None and text.lstrip().startswith("["):
        try:
            return msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError as error:
            raise ConfigError(f"option `{name}`: expected a JSON list of texts, but got {text!r}: {error}") from None
    if not isinstance(value, str):
        return value
    kind = option_types()[name]
    if get_origin(kind) is dict:
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"option `{name}`: expected a JSON object, but {value!r} is none: {error}") from None
        except RecursionError:
            raise ConfigError(f"option `{name}`: the JSON object is nested too deeply") from None
    if kind is int and value != "auto":
        try:
            return integer(value)
        except ValueError as error:
            raise ConfigError(f"option `{name}`: {error}") from None
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise ConfigError(f"option `{name}`: must be one of {', '.join(get_args(kind))}, but it is {value!r}")
    return [value] if get_origin(kind) is list else value


def _check_ray_is_installed(config: Config) -> None:
    option = option_that_needs_ray(config)
    if option is not None and importlib.util.find_spec("ray") is None:
        raise ConfigError(f'option `{option}` needs Ray: pip install "ray>=2.55", on every node of the cluster')


def _check_sendable(config: Config) -> None:
    """Raise `ConfigError` for a value that cannot be sent to the processes of engines."""
    for section in msgspec.structs.fields(Config):
        for name, value in msgspec.structs.asdict(getattr(config, section.name)).items():
            try:
                msgspec.msgpack.encode(value)
            except OverflowError:
                reason = "a number is too large: integers have at most 64 bits"
            except UnicodeEncodeError:
                reason = "the text is not valid Unicode: write it in UTF-8"
            except RecursionError:
                reason = "the value is nested too deeply"
            else:
                continue
            raise ConfigError(f"option `{name}`: {reason}")


def _only_text(value: Any) -> str | None:
    """Return the text if `value` is one, or a list of one."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    return one if isinstance(one, str) else None


def _explain(error: msgspec.ValidationError) -> str:
    """Translate an error of msgspec, such as "Expected `int` >= 1 - at `$.port`", into the user's terms."""
    what, _, where = str(error).partition(" - at `$.")
    return f"option `{where.rstrip('`')}`: {what[0].lower()}{what[1:]}" if where else str(error)
