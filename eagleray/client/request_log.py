"""Lines of the log about requests, by the options `enable_log_requests` and `enable_log_outputs`.

A request has a line when it is sent, with its sizes and parameters. Prompts are shown at the level debug alone, and
outputs only if they are asked for. Driven by the client.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import msgspec

from eagleray.client.preprocess import RequestOptions
from eagleray.client.request import ClientRequest
from eagleray.config.json_files import shown
from eagleray.config.observability import ObservabilityConfig
from eagleray.log import get_logger
from eagleray.messages.sampling import SamplingParams

logger = get_logger(__name__)

FIELDS = msgspec.structs.fields(SamplingParams)

COUNTED = frozenset({"trace_decode_token_ids", "prompt_logprob_token_ids"})
"""Parameters that hold tokens of a user's text; only their number is shown."""


class RequestLog:
    """The lines about the requests of one client. `max_len`: most characters, or token ids, of a prompt or an output;
    None: no limit."""

    def __init__(self, *, has_outputs: bool, max_len: int | None) -> None:
        self._has_outputs = has_outputs
        self._max_len = max_len
        if not logger.isEnabledFor(logging.INFO):
            level = logging.getLevelName(logger.getEffectiveLevel()).lower()
            logger.warning(
                "option `enable_log_requests` has no effect: the log level is %s, and requests are logged only at the "
                "levels info and debug",
                level,
            )

    @classmethod
    def open(cls, options: ObservabilityConfig) -> RequestLog | None:
        """Return the log of a client, or None without the option `enable_log_requests`."""
        if not options.enable_log_requests:
            return None
        return cls(has_outputs=options.enable_log_outputs, max_len=options.max_log_len)

    def begin(self, request: ClientRequest, params: SamplingParams | None, options: RequestOptions) -> None:
        """Log a request that was sent. `params` None: for a vector."""
        if not logger.isEnabledFor(logging.INFO):
            return
        origin, adapter = options.get("origin"), options.get("adapter")
        user_id = {"request_id": request.request_id if origin is None else origin.request_id}
        entry: dict[str, Any] = {
            "path": None if origin is None else origin.path,
            "prompt_tokens": len(request.prompt_token_ids),
            "adapter": None if adapter is None else adapter.name,
            "session": options.get("session"),
            "params": None if params is None else _given(params),
        }
        entry = {name: value for name, value in entry.items() if value is not None}
        words = [f"{name}={value}" for name, value in entry.items() if name != "params"]
        words += [f"{name}={value}" for name, value in entry.get("params", {}).items()]
        logger.info("request %s: %s", request.request_id, " ".join(words), extra=user_id | entry)
        if logger.isEnabledFor(logging.DEBUG):
            prompt = self._cut(request.prompt_token_ids if request.prompt is None else request.prompt)
            logger.debug("request %s: prompt %r", request.request_id, prompt, extra=user_id | {"prompt": prompt})
        if self._has_outputs and params is not None:
            request.on_end = partial(self._end, user_id)

    def _end(self, user_id: dict[str, str], request: ClientRequest) -> None:
        """Log the completions of a request that has ended."""
        for part in request.output(with_logprobs=False).outputs:
            reason = type(request.failure).__name__ if part.finish_reason is None else part.finish_reason.value
            num_tokens, output = len(part.token_ids), self._cut(part.text or part.token_ids)
            logger.info(
                "request %s, completion %d: %s after %d tokens: %r",
                request.request_id,
                part.index,
                reason,
                num_tokens,
                output,
                extra=user_id
                | {
                    "completion": part.index,
                    "finish_reason": reason,
                    "completion_tokens": num_tokens,
                    "output": output,
                },
            )

    def _cut(self, content: str | list[int]) -> str | list[int]:
        return content if self._max_len is None else content[: self._max_len]


def _given(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that are not the default ones, as the log shows them."""
    given: dict[str, Any] = {}
    for field in FIELDS:
        value = getattr(params, field.name)
        is_plain = isinstance(value, int | float | str)
        if value is field.default or (is_plain and value == field.default):
            continue
        if field.name in COUNTED:
            given[field.name] = f"({len(value)} entries)"
        else:
            given[field.name] = value if isinstance(value, int | float) else shown(value)
    return given
