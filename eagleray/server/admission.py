"""Limits on the work that requests bring to an API server, checked before anything is tokenized or allocated.

Work is counted in sequences: each prompt of a request is one for each of its `n` completions. Owned by `Service`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eagleray.config.serving import ServingConfig
from eagleray.errors import InvalidRequest, Overloaded
from eagleray.messages.sampling import SamplingParams
from eagleray.metrics.ledger import Tally

if TYPE_CHECKING:
    from eagleray.client.client import Client


class Reservation:
    """The sequences of an admitted request that have not been sent to the client yet."""

    def __init__(self, admission: Admission, num_seqs: int) -> None:
        self._admission = admission
        self._num_seqs = num_seqs

    def use(self, num_seqs: int) -> None:
        """Stop counting `num_seqs` of the sequences: the client counts them now, because they were sent."""
        self._num_seqs -= num_seqs
        self._admission.num_reserved -= num_seqs

    def release(self) -> None:
        """Stop counting the sequences that were not sent. Idempotent."""
        self.use(self._num_seqs)


class Admission:
    """Decides which requests may be sent to `client`. `rejected` counts requests that come while too many wait."""

    def __init__(self, client: Client, limits: ServingConfig, rejected: Tally) -> None:
        self._client = client
        self._rejected = rejected
        self._limits = limits
        self.num_reserved = 0
        """Number of sequences in all reservations."""

    def reserve(self, num_prompts: int, n: int) -> Reservation:
        """Admit a request of `num_prompts` prompts with `n` completions each.

        Raises `InvalidRequest` if it has too many sequences, and `Overloaded` if too many are queued already.
        """
        num_seqs = num_prompts * n
        self.check_count(num_prompts, n)
        num_waiting = self._client.num_queued_seqs + self.num_reserved
        if num_waiting + num_seqs > self._limits.max_queued_requests:
            self._rejected.add()
            raise Overloaded(
                f"{num_waiting} sequences wait for their first token, this request has {num_seqs}, and at most "
                f"{self._limits.max_queued_requests} may wait here (option `max_queued_requests`): try again in a "
                "moment"
            )
        self.num_reserved += num_seqs
        return Reservation(self, num_seqs)

    def check_size(self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_model_len: int) -> None:
        """Raise `InvalidRequest` if the sequences of these tokenized prompts take too much memory together."""
        self._check_tokens(prompts, params)
        self._check_logprobs(prompts, params, max_model_len)

    def check_count(self, num_prompts: int, n: int) -> None:
        """Raise `InvalidRequest` for more sequences than one request may have."""
        for option in ("max_seqs_per_request", "max_queued_requests"):
            limit = getattr(self._limits, option)
            if num_prompts * n > limit:
                several = n > 1
                product = f" ({num_prompts} prompts x `n` {n})" if several else ""
                raise InvalidRequest(
                    f"the request has {num_prompts * n} sequences{product}, but it may have at most {limit} (option "
                    f"`{option}`): send fewer prompts at a time{', or lower `n`' if several else ''}",
                    param="n" if several else "prompt",
                )

    def _check_tokens(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        lists = (
            params.logit_bias,
            params.allowed_token_ids,
            params.stop_token_ids,
            params.bad_words,
            params.trace_decode_token_ids,
        )
        num_listed = sum(len(one) for one in lists if one is not None)
        num_listed += sum(map(len, params.prompt_logprob_token_ids or ()))
        total = params.n * sum(len(prompt) + num_listed for prompt in prompts)
        if total > self._limits.max_request_tokens:
            raise InvalidRequest(
                f"the request has {total} token ids (prompts and lists of its parameters, for each of {params.n} x "
                f"{len(prompts)} sequences), but it may have at most {self._limits.max_request_tokens} (option "
                "`max_request_tokens`): send fewer prompts at a time, or lower `n`",
                param="n" if params.n > 1 else "prompt",
            )

    def _check_logprobs(self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_model_len: int) -> None:
        if params.n * len(prompts) == 1:  # bounded by the model's length
            return
        of_prompts = 0 if params.prompt_logprobs is None else sum(map(len, prompts)) * (params.prompt_logprobs + 1)
        per_token = (params.logprobs or 0) + 1 + len(params.logprob_token_ids or ())
        has_logprobs = params.logprobs is not None or params.logprob_token_ids
        rooms = (max_model_len - len(prompt) for prompt in prompts)
        num_tokens = sum(room if params.max_tokens is None else min(room, params.max_tokens) for room in rooms)
        total = of_prompts + (params.n * num_tokens * per_token if has_logprobs else 0)
        if total > self._limits.max_request_logprobs:
            raise InvalidRequest(
                f"the request asks for up to {total} log-probabilities (tokens x sequences x (logprobs + 1)), but "
                f"one of several sequences may ask for at most {self._limits.max_request_logprobs} (option "
                "`max_request_logprobs`): lower `max_tokens`, `logprobs` or `n`, or send fewer prompts at a time",
                param="logprobs" if has_logprobs else "prompt_logprobs",
            )
