"""Amounts of resources as options of Ray's actors, and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagleray.cluster.bundles import Resources
from eagleray.errors import ConfigError

ACTOR_FIELDS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
"""Options of an actor that are amounts of a resource; the option `resources` has the others by name."""


def as_actor_options(resources: Resources) -> dict[str, Any]:
    """Return the options of an actor that ask for these resources."""
    options: dict[str, Any] = {field: resources[name] for field, name in ACTOR_FIELDS.items() if name in resources}
    others = {name: amount for name, amount in resources.items() if name not in ACTOR_FIELDS.values()}
    return options | ({"resources": others} if others else {})


def asked_resources(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that options of an actor ask for, amounts of 0 included.

    Raises `ConfigError` for an amount that is not a number.
    """
    amounts = {
        name: _amount(field, options[field]) for field, name in ACTOR_FIELDS.items() if options.get(field) is not None
    }
    others = options.get("resources") or {}
    if not isinstance(others, Mapping):
        raise ConfigError(f"`resources` of an actor must be a mapping of names to numbers, but it is {others!r}")
    return amounts | {name: _amount(name, amount) for name, amount in others.items()}


def _amount(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"`{name}` of an actor must be a number, but it is {value!r}") from None
