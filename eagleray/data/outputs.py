"""Columns that the stages add: their Arrow types, and how they are made of outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from ray.data import DataContext
from ray.data.extensions import ArrowVariableShapedTensorArray

from eagleray.client.outputs import RequestOutput
from eagleray.errors import ConfigError, EagleRayError
from eagleray.messages.membership import RoutingInfo
from eagleray.server.error_responses import error_response

ROUTED_EXPERTS = "routed_experts"
ERROR = "error"

TOKEN_IDS = pa.list_(pa.int64())
LOGPROB = pa.struct({"token_id": pa.int64(), "logprob": pa.float32(), "rank": pa.int64(), "decoded_token": pa.string()})
TOOL_CALL = pa.struct({"id": pa.string(), "name": pa.string(), "arguments": pa.string()})
ERROR_TYPE = pa.struct({"code": pa.string(), "message": pa.string()})


class OutputColumn(NamedTuple):
    """A column of a stage that generates."""

    type: Any
    """Arrow type; None for a tensor."""
    value: Callable[[RequestOutput], Any]


GENERATION: dict[str, OutputColumn] = {
    "generated_text": OutputColumn(pa.string(), lambda output: output.outputs[0].text),
    "generated_token_ids": OutputColumn(TOKEN_IDS, lambda output: output.outputs[0].token_ids),
    "finish_reason": OutputColumn(pa.string(), lambda output: output.outputs[0].finish_reason),
    "num_prompt_tokens": OutputColumn(pa.int64(), lambda output: len(output.prompt_token_ids)),
    "num_generated_tokens": OutputColumn(pa.int64(), lambda output: len(output.outputs[0].token_ids)),
    "prompt_token_ids": OutputColumn(TOKEN_IDS, lambda output: output.prompt_token_ids),
    "cumulative_logprob": OutputColumn(pa.float64(), lambda output: output.outputs[0].cumulative_logprob),
    "logprobs": OutputColumn(pa.list_(pa.list_(LOGPROB)), lambda output: _logprobs(output)),
    "content": OutputColumn(pa.string(), lambda output: output.outputs[0].content),
    "reasoning": OutputColumn(pa.string(), lambda output: output.outputs[0].reasoning),
    "tool_calls": OutputColumn(pa.list_(TOOL_CALL), lambda output: list(map(asdict, output.outputs[0].tool_calls))),
    ROUTED_EXPERTS: OutputColumn(None, lambda output: output.outputs[0].routed_experts),
}
"""Columns that `generate` can add."""

ANSWER_PARTS = ("content", "reasoning", "tool_calls")
"""Columns that `generate` can add to conversations alone."""

POOLING: dict[str, Any] = {"embedding": pa.list_(pa.float32()), "probs": pa.list_(pa.float32()), "score": pa.float32()}
"""Arrow types of the columns that `embed`, `classify` and `score` add."""

RowOutput = dict[str, Any] | EagleRayError
"""Values by column, or the error of a row that has none."""


def append_outputs(
    table: pa.Table,
    rows: Sequence[RowOutput],
    names: Sequence[str],
    *,
    prefix: str,
    has_errors: bool,
    routing: RoutingInfo | None,
) -> pa.Table:
    """Return the table with these columns, which are null in rows that failed, and the column `error` if `has_errors`.

    Raises `ConfigError` if the table has a column of such a name already, or is too large for a block.
    """
    columns = {name: _column(name, rows, routing) for name in names}
    if has_errors:
        columns[ERROR] = pa.array([_error(row) if isinstance(row, EagleRayError) else None for row in rows], ERROR_TYPE)
    for name, column in columns.items():
        if prefix + name in table.column_names:
            raise ConfigError(
                f"the dataset has a column {prefix + name!r} already: drop it, or set `output_prefix` of the stage"
            )
        table = table.append_column(prefix + name, column)
    _check_is_one_block(table)
    return table


def _column(name: str, rows: Sequence[RowOutput], routing: RoutingInfo | None) -> pa.Array:
    values = [None if isinstance(row, EagleRayError) else row[name] for row in rows]
    if name != ROUTED_EXPERTS:
        return pa.array(values, GENERATION[name].type if name in GENERATION else POOLING[name])
    assert routing is not None, "the stage has enabled routed experts"
    tensors = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # tensors have no nulls
        tensors[index] = routing.rows(b"") if value is None else value
    return ArrowVariableShapedTensorArray.from_numpy(tensors)


def _logprobs(output: RequestOutput) -> list[list[Mapping[str, Any]]] | None:
    positions = output.outputs[0].logprobs
    if positions is None:
        return None
    return [
        [
            {
                "token_id": token_id,
                "logprob": entry.logprob,
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in position.items()
        ]
        for position in positions
    ]


def _error(error: EagleRayError) -> dict[str, str]:
    """Return the code and the message with which a server would answer."""
    body = error_response(error, "of a row").reply.error
    return {"code": body.code or body.type, "message": body.message}


def _check_is_one_block(table: pa.Table) -> None:
    """Refuse a table that Ray Data would divide into several blocks. It retries the whole task of an actor that was
    killed, and drops as many blocks of the second attempt as it has already passed on of the first. Sampled texts
    differ in length from attempt to attempt, and so would the rows of these blocks."""
    limit = DataContext.get_current().target_max_block_size
    if limit is not None and table.nbytes > limit:
        most = max(1, int(table.num_rows * limit / table.nbytes))
        raise ConfigError(
            f"{table.num_rows} rows take {table.nbytes:,} bytes with their outputs, but Ray Data keeps at most "
            f"{limit:,} in a block: set `rows_per_block` to {most} or less, or raise `target_max_block_size` in "
            "`ray.data.DataContext`"
        )
