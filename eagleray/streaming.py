"""Outputs of a request that runs in the event loop of an instance, read from another event loop.

The reader asks for one output at a time; tokens that come in between are merged in the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from functools import partial

from eagleray.client.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput
from eagleray.client.request import RequestStream
from eagleray.errors import Unavailable
from eagleray.instance import InstanceThread
from eagleray.messages.sampling import RequestOutputKind
from eagleray.row_errors import ROW_ERRORS, RequestError, name_row

OutputOrError = RequestOutput | RequestError

CHECK_SECONDS = 1.0
"""Interval at which a waiting reader checks whether the instance still runs."""


class OutputReader:
    """Reads `stream`, whose request runs in the loop of `thread`, in the loop in which the reader is made."""

    def __init__(self, stream: RequestStream, kind: RequestOutputKind, thread: InstanceThread) -> None:
        self._stream = stream
        self._kind = kind
        self._thread = thread
        self._own_loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[RequestOutput] | None = None
        """Future of the reader that waits for the next output. Used in the instance's loop."""

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs until the last one, which is `finished`. The request is aborted if the iteration ends early.

        Raises as the iteration of a `RequestStream`, and `Unavailable` if the instance is closed meanwhile.
        """
        try:
            self._thread.call_soon(self._stream.set_on_output, self._answer)
            while True:
                output = await self._next()
                yield output
                if output.finished:
                    return
        finally:
            self._thread.call_soon(self._stream.abort)

    async def _next(self) -> RequestOutput:
        future: asyncio.Future[RequestOutput] = self._own_loop.create_future()
        self._thread.call_soon(self._ask, future)
        while not future.done():
            await asyncio.wait([future], timeout=CHECK_SECONDS)
            if not (future.done() or self._thread.is_alive):
                raise Unavailable("the model was closed while the request ran")
        return future.result()

    # In the instance's loop.

    def _ask(self, future: asyncio.Future[RequestOutput]) -> None:
        self._waiting = future
        self._answer()

    def _answer(self) -> None:
        """Pass the next output to the reader, if the reader waits and there is an output."""
        if self._waiting is None:
            return
        try:
            output = pop_output(self._stream, self._kind)
        except Exception as error:  # the failure of the request, which the reader raises
            self._settle(error)
        else:
            if output is not None:
                self._settle(output)

    def _settle(self, outcome: RequestOutput | Exception) -> None:
        future, self._waiting = self._waiting, None
        assert future is not None
        with suppress(RuntimeError):  # another thread may close the reader's loop at any moment
            self._own_loop.call_soon_threadsafe(_resolve, future, outcome)


class OutputCollector:
    """Reads several streams in the instance's loop, in the order in which their outputs come."""

    def __init__(self, *, returns_errors: bool = False) -> None:
        self._returns_errors = returns_errors
        self._num_added = 0
        self._streams: dict[int, tuple[RequestStream, RequestOutputKind]] = {}
        self._failed: list[RequestError] = []
        self._ready: dict[int, None] = {}
        """Indices of the streams that may have an output, in order."""
        self._has_ready = asyncio.Event()

    @property
    def num_streams(self) -> int:
        """Number of streams that have not finished."""
        return len(self._streams)

    def add(self, streams: Mapping[int, tuple[RequestStream, RequestOutputKind] | RequestError]) -> None:
        """Read these streams too, by index. An error is an output, the next one."""
        self._num_added += len(streams)
        for index, one in streams.items():
            if isinstance(one, RequestError):
                self._failed.append(one)
            else:
                self._streams[index] = one
                self._ready[index] = None
                one[0].set_on_output(partial(self._on_output, index))

    def abort(self) -> None:
        """Abort the streams that have not finished."""
        for stream, _ in self._streams.values():
            stream.abort()

    async def next(self) -> list[tuple[int, OutputOrError]]:
        """Wait for outputs and return them with the indices of their streams; an empty list when all have finished.

        Raises as the iteration of a `RequestStream`, or returns such errors if `returns_errors`.
        """
        outputs: list[tuple[int, OutputOrError]] = [(error.index, error) for error in self._failed]
        self._failed.clear()
        while self._streams and not outputs:
            if not self._ready:
                self._has_ready.clear()
                await self._has_ready.wait()
            ready, self._ready = self._ready, {}
            for index in ready:
                if index in self._streams and (output := self._pop(index)) is not None:
                    outputs.append((index, output))
                    if output.finished:
                        del self._streams[index]
                    else:
                        self._ready[index] = None  # more may be left, see `RequestStream.has_more`
        return outputs

    def _pop(self, index: int) -> OutputOrError | None:
        try:
            return pop_output(*self._streams[index])
        except ROW_ERRORS as error:
            if not self._returns_errors:
                raise name_row(error, index, is_one_of_several=self._num_added > 1) from None
            return RequestError(index, error)

    def _on_output(self, index: int) -> None:
        self._ready[index] = None
        self._has_ready.set()


def pop_output(stream: RequestStream, kind: RequestOutputKind) -> RequestOutput | None:
    """Return the next output of a stream, in the instance's loop; None if there is nothing new. Raises as the iteration
    of the stream."""
    if kind is RequestOutputKind.FINAL_ONLY:
        return stream.output() if stream.check_finished() else None
    delta = stream.pop_delta()
    if delta is None:
        return None
    return delta_output(stream, delta) if kind is RequestOutputKind.DELTA else stream.output()


def delta_output(stream: RequestStream, delta: RequestDelta) -> RequestOutput:
    """Return a delta as an output whose texts and lists have only the new part."""
    return RequestOutput(
        request_id=delta.request_id,
        prompt=stream.prompt,
        prompt_token_ids=stream.prompt_token_ids,
        prompt_logprobs=None if delta.prompt_logprobs is None else list(delta.prompt_logprobs),
        outputs=[_new_output(part) for part in delta.outputs],
        finished=delta.finished,
        num_cached_tokens=delta.num_cached_tokens,
    )


def _new_output(delta: CompletionDelta) -> CompletionOutput:
    cumulative = None
    if delta.logprobs is not None:
        cumulative = sum(
            position[token_id].logprob for token_id, position in zip(delta.token_ids, delta.logprobs, strict=True)
        )
    return CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        cumulative_logprob=cumulative,
        logprobs=delta.logprobs,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        routed_experts=delta.routed_experts,
        routed_experts_start=delta.routed_experts_start,
        weight_versions=delta.weight_versions,
    )


def _resolve(future: asyncio.Future[RequestOutput], outcome: RequestOutput | Exception) -> None:
    if future.done():  # the reader was cancelled
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
