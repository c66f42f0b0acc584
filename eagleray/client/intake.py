"""From what a user asks for to a request that can be sent: names, seeds, limits. The impossible is refused here."""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Callable
from functools import partial

from eagleray.client.in_flight import ClientRequest, InFlightRequests
from eagleray.client.journal import ResumePoint
from eagleray.client.preprocess import Preprocessor, Prompt, check_seconds, check_text
from eagleray.client.recovery import RestartBudget
from eagleray.client.request_state import RequestState
from eagleray.errors import InvalidRequest
from eagleray.messages.membership import EngineInfo
from eagleray.messages.sampling import SamplingParams

SEED_BITS = 63


class RequestBuilder:
    """Owned by the client. `request_timeout`: seconds, of requests that set none; None: no limit."""

    def __init__(
        self,
        preprocessor: Preprocessor,
        *,
        seed: int | None,
        max_request_restarts: int,
        request_timeout: float | None = None,
    ) -> None:
        self.preprocessor = preprocessor
        self._draw_seed: Callable[[], int] = partial(
            secrets.randbits if seed is None else random.Random(seed).getrandbits, SEED_BITS
        )
        self._max_request_restarts = max_request_restarts
        self._request_timeout = request_timeout
        self._serials = itertools.count()

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        info: EngineInfo,
        in_flight: InFlightRequests,
        *,
        request_id: str | None,
        priority: int,
        cache_salt: str,
        timeout: float | None,
        session: str | None,
        rank: int | None,
    ) -> ClientRequest:
        """For engines as `info` says, beside those that are in flight; see `Client.generate`.

        Raises `InvalidRequest`.
        """
        serial = next(self._serials)
        name = f"{self.preprocessor.client.label}-{serial}" if request_id is None else request_id
        check_text(name, "request_id")
        if name in in_flight:
            raise InvalidRequest(
                f"request id {name!r} is in use: the ids of running requests must be unique", param="request_id"
            )
        if session is not None:
            check_text(session, "session")
        seconds = self._request_timeout if timeout is None else timeout
        if seconds is not None:
            check_seconds(seconds)
        token_ids = self.preprocessor.tokenize(prompt, info)
        messages = self.preprocessor.requests(
            token_ids,
            params,
            info,
            # The engine gets names that are never used again: what it still says of an aborted request is nobody's.
            request_id=f"{name}#{serial}",
            seed=self._draw_seed() if params.seed is None else params.seed,
            priority=priority,
            cache_salt=cache_salt,
        )
        tokenizer = self.preprocessor.tokenizer
        return ClientRequest(
            state=RequestState(
                name,
                prompt=prompt.text,
                prompt_token_ids=token_ids,
                params=params,
                tokenizer=tokenizer,
                routing=info.routing,
            ),
            running={index: ResumePoint(message) for index, message in enumerate(messages)},
            deaths=RestartBudget(self._max_request_restarts),
            timeout=seconds,
            session=session,
            rank=rank,
        )
