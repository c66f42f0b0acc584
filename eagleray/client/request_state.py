"""A request while it runs: what its chunks have brought, and how much of that its reader has taken.

Pure: no clock, no socket, no task. The client delivers chunks, a stream takes from the other end. Text is made when it
is taken, unless there are stop strings to look for: whoever waits for the end only pays for it once.
"""

from __future__ import annotations

from bisect import bisect_right

from eagleray.client.logprobs import OutputLogprobs, PromptLogprobsBuilder, PromptPositions
from eagleray.client.outputs import CompletionDelta, CompletionOutput, Logprob, RequestDelta, RequestOutput
from eagleray.client.routed_experts import RoutedExpertsBuffer
from eagleray.client.text.detokenizer import Detokenizer
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.errors import EagleRayError, InvalidRequest, RequestFailed
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import Chunk, FinishReason
from eagleray.messages.sampling import SamplingParams

OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)

MAX_DELTA_ENTRIES = 1024
"""Most tokens and log-probabilities of one delta. Making and sending them takes some milliseconds. A slow reader gets
the rest in further deltas, between which the event loop serves others."""


class Completion:
    """One of the `n` completions. `routed`: what is to keep its routed experts, if they are asked for."""

    __slots__ = (  # every token of every request passes here
        "_detokenizer",
        "_end_was_taken",
        "_has_logprobs",
        "_is_watched",
        "_logprobs",
        "_num_asked",
        "_num_detokenized",
        "_num_taken_texts",
        "_num_taken_tokens",
        "_num_visible",
        "_routed",
        "_shows_stop",
        "_text_ends",
        "_texts",
        "_tokenizer",
        "finish_reason",
        "index",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self, index: int, params: SamplingParams, tokenizer: Tokenizer | None, routed: RoutedExpertsBuffer | None = None
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._routed = routed
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer: Detokenizer | None = None
        """None without texts, and after the end."""
        if self._tokenizer is not None:
            self._detokenizer = Detokenizer(
                self._tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                stop_strings=params.stop_strings,
                include_stop_string=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        self._is_watched = bool(params.stop_strings)
        self._shows_stop = params.include_stop_str_in_output
        self._has_logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
        self._num_asked = len(set(params.logprob_token_ids or ()))
        self._logprobs = OutputLogprobs()
        self._texts: list[str] = []
        """The text so far, in parts."""
        self._text_ends: list[int] = []
        """Number of tokens that each part and those before it are made of."""
        self._num_visible = 0
        """How many of the tokens have text: not one that ended the request."""
        self._num_detokenized = 0
        self._num_taken_tokens = 0
        self._num_taken_texts = 0
        self._end_was_taken = False

    @property
    def routed_experts_from(self) -> int | None:
        """The first position whose routed experts are still missing; None: they are not asked for."""
        return None if self._routed is None else self._routed.end

    @property
    def has_begun(self) -> bool:
        """Something of it may have been read."""
        return bool(self.token_ids) or (self._routed is not None and self._routed.end > self._routed.start)

    def deliver(self, chunk: Chunk) -> None:
        """What a step brought. Nothing is delivered after the end."""
        assert self.finish_reason is None, "a chunk after the end"
        self.token_ids += chunk.token_ids
        if chunk.logprobs:
            self._logprobs.extend(chunk.logprobs)
        if self._routed is not None:
            self._routed.known.extend(chunk.routed_experts)
            if chunk.finish_reason is not None and chunk.finish_reason in OWN_ENDS:
                self._routed.check(len(self.token_ids))
        self.finish_reason = chunk.finish_reason
        self.stop_reason = chunk.stop_token_id
        hides_last = chunk.finish_reason is FinishReason.STOP and not self._shows_stop
        self._num_visible = len(self.token_ids) - hides_last
        if self._is_watched:
            self.detokenize(len(self.token_ids))

    def abort(self) -> None:
        """It ends here, with what it has."""
        self.finish_reason = FinishReason.ABORT

    @property
    def has_new_tokens(self) -> bool:
        """Tokens have come that were not taken."""
        return self._num_taken_tokens < len(self.token_ids)

    @property
    def is_taken(self) -> bool:
        """It has ended, and everything was taken."""
        return self._end_was_taken

    def take(self, max_tokens: int) -> CompletionDelta | None:
        """Return what is new since the last call, with at most `max_tokens` tokens, or None."""
        start, end = self._num_taken_tokens, min(self._num_taken_tokens + max_tokens, len(self.token_ids))
        self.detokenize(end)
        has_all = end == len(self.token_ids)
        num_texts = len(self._texts) if has_all else bisect_right(self._text_ends, end)
        text = "".join(self._texts[self._num_taken_texts : num_texts])
        routed = None if self._routed is None else self._routed.take()
        is_end = has_all and self.finish_reason is not None and not self._end_was_taken
        if not (text or end > start or is_end or routed):
            return None
        delta = CompletionDelta(
            index=self.index,
            text=text,
            token_ids=self.token_ids[start:end],
            logprobs=self._positions(start, end),
            finish_reason=self.finish_reason if has_all else None,
            stop_reason=self.stop_reason if has_all else None,
        )
        if routed is not None:
            delta.routed_experts_start, delta.routed_experts = routed
        self._num_taken_texts, self._num_taken_tokens = num_texts, end
        self._end_was_taken |= is_end
        return delta

    def output(self, *, with_logprobs: bool = True) -> CompletionOutput:
        """All of it, whatever has been taken."""
        self.detokenize(len(self.token_ids))
        output = CompletionOutput(
            index=self.index,
            text="".join(self._texts),
            token_ids=list(self.token_ids),
            cumulative_logprob=self._logprobs.cumulative() if self._has_logprobs else None,
            logprobs=self._positions(0, len(self.token_ids)) if with_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        if self._routed is not None:
            output.routed_experts, output.routed_experts_start = self._routed.all(), self._routed.start
        return output

    def _positions(self, start: int, end: int) -> list[dict[int, Logprob]] | None:
        """The log-probabilities of the tokens `start` to `end` - 1, if they were asked for."""
        if not self._has_logprobs:
            return None
        return self._logprobs.positions(start, end, num_asked=self._num_asked, tokenizer=self._tokenizer)

    def detokenize(self, end: int) -> None:
        """Make text of the tokens before `end` that have none yet; a stop string in it is the end of the completion."""
        if self._detokenizer is None:
            return
        start, visible = self._num_detokenized, min(end, self._num_visible)
        self._num_detokenized = max(start, visible)
        if stopped := self._detokenizer.push(self.token_ids[start:visible]):
            self._cut(start + stopped.num_tokens)
            self.finish_reason, self.stop_reason = FinishReason.STOP, stopped.stop_string
        has_all = self.finish_reason is not None and end >= len(self.token_ids)
        if has_all and not stopped:
            self._detokenizer.flush()
        if text := self._detokenizer.take():
            self._texts.append(text)
            self._text_ends.append(min(end, len(self.token_ids)))
        if has_all:
            self._detokenizer = None

    def _cut(self, num_tokens: int) -> None:
        """What was generated beyond these does not count."""
        del self.token_ids[num_tokens:]
        self._logprobs.cut(num_tokens)
        if self._routed is not None:
            self._routed.cut(num_tokens)


class RequestState:
    """A request with its completions. `tokenizer` None: no texts. `routing`: of engines that can say which experts
    computed a token."""

    __slots__ = (
        "_counts_cached_tokens",
        "_first_to_take",
        "_max_delta_tokens",
        "_num_cached_tokens",
        "_prompt",
        "_prompt_logprobs",
        "_prompt_logprobs_were_taken",
        "completions",
        "failure",
        "has_more",
        "prompt_token_ids",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        *,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        routing: RoutingInfo | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids

        def rows() -> RoutedExpertsBuffer | None:
            if not params.return_routed_experts or routing is None:
                return None
            start = params.routed_experts_prompt_start
            return RoutedExpertsBuffer(routing, start=start, num_prompt_tokens=len(prompt_token_ids))

        self.completions = [Completion(index, params, tokenizer, rows()) for index in range(params.n)]
        self.failure: EagleRayError | None = None
        num_logprobs = (params.logprobs or 0) + len(params.logprob_token_ids or ())
        self._max_delta_tokens = max(1, MAX_DELTA_ENTRIES // (1 + num_logprobs))
        self._first_to_take = 0
        """Index of the completion that is the first to be in the next delta."""
        self.has_more = False
        """The last delta did not hold all that there is: the next one can be taken at once."""
        self._prompt = prompt
        self._prompt_logprobs: PromptLogprobsBuilder | None = None
        if params.prompt_logprobs is not None:
            texts = tokenizer if params.detokenize else None
            self._prompt_logprobs = PromptLogprobsBuilder(len(prompt_token_ids), texts)
        self._prompt_logprobs_were_taken = False
        self._num_cached_tokens = 0
        self._counts_cached_tokens = True

    @property
    def prompt_logprobs_from(self) -> int:
        """The first prompt position whose log-probabilities are still missing, if they were asked for."""
        return 1 if self._prompt_logprobs is None else len(self._prompt_logprobs.positions)

    @property
    def is_finished(self) -> bool:
        """Every completion has ended, or the request has failed."""
        return self.failure is not None or self._has_all

    def deliver(self, index: int, chunk: Chunk) -> None:
        """What a step brought for completion `index`, which has not ended."""
        if chunk.finish_reason is FinishReason.ERROR:
            error = InvalidRequest if chunk.is_user_error else RequestFailed
            self.failure = error(chunk.error or "the engine does not say why the request failed")
            return
        if chunk.prompt_logprobs is not None and self._prompt_logprobs is not None:
            self._prompt_logprobs.add(chunk.prompt_logprobs)
        if index == 0 and self._counts_cached_tokens:  # the others find what this one has just put into the cache
            self._num_cached_tokens += chunk.num_cached_tokens
        self.completions[index].deliver(chunk)

    def resume(self) -> None:
        """Another engine goes on: what that finds in its cache is no news, if readers may have been told already."""
        if self.completions[0].has_begun or self.prompt_logprobs_from > 1 or self._num_cached_tokens:
            self._counts_cached_tokens = False

    def abort(self) -> None:
        """What has not ended yet ends here."""
        for completion in self.completions:
            if completion.finish_reason is None:
                completion.abort()

    def take(self) -> RequestDelta | None:
        """Return what is new since the last call, as much as fits into one delta, or None."""
        outputs = self._take_outputs()
        prompt_logprobs = None if self._prompt_logprobs_were_taken else self._complete_prompt_logprobs
        if not outputs and prompt_logprobs is None:
            return None
        self._prompt_logprobs_were_taken = prompt_logprobs is not None or self._prompt_logprobs_were_taken
        return RequestDelta(
            request_id=self.request_id,
            outputs=outputs,
            finished=all(completion.is_taken for completion in self.completions),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
        )

    def _take_outputs(self) -> list[CompletionDelta]:
        """Return the deltas of the completions, by index. Completions that do not fit come first in the next delta."""
        count, room = len(self.completions), self._max_delta_tokens
        first = self._first_to_take if self._first_to_take < count else 0
        outputs = []
        for place in range(first, first + count):
            if room == 0:
                self._first_to_take = place % count
                break
            if delta := self.completions[place % count].take(room):
                room -= len(delta.token_ids)
                outputs.append(delta)
        self.has_more = room == 0 and any(completion.has_new_tokens for completion in self.completions)
        return sorted(outputs, key=lambda delta: delta.index) if first else outputs

    def output(self, *, with_logprobs: bool = True) -> RequestOutput:
        """All of it, whatever has been taken. `with_logprobs` False: the log-probabilities were taken as deltas."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=list(self._complete_prompt_logprobs)
            if with_logprobs and self._complete_prompt_logprobs is not None
            else None,
            outputs=[completion.output(with_logprobs=with_logprobs) for completion in self.completions],
            finished=self._has_all,
            num_cached_tokens=self._num_cached_tokens,
        )

    @property
    def _has_all(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    @property
    def _complete_prompt_logprobs(self) -> PromptPositions | None:
        builder = self._prompt_logprobs
        return builder.positions if builder is not None and builder.is_complete else None
