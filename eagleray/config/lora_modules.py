"""The adapters that the option `lora_modules` names."""

from __future__ import annotations

from eagleray.config.sections import Config
from eagleray.errors import ConfigError


def lora_modules(config: Config) -> dict[str, str]:
    """Return the directories of the adapters by name."""
    modules: dict[str, str] = {}
    for module in config.lora.lora_modules:
        name, _, path = module.partition("=")
        if not name or not path:
            raise ConfigError(f"option `lora_modules`: expected NAME=DIRECTORY, not {module!r}")
        if name in modules:
            raise ConfigError(f"option `lora_modules`: the name {name!r} is given twice")
        modules[name] = path
    return modules


def check_lora(config: Config) -> None:
    """Raise `ConfigError` if the options for adapters do not fit together."""
    modules, lora = lora_modules(config), config.lora
    if modules and not lora.enable_lora:
        raise ConfigError("option `lora_modules` needs `enable_lora`")
    if len(modules) > lora.max_loras:
        raise ConfigError(
            f"option `lora_modules`: {len(modules)} adapters are more than `max_loras` allows: set it to {len(modules)}"
        )
