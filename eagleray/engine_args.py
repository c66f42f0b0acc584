"""Options of an instance as an object, which programs pass around before they start the instance."""

from __future__ import annotations

from typing import Any

import msgspec

from eagleray.config.build import build_config, unknown_option
from eagleray.config.resolve import checkpoint_dir
from eagleray.config.sections import Config
from eagleray.config.serving import ServingConfig
from eagleray.errors import ConfigError


class EngineArgs:
    """The options of `eagleray serve` by their names, except those of the HTTP server, as attributes that may be
    assigned. Options that are not given have their defaults.

    Raises `ConfigError` for an option that does not exist; values are checked by `config`.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        defaults = _defaults()
        for name in options:
            if name not in defaults:
                if name in ServingConfig.__struct_fields__:
                    raise ConfigError(f"option `{name}` is for the HTTP server: programs do not take it")
                raise unknown_option(name)
        self.__dict__.update(defaults | options | {"model": model})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no option `{name}`")

    def config(self) -> Config:
        """Check the values and build the configuration. Raises `ConfigError` or `CheckpointError`."""
        defaults = _defaults()
        options = {name: value for name, value in vars(self).items() if value != defaults.get(name)}
        options["placement_group"] = _placement_group_id(options.get("placement_group"))
        config = build_config(**options)
        checkpoint_dir(config.model)
        return config


class AsyncEngineArgs(EngineArgs):
    """The same options, under the name that programs written for `AsyncLLM` of vLLM use."""


def _defaults() -> dict[str, Any]:
    """Return the options and their defaults."""
    sections = [field.type for field in msgspec.structs.fields(Config) if field.type is not ServingConfig]
    return {name: value for section in sections for name, value in msgspec.structs.asdict(section()).items()}


def _placement_group_id(given: Any) -> Any:
    """Return the id of a placement group if `given` is Ray's own object, else `given`.

    The object is recognized by its attributes, because programs without Ray must not import it.
    """
    return given.id.hex() if hasattr(given, "bundle_specs") else given
