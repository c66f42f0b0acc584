"""The prompts of one HTTP request to a pooling model: admitted, sent together, awaited, and aborted together.

Driven by `server.pooling.routes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from eagleray.client.pooling import PooledPrompt
from eagleray.client.preprocess import POOLED, Prompt, RequestOptions
from eagleray.client.request import RequestStream
from eagleray.messages.outputs import FinishReason
from eagleray.metrics.requests import RequestTimer
from eagleray.server.pooling.prompts import PlaceOf, naming_place
from eagleray.server.service import Service

PROMPTS_AT_ONCE = 64
"""Number of prompts that are sent, or vectors that are written, before the event loop serves others."""


class PoolingJob(NamedTuple):
    """How the prompts of an HTTP request are sent."""

    request_id: str
    arrival: float
    """Time at which the HTTP request came, by `time.perf_counter`."""
    options: RequestOptions
    """Options of the client's requests, without their ids."""


async def pool_prompts(
    service: Service,
    job: PoolingJob,
    num_prompts: int,
    make_prompts: Callable[[], Awaitable[Sequence[Prompt]]],
    place_of: PlaceOf,
) -> list[PooledPrompt]:
    """Return the vectors of the prompts, in their order. `make_prompts` tokenizes them when the request has been
    admitted. `place_of` names a prompt's place in the body, for errors. Whatever ends this early aborts all prompts.

    Raises `InvalidRequest` or `Unavailable` (or `Overloaded`) and the error of the first prompt that fails.
    """
    sent: list[tuple[RequestStream, RequestTimer]] = []
    reason = FinishReason.ABORT
    try:
        reservation = service.admission.reserve(num_prompts, 1)
        try:
            prompts = await make_prompts()
            service.admission.check_size([prompt.token_ids or [] for prompt in prompts], POOLED, service.max_model_len)
            for index, prompt in enumerate(prompts):
                with naming_place(place_of, index):
                    sent.append(_send(service, job, prompt))
                reservation.use(1)
                if len(sent) % PROMPTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        finally:
            reservation.release()
        return await _wait_for_all(sent)
    except Exception:
        reason = FinishReason.ERROR
        raise
    finally:
        for stream, timer in sent:
            stream.abort()
            timer.ended(reason)


def _send(service: Service, job: PoolingJob, prompt: Prompt) -> tuple[RequestStream, RequestTimer]:
    options: RequestOptions = {**job.options, "request_id": service.unique(job.request_id)}
    stream = service.client.pool(prompt, **options)
    try:
        num_tokens = len(stream.prompt_token_ids)
        return stream, service.metrics.requests.begin(
            arrival=job.arrival, num_prompt_tokens=num_tokens, n=1, max_tokens=None
        )
    except BaseException:
        stream.abort()  # the caller does not have it yet, and would not abort it
        raise


async def _wait_for_all(sent: Sequence[tuple[RequestStream, RequestTimer]]) -> list[PooledPrompt]:
    async def wait(stream: RequestStream, timer: RequestTimer) -> PooledPrompt:
        pooled = await stream.pooled()
        timer.finished(0, FinishReason.STOP, 0)
        return pooled

    if len(sent) == 1:
        return [await wait(*sent[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait(*one)) for one in sent]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
