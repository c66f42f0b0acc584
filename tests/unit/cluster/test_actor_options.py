"""Amounts of resources as options of Ray's actors."""

from __future__ import annotations

from typing import Any

import pytest

from eagleray.cluster.actor_options import as_actor_options, asked_resources
from eagleray.errors import ConfigError


def test_as_actor_options_and_back() -> None:
    resources = {"CPU": 1.0, "GPU": 2.0, "acc": 1.0}
    options = as_actor_options(resources)
    assert options == {"num_cpus": 1.0, "num_gpus": 2.0, "resources": {"acc": 1.0}}
    assert asked_resources(options) == resources


def test_asked_resources_keeps_nothing_asked_for() -> None:
    assert asked_resources({"num_cpus": 0, "num_gpus": None, "runtime_env": {}}) == {"CPU": 0.0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_cpus": "two"}, "`num_cpus` of an actor must be a number, but it is 'two'"),
        ({"resources": {"acc": None}}, "`acc` of an actor must be a number, but it is None"),
        ({"resources": ["acc"]}, "`resources` of an actor must be a mapping"),
    ],
)
def test_asked_resources_that_are_no_numbers_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        asked_resources(options)
