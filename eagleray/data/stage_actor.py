"""A stage in an actor of Ray Data: the engines, and the rows that they compute.

Ray Data calls one object from several threads, with a block each. The rows of all these blocks share the engines: a row
is sent as soon as another one has finished, whichever block it belongs to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from eagleray.config.log_config import set_up_log
from eagleray.config.sections import Config
from eagleray.data.columns import Row
from eagleray.data.options import OnError
from eagleray.data.outputs import RowOutput, append_outputs
from eagleray.data.stages import Stage, check_columns
from eagleray.errors import EagleRayError, EngineFailed
from eagleray.instance import InstanceThread
from eagleray.preflight import checked_config
from eagleray.row_errors import ROW_ERRORS

MAX_SHOWN_CHARS = 80


class StageActor:
    """Computes blocks. `max_in_flight`: the most rows that are with the engines at a time.

    The constructor returns when the engines serve. They stop when the object is collected, or the process exits.
    """

    def __init__(
        self, config: Config, stage: Stage, *, errors: OnError, output_prefix: str, max_in_flight: int
    ) -> None:
        set_up_log("llm", config)
        config = checked_config(config)
        self._stage = stage
        self._errors = errors
        self._output_prefix = output_prefix
        self._thread = InstanceThread(config)
        self._instance = self._thread.instance
        self._compute = stage.open(self._instance)
        self._places = asyncio.Semaphore(max_in_flight)
        """Used in the loop of the instance."""

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return the block with the columns of the stage. Raises the failure of the instance and, under `errors`
        raise, the first error of a row."""
        check_columns(self._stage, table.column_names)
        rows = table.select(list(self._stage.inputs.values())).to_pylist()
        info = self._instance.client.engine_info
        return append_outputs(
            table,
            self._thread.run(self._compute_all(rows)),
            self._stage.outputs,
            prefix=self._output_prefix,
            has_errors=self._errors == "return",
            routing=None if info is None else info.routing,
        )

    # In the loop of the instance.

    async def _compute_all(self, rows: Sequence[Row]) -> list[RowOutput]:
        tasks = [asyncio.create_task(self._compute_one(index, row)) for index, row in enumerate(rows)]
        try:
            return await self._instance.guard(_gather(tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _compute_one(self, index: int, row: Row) -> RowOutput:
        async with self._places:
            try:
                return await self._compute(row)
            except (*ROW_ERRORS, EngineFailed) as error:
                if isinstance(error, EngineFailed) and self._instance.supervisor.failed.done():
                    raise  # every row would fail
                if self._errors == "raise":
                    raise _with_row(error, index, row) from None
                return error


async def _gather(tasks: Sequence[asyncio.Task[RowOutput]]) -> list[RowOutput]:
    return await asyncio.gather(*tasks)


def _with_row(error: EagleRayError, index: int, row: Row) -> EagleRayError:
    """Return the error with the row in its message."""
    shown = ", ".join(f"{name} {_show(value)}" for name, value in row.items())
    error.args = (f"row {index} of a block ({shown}): {error}", *error.args[1:])
    return error


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
