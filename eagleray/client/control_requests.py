"""Control requests made from the arguments of users, over HTTP and in Python, with the names and defaults of vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

from eagleray.config.restart_options import requested_changes
from eagleray.errors import InvalidRequest
from eagleray.messages.control import (
    InitWeightTransfer,
    Pause,
    PauseMode,
    Sleep,
    SleepTag,
    StartWeightUpdate,
    UpdateWeights,
    WakeUp,
)
from eagleray.messages.plain import pack
from eagleray.messages.scaling import RestartEngines, Scale

MAX_COUNT = 1024
"""Largest number of engines or API servers to scale to. A slip of the finger must not fill a host with processes."""

TAGS: tuple[SleepTag, ...] = get_args(SleepTag)
TAGS_OF_LEVEL: dict[int, tuple[SleepTag, ...]] = {
    0: ("scheduling",),
    1: ("weights", "kv_cache"),
    2: ("weights", "kv_cache"),
}


def pause_request(mode: str, clear_cache: bool) -> Pause:
    return Pause(mode=_mode(mode), clear_cache=clear_cache)


def sleep_request(level: int, mode: str, tags: Sequence[str] | None = None) -> Sleep:
    """`tags`: parts of the level that are put to sleep; None: all."""
    if isinstance(level, bool) or level not in TAGS_OF_LEVEL:
        raise InvalidRequest(
            f"`level` must be 0 (no steps run), 1 (memory of the cache returned, weights kept) or 2 (weights dropped "
            f"too), but it is {level!r}",
            param="level",
        )
    return Sleep(
        tags=TAGS_OF_LEVEL[level] if tags is None else _tags(tags, TAGS_OF_LEVEL[level]), level=level, mode=_mode(mode)
    )


def wake_up_request(tags: Sequence[str] | None) -> WakeUp:
    return WakeUp() if tags is None else WakeUp(tags=_tags(tags, TAGS))


def init_transfer_request(request: Any) -> InitWeightTransfer:
    """`request`: a dict with `init_info`, or an object that has it as an attribute, as in vLLM."""
    return InitWeightTransfer(init_info=_field(request, "init_info", "init_weight_transfer_engine"))


def start_request(is_checkpoint_format: bool) -> StartWeightUpdate:
    if not is_checkpoint_format:
        raise InvalidRequest(
            "`is_checkpoint_format` must be true: tensors have the checkpoint's names, and each worker takes its part",
            param="is_checkpoint_format",
        )
    return StartWeightUpdate()


def update_request(request: Any) -> UpdateWeights:
    """`request`: a dict, or an object with such attributes: `update_info`, a dict or a list of one for each worker; or
    `weight_dir`, the directory of a checkpoint, with an optional `weight_version`."""
    given = dict(request) if isinstance(request, Mapping) else vars(request)
    info, directory, version = (given.get(name) for name in ("update_info", "weight_dir", "weight_version"))
    if (info is None) == (directory is None):
        raise InvalidRequest("give either `update_info` or `weight_dir`", param="update_info")
    if directory is not None:
        return UpdateWeights(weight_dir=str(directory), weight_version=version)
    if version is not None:
        raise InvalidRequest(
            "`weight_version` is for `weight_dir`; with `update_info`, give it to finish_weight_update",
            param="weight_version",
        )
    items = info if isinstance(info, list) else [info]
    if not all(isinstance(item, Mapping) for item in items):
        raise InvalidRequest(
            "an update needs `update_info`, an object or a list of one for each worker, or `weight_dir`",
            param="update_info",
        )
    try:
        return UpdateWeights(update_info=pack(info, name="update_info"))
    except TypeError as error:
        raise InvalidRequest(str(error), param="update_info") from None


def _mode(mode: str) -> PauseMode:
    if mode not in get_args(PauseMode):
        known = ", ".join(get_args(PauseMode))
        raise InvalidRequest(f"`mode` must be one of {known}, but it is {mode!r}", param="mode")
    return mode  # type: ignore[return-value]


def _tags(tags: Sequence[str], known: tuple[SleepTag, ...]) -> tuple[SleepTag, ...]:
    given = (tags,) if isinstance(tags, str) else tuple(tags)
    if unknown := [tag for tag in given if tag not in known]:
        raise InvalidRequest(f"`tags` may have {', '.join(known)}, but one is {unknown[0]!r}", param="tags")
    return tuple(tag for tag in known if tag in given)


def _field(request: Any, name: str, call: str) -> dict[str, Any]:
    value = request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"`{call}` needs `{name}`, an object with the fields of the backend", param=name)
    return dict(value)


def scale_request(
    data_parallel_size: int | None = None,
    remove_ranks: Sequence[int] = (),
    api_server_count: int | None = None,
    drain_timeout: float = 0.0,
) -> Scale:
    """`drain_timeout`: seconds for which an engine that goes may finish its requests."""
    if data_parallel_size is None and not remove_ranks and api_server_count is None:
        raise InvalidRequest("name a number to scale to: `data_parallel_size`, `remove_ranks` or `api_server_count`")
    return Scale(
        num_engines=None if data_parallel_size is None else _count("data_parallel_size", data_parallel_size),
        remove_ranks=_ranks("remove_ranks", remove_ranks),
        num_api_servers=None if api_server_count is None else _count("api_server_count", api_server_count),
        drain_timeout=_drain_seconds(drain_timeout),
    )


def restart_request(
    ranks: Sequence[int] = (),
    drain_timeout: float = 0.0,
    options: Mapping[str, Any] | None = None,
) -> RestartEngines:
    """`ranks`: ranks of the engines; empty for all. `drain_timeout`: see `scale_request`. `options`: those that engines
    have from now on."""
    changes = requested_changes(options or {})
    return RestartEngines(ranks=_ranks("ranks", ranks), drain_timeout=_drain_seconds(drain_timeout), options=changes)


@contextmanager
def naming_scaling_fields(data_parallel_size: str = "data_parallel_size") -> Iterator[None]:
    """Within the block, have errors about a field of `Scale` name the user's field: for the number of engines
    `data_parallel_size`, which has other names in other APIs."""
    names = {"num_engines": data_parallel_size, "num_api_servers": "api_server_count"}
    try:
        yield
    except InvalidRequest as error:
        error.param = names.get(error.param or "", error.param)
        raise


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise InvalidRequest(
            f"`{name}` must be a whole number between 1 and {MAX_COUNT}, but it is {value!r}", param=name
        )
    return value


def _ranks(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks in order, each once, so that equal requests are equal."""
    if isinstance(values, str) or any(isinstance(value, bool) or not isinstance(value, int) for value in values):
        raise InvalidRequest(f"`{name}` must be a list of ranks, such as [1, 2], but it is {values!r}", param=name)
    return tuple(sorted(set(values)))


def _drain_seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidRequest(
            f"`drain_timeout` must be a number of seconds that is not negative, but it is {value!r}",
            param="drain_timeout",
        )
    return float(value)
