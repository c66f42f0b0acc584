"""Amounts of resources as options of Ray's actors, and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagleray.cluster.bundles import Resources

ACTOR_FIELDS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
"""Options of an actor that are amounts of a resource; the option `resources` has the others by name."""


def as_actor_options(resources: Resources) -> dict[str, Any]:
    """Return the options of an actor that ask for these resources."""
    options: dict[str, Any] = {field: resources[name] for field, name in ACTOR_FIELDS.items() if name in resources}
    others = {name: amount for name, amount in resources.items() if name not in ACTOR_FIELDS.values()}
    return options | ({"resources": others} if others else {})


def asked_resources(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that options of an actor ask for, also those of which they ask for nothing."""
    amounts = {name: float(options[field]) for field, name in ACTOR_FIELDS.items() if options.get(field) is not None}
    return amounts | {name: float(amount) for name, amount in (options.get("resources") or {}).items()}
