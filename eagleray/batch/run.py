"""Answers the rows of a batch file by the HTTP application, inside this process.

A bounded number of rows runs at a time, and each answer is written as soon as it has come. A batch
that is started again with the same files answers the rows that have no line in the output yet.
"""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import msgspec
from starlette.types import ASGIApp

from eagleray.batch.output_file import OutputFile
from eagleray.batch.rows import DUPLICATE, BatchRow, RowError, RowResponse, RowResult, custom_id_of, parse_row, row_id
from eagleray.errors import InvalidRequest
from eagleray.progress import Progress
from eagleray.server.app_calls import AppAnswer, post

RETRIED_STATUSES = {429, 503}
MAX_ATTEMPTS = 5
RETRY_SECONDS = 1.0
"""Least pause before another attempt; it doubles with each."""


class DuplicateRow(InvalidRequest):
    """The row has the `custom_id` of an earlier one."""


@dataclass
class Batch:
    """A batch in progress."""

    app: ASGIApp
    output: OutputFile
    max_row_bytes: int
    progress: Progress

    async def run(self, rows: IO[bytes], concurrency: int) -> None:
        """Answer the rows that have no answer yet. Raises the first error of writing, after aborting the other rows."""
        try:
            await self._send_all(rows, asyncio.Semaphore(concurrency))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _send_all(self, rows: IO[bytes], places: asyncio.Semaphore) -> None:
        async with asyncio.TaskGroup() as group:
            for name, row in self._unanswered(rows):
                if isinstance(row, RowResult):
                    self._write(row)
                    continue
                await places.acquire()
                task = group.create_task(self._answer(name, row))
                task.add_done_callback(lambda _: places.release())

    def _unanswered(self, rows: IO[bytes]) -> Iterator[tuple[str, BatchRow | RowResult]]:
        """Yield the ids of rows, each with the row or, if it is wrong, with its answer."""
        seen: dict[str, int] = {}
        for number, line in enumerate(_lines(rows, self.max_row_bytes), start=1):
            name = row_id(number)
            if number == 1:
                line = line.removeprefix(BOM_UTF8)  # some editors write it
            if not line.strip():
                continue
            row: BatchRow | RowResult
            try:
                row = parse_row(line, max_bytes=self.max_row_bytes)
                is_answered = row.custom_id in self.output.custom_ids
                if (first := seen.setdefault(row.custom_id, number)) != number:
                    raise DuplicateRow(f"`custom_id` {row.custom_id!r} is that of line {first} too")
            except InvalidRequest as error:
                code = DUPLICATE if isinstance(error, DuplicateRow) else "invalid_row"
                row = RowResult(id=name, custom_id=custom_id_of(line), response=None, error=RowError(code, str(error)))
                is_answered = name in self.output.row_ids
            if is_answered:
                self.progress.skip()
            else:
                yield name, row

    async def _answer(self, name: str, row: BatchRow) -> None:
        answer = await self._post(name, row)
        error = None if answer.status == 200 else _error_of(answer)
        response = RowResponse(answer.status, name, msgspec.Raw(answer.body))
        self._count_tokens(answer.body)
        self._write(RowResult(id=name, custom_id=row.custom_id, response=response, error=error))

    async def _post(self, name: str, row: BatchRow) -> AppAnswer:
        """Post the row's body, again if the engines have no room or restart."""
        body = msgspec.json.encode(row.body)
        for attempt in range(1, MAX_ATTEMPTS):
            answer = await post(self.app, row.url, body, request_id=name)
            if answer.status not in RETRIED_STATUSES:
                return answer
            await asyncio.sleep(max(answer.retry_after, RETRY_SECONDS * 2 ** (attempt - 1)))
        return await post(self.app, row.url, body, request_id=name)

    def _count_tokens(self, body: bytes) -> None:
        try:
            usage = _USAGE_DECODER.decode(body).usage
        except msgspec.MsgspecError:  # answers of some routes have none
            return
        if usage is not None:
            self.progress.add_tokens(
                usage.prompt_tokens + usage.input_tokens, usage.completion_tokens + usage.output_tokens
            )

    def _write(self, result: RowResult) -> None:
        self.output.append(result)
        self.progress.finish(failed=result.error is not None)


class _UsageFields(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _UsageAnswer(msgspec.Struct):
    usage: _UsageFields | None = None


class _ErrorFields(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorFields


_USAGE_DECODER = msgspec.json.Decoder(_UsageAnswer)


def _error_of(answer: AppAnswer) -> RowError:
    try:
        fields = msgspec.json.decode(answer.body, type=_ErrorAnswer).error
    except msgspec.MsgspecError:
        return RowError(None, f"status {answer.status}")
    return RowError(fields.code, fields.message)


def _lines(rows: IO[bytes], limit: int) -> Iterator[bytes]:
    """Yield the lines. Of one that is longer than `limit`, only the first bytes are kept, one more than the limit."""
    while line := rows.readline(limit + 1):
        last = line
        while len(last) > limit and not last.endswith(b"\n"):
            last = rows.readline(limit + 1)
        yield line
