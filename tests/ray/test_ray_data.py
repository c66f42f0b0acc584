"""Pipelines of Ray Data with a stage of a model, whose processes are killed."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import ray.data
import ray_cluster
from checkpoints import make_checkpoint
from ray_data import engines_of, stage_actors

import eagleray.data
from eagleray.errors import ClusterError, ConfigError, InvalidRequest

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]

OPTIONS: dict[str, Any] = {"num_threads": 1, "num_kv_blocks": 128, "max_num_seqs": 8, "device": "cpu"}
PARAMS = {"max_tokens": 4, "ignore_eos": True}
NUM_ROWS = 40
ROWS_PER_BLOCK = 10
LONG = 200
"""Number of tokens of the rows behind the first block, which are still running when a process is killed."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("data"), "qwen3"))


@pytest.fixture(autouse=True)
def end_of_ray_data(cluster: str) -> Iterator[None]:
    """End the actors with which Ray Data itself keeps statistics: they would outlive the test."""
    yield
    ray_cluster.clear()


def dataset(num_rows: int = NUM_ROWS) -> ray.data.Dataset:
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"id": row, "prompt": [5, 6, row], "params": row_params(row)} for row in range(num_rows)]
    return ray.data.from_items(rows, override_num_blocks=2)


def row_params(row: int) -> dict[str, Any]:
    """Return the parameters of a row. Every other one has a constraint, which Arrow shows as a null in the others."""
    params: dict[str, Any] = {"max_tokens": num_tokens(row)}
    if row % 2:
        params["structured_outputs"] = {"regex": f"[a-c]+ {row % 10}"}
    return params


def num_tokens(row: int) -> int:
    return LONG if row >= ROWS_PER_BLOCK else PARAMS["max_tokens"]


def generate(ds: ray.data.Dataset, *args: Any, **options: Any) -> ray.data.Dataset:
    return eagleray.data.generate(
        ds, *args, **{**OPTIONS, "sampling_params": PARAMS, "rows_per_block": ROWS_PER_BLOCK, **options}
    )


VICTIMS = {"engine": lambda: engines_of(stage_actors()[0])[0], "actor": lambda: stage_actors()[0]}


@pytest.mark.parametrize(
    "victims",
    [pytest.param(("actor",), marks=pytest.mark.grid), pytest.param(("engine", "actor"), marks=pytest.mark.slow)],
)
def test_generate_rows_come_once_though_processes_are_killed(
    cluster: str, checkpoint: str, victims: tuple[str, ...]
) -> None:
    """The first one is killed while rows of the second block run, the other when that block has come."""
    seen: Counter[int] = Counter()
    kills = [VICTIMS[name] for name in victims]
    ds = generate(dataset(), checkpoint, sampling_params_column="params")
    for batch in ds.iter_batches(batch_size=ROWS_PER_BLOCK, prefetch_batches=0):
        seen.update(rows := batch["id"].tolist())
        assert batch["num_generated_tokens"].tolist() == [num_tokens(row) for row in rows]
        texts = zip(rows, batch["generated_text"], strict=True)
        assert all(re.fullmatch(f"[a-c]*( {row % 10}?)?", text) for row, text in texts if row % 2)
        if kills:
            os.kill(kills.pop(0)(), signal.SIGKILL)
    assert not kills
    assert seen == Counter(range(NUM_ROWS))


def test_generate_actors_that_no_node_can_hold_are_refused(cluster: str) -> None:
    with pytest.raises(ClusterError, match=r"needs an actor with \{CPU: 1, unobtainium: 1\}, and"):
        generate(dataset(1), actor_options={"resources": {"unobtainium": 1}})
    with pytest.raises(ClusterError, match=r"needs 30 actors with \{CPU: 1\} each, .*; set `num_actors` to 7"):
        generate(dataset(1), num_actors=30)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"max_tokens": 3}, ConfigError, "max_tokens"),
        ({"outputs": ["text"]}, ConfigError, "`outputs` has no column 'text': take some of generated_text, "),
        ({"outputs": "generated_text"}, ConfigError, "`outputs` must be a list"),
        ({"chat_template_kwargs": {"tail": "!"}}, ConfigError, "`chat_template_kwargs` is for conversations"),
        ({"sampling_params": {"max_token": 3}}, InvalidRequest, "no field 'max_token'"),
        ({"prompt_column": "question"}, ConfigError, "set `prompt_column` to one of .*, which are id, prompt, params"),
        ({"sampling_params": {"n": 2}}, InvalidRequest, "a row has one completion"),
    ],
)
def test_generate_wrong_arguments_are_named_at_once(
    cluster: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        generate(dataset(1), **options)


def test_generate_column_of_several_types_is_refused_at_once(cluster: str) -> None:
    ds = ray.data.from_items([{"prompt": 5}, {"prompt": "text"}], override_num_blocks=2)
    with pytest.raises(ConfigError, match=r"several types \(.* prompt .* int64 vs string\): convert it to one type"):
        generate(ds)


def test_embed_pooling_params_of_another_type_are_named_at_once(cluster: str) -> None:
    with pytest.raises(InvalidRequest, match="`pooling_params` must be a `PoolingParams`, but got dict"):
        eagleray.data.embed(dataset(1), pooling_params={"dimensions": 3})  # type: ignore[arg-type]
