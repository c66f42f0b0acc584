"""Options that all stages take beside those of the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from eagleray.config.keywords import LLMKeywords
from eagleray.errors import ConfigError

OnError = Literal["return", "raise"]

ROWS_PER_BLOCK = 64

ONE_CLUSTER = "the actors of a stage use the cluster of the pipeline: connect to it by `ray.init`"
OWN_GROUPS = "each actor has a placement group of its own: leave it out, and see `actor_options`"
ALL_RANKS = "each actor has all of its engines: set `data_parallel_size`, and `num_actors` for more"
AUTOSCALE = "a stage scales its actors, each with a fixed number of engines: set `num_actors` to two numbers"

REFUSED = {
    "ray_address": ONE_CLUSTER,
    "placement_group": OWN_GROUPS,
    "bundle_indices": OWN_GROUPS,
    "data_parallel_rank": ALL_RANKS,
    "data_parallel_start_rank": ALL_RANKS,
    "data_parallel_size_local": ALL_RANKS,
    "autoscale": AUTOSCALE,
    "autoscale_target_queue": AUTOSCALE,
    "autoscale_target_ttft": AUTOSCALE,
    "autoscale_down_delay": AUTOSCALE,
    "instance_name": "several actors cannot have one name: leave it out",
}
"""Options of `LLM` that a stage refuses, with the reason."""

OF_THE_STAGE = frozenset(
    {
        "fn",
        "fn_args",
        "fn_kwargs",
        "fn_constructor_args",
        "fn_constructor_kwargs",
        "batch_size",
        "batch_format",
        "zero_copy_batch",
        "compute",
        "concurrency",
        "udf_modifying_row_count",
    }
)
"""Keywords of `map_batches` that `actor_options` may not have."""


class StageKeywords(LLMKeywords, total=False):
    """Options of a stage, and those of `LLM`.

    `errors`: with return, which is the default, a row that is wrong or fails alone has nulls in the new columns, and
    its code and message in the column `error`; with raise the pipeline ends with an error that shows the row.

    `output_prefix`: text before the names of the new columns; empty by default. `num_actors`: number of actors, each
    with engines of its own, or the least and the greatest number; 1 by default. `rows_per_block`: number of rows of a
    block, all of which are computed again if their actor is killed; 64 by default. `actor_options`: keywords of
    `map_batches`, such as `num_gpus`, `memory`, `label_selector` or `runtime_env`; by default an actor reserves what
    its workers need.
    """

    errors: OnError
    output_prefix: str
    num_actors: int | tuple[int, int]
    rows_per_block: int
    actor_options: Mapping[str, Any]


@dataclass(frozen=True)
class StageOptions:
    """The options of a stage, checked. Raises `ConfigError`."""

    errors: OnError = "return"
    output_prefix: str = ""
    num_actors: Any = 1
    """Least and greatest number of actors, once checked."""
    rows_per_block: int = ROWS_PER_BLOCK
    actor_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.errors not in ("return", "raise"):
            raise ConfigError(f"`errors` must be return or raise, but it is {self.errors!r}")
        if not (isinstance(self.rows_per_block, int) and self.rows_per_block >= 1):
            raise ConfigError(f"`rows_per_block` must be at least 1, but it is {self.rows_per_block!r}")
        if not isinstance(self.output_prefix, str):
            raise ConfigError(f"`output_prefix` must be a text, but it is {self.output_prefix!r}")
        if not isinstance(self.actor_options, Mapping):
            raise ConfigError(
                "`actor_options` must be a mapping of keywords of `map_batches` to values, but it is "
                f"{self.actor_options!r}"
            )
        if refused := self.actor_options.keys() & OF_THE_STAGE:
            raise ConfigError(
                f"`actor_options` must be options of an actor, such as `num_gpus`, but `{min(refused)}` is set by the "
                "stage itself: leave it out, and see `num_actors` and `rows_per_block`"
            )
        numbers = (self.num_actors, self.num_actors) if isinstance(self.num_actors, int) else self.num_actors
        match numbers:
            case (int(least), int(greatest)) if 1 <= least <= greatest:
                object.__setattr__(self, "num_actors", (least, greatest))
            case _:
                raise ConfigError(
                    "`num_actors` must be a number of actors, or the least and the greatest number, but it is "
                    f"{self.num_actors!r}"
                )


def split_options(given: StageKeywords) -> tuple[StageOptions, LLMKeywords]:
    """Return the options of the stage, and those of the engines. Raises `ConfigError`."""
    for name, reason in REFUSED.items():
        if given.get(name) is not None:
            raise ConfigError(f"option `{name}`: {reason}")
    names = {one.name for one in fields(StageOptions)}
    own: dict[str, Any] = {name: value for name, value in given.items() if name in names}
    others: Any = {name: value for name, value in given.items() if name not in names}
    return StageOptions(**own), others
