"""Building a `Config` from flat names and values (keyword arguments, flags, a YAML file)."""

from __future__ import annotations

import difflib
from typing import Any

import msgspec

from eagleray.config.lora_modules import check_lora
from eagleray.config.resolve import cache_bytes, check_executor, check_experts, check_fleet, check_instance_name
from eagleray.config.sections import Config
from eagleray.errors import ConfigError


def field_owners() -> dict[str, str]:
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
            sections[owners[name]][name] = _shape(owners[name], name, value)
    built = {}
    for section in msgspec.structs.fields(Config):
        try:
            built[section.name] = msgspec.convert(sections[section.name], section.type, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(_explain(error)) from None
    config = Config(**built)
    cache_bytes(config.cache)  # a size that cannot be read is an error now, not when the cache is allocated
    check_instance_name(config)
    check_fleet(config)
    check_executor(config)
    check_experts(config)
    check_lora(config)
    return config


def unknown_option(name: str) -> ConfigError:
    """Return the error for an option that does not exist, which names the most similar one."""
    close = difflib.get_close_matches(name, field_owners(), n=1)
    return ConfigError(f"there is no option `{name}`" + (f"; did you mean `{close[0]}`?" if close else ""))


def _shape(section: str, name: str, value: Any) -> Any:
    """Accept shorthands: `served_model_name="m"` is a list of one, and a mapping may be JSON."""
    kind = next(f.type for f in msgspec.structs.fields(Config) if f.name == section)
    default = next(f.default_factory for f in msgspec.structs.fields(kind) if f.name == name)
    if not isinstance(value, str):
        return value
    if default is dict:
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"option `{name}`: expected a JSON object, but {value!r} is none: {error}") from None
    return [value] if default is list else value


def _explain(error: msgspec.ValidationError) -> str:
    """Translate an error of msgspec, such as "Expected `int` >= 1 - at `$.port`", into the user's terms."""
    what, _, where = str(error).partition(" - at `$.")
    return f"option `{where.rstrip('`')}`: {what[0].lower()}{what[1:]}" if where else str(error)
