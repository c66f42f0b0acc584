"""A completion of a request while it runs: its tokens, its text, and how much of both the reader has got.

Pure: no clock, no socket, no task. Owned by its `ClientRequest`, which delivers chunks and pops deltas. Text is decoded
when it is read, unless there are stop strings to find: a reader that waits for the end pays for decoding once.
"""

from __future__ import annotations

from bisect import bisect_right

import msgspec

from eagleray.client.flat_logprobs import FlatLogprobs
from eagleray.client.logprobs import OutputLogprobs
from eagleray.client.outputs import CompletionDelta, CompletionOutput, Logprob, WeightVersionSpan
from eagleray.client.repetition import RepetitionDetector
from eagleray.client.routed_experts import RoutedExpertsBuffer
from eagleray.client.text.detokenizer import Detokenizer
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.identity import FIRST_WEIGHT_VERSION
from eagleray.messages.arrays import Array
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import Chunk, FinishReason, TokenLogprobs
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import SamplingParams


class Completion:
    """A completion, of the `n` of a request. `message` is sent to its first engine.

    `tokenizer` None: no text. `routing`: layout of the routed experts, if the request asks for them.
    """

    # Slots, because every token of every request passes through here.
    __slots__ = (
        "_detokenizer", "_has_stop_strings", "_include_stop", "_is_flat", "_logprobs", "_num_decoded",
        "_num_read_texts", "_num_read_tokens", "_num_requested_ids", "_num_sends", "_num_visible", "_repetition",
        "_routed_experts", "_stream_interval", "_text_ends", "_texts", "_tokenizer", "_weight_versions",
        "engine_request_id", "finish_reason", "index", "is_read", "message", "pooled", "stop_reason", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        message: Generate,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        routing: RoutingInfo | None,
    ) -> None:
        self.index = index
        self.message = message
        self.engine_request_id = message.request_id
        """Id under which the current engine knows the completion.

        Never used again, so late chunks of an earlier engine and aborts of an earlier sending match nothing.
        """
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.pooled: Array | None = None
        """Vector of the prompt, at the end of a request to a pooling model."""
        self._num_sends = 0
        self._weight_versions = WeightVersions()
        self._routed_experts: RoutedExpertsBuffer | None = None
        if routing is not None:
            self._routed_experts = RoutedExpertsBuffer(
                routing, start=params.routed_experts_prompt_start, num_prompt_tokens=len(message.prompt_token_ids)
            )
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer: Detokenizer | None = None
        """None for a completion without text, and after the end."""
        if self._tokenizer is not None:
            self._detokenizer = Detokenizer(
                self._tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                kept_special_ids=params.kept_special_token_ids or (),
                stop_strings=params.stop_strings,
                include_stop_string=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        self._has_stop_strings = bool(params.stop_strings)
        self._include_stop = params.include_stop_str_in_output
        self._logprobs: OutputLogprobs | None = None
        """None unless the request asks for log-probabilities."""
        if params.logprobs is not None or params.logprob_token_ids:
            self._logprobs = OutputLogprobs()
        self._is_flat = params.flat_logprobs
        self._num_requested_ids = len(set(params.logprob_token_ids or ()))
        self._stream_interval = params.stream_interval or 1
        self._repetition: RepetitionDetector | None = None
        if params.repetition_detection is not None and params.repetition_detection.max_pattern_size:
            self._repetition = RepetitionDetector(params.repetition_detection, min_tokens=params.min_tokens)
        self._texts: list[str] = []
        """The text so far, in parts."""
        self._text_ends: list[int] = []
        """Number of tokens that each part and the parts before it are decoded from."""
        self._num_visible = 0
        """Number of tokens that have text; a token that ended the completion has none."""
        self._num_decoded = 0
        self._num_read_tokens = 0
        self._num_read_texts = 0
        self.is_read = False
        """Whether the completion has finished and the reader has got all of it."""

    def next_message(self, *, prompt_logprobs_from: int, is_suspect: bool, announce_start: bool) -> Generate:
        """Return the message for the next engine, under an id of its own.

        Draws depend on the seed and the position alone, and the seed is in the message. So an engine that gets the
        prompt and the tokens so far continues exactly as the engine before it would have done.
        """
        self._num_sends += 1
        if self._num_sends == 1:
            return self.message
        self._weight_versions.begin(FIRST_WEIGHT_VERSION, len(self.token_ids))
        self.engine_request_id = f"{self.message.request_id}~{self._num_sends}"
        return msgspec.structs.replace(
            self.message,
            request_id=self.engine_request_id,
            output_token_ids=list(self.token_ids),
            prompt_logprobs_from=prompt_logprobs_from,
            routed_experts_from=None if self._routed_experts is None else self._routed_experts.end,
            is_suspect=is_suspect,
            announce_start=announce_start,
        )

    @property
    def has_output(self) -> bool:
        """Whether there is something that the reader may have got."""
        routed = self._routed_experts
        return bool(self.token_ids) or (routed is not None and routed.end > routed.start)

    @property
    def has_unread_tokens(self) -> bool:
        return self._num_read_tokens < len(self.token_ids)

    def append_detailed(self, token_id: int, logprobs: TokenLogprobs | None, routed_experts: bytes) -> None:
        """Append the token of a step that brought nothing else but these. None may follow the end."""
        if logprobs is not None and self._logprobs is not None:
            self._logprobs.append(logprobs)
        if routed_experts and self._routed_experts is not None:
            self._routed_experts.append(routed_experts)
        self.append(token_id)

    def append(self, token_id: int) -> None:
        """Append the token of a step that brought nothing else. None may follow the end."""
        assert self.finish_reason is None, "a token after the end"
        self.token_ids.append(token_id)
        self._num_visible = len(self.token_ids)
        if self._repetition is not None or self._has_stop_strings:
            self._find_end([token_id])

    def deliver(self, chunk: Chunk) -> None:
        """Append the output of a step. No chunk may follow the end."""
        assert self.finish_reason is None, "a chunk after the end"
        if chunk.weight_version is not None:
            self._weight_versions.begin(chunk.weight_version, len(self.token_ids))
        self.token_ids += chunk.token_ids
        self.pooled = chunk.pooled
        if chunk.logprobs and self._logprobs is not None:
            self._logprobs.extend(chunk.logprobs)
        if self._routed_experts is not None:
            self._routed_experts.append(chunk.routed_experts)
            if chunk.finish_reason is FinishReason.STOP or chunk.finish_reason is FinishReason.LENGTH:
                self._routed_experts.check_complete(len(self.token_ids))
        self.finish_reason = chunk.finish_reason
        self.stop_reason = chunk.stop_token_id
        # A text that a grammar has completed may end without a token of its own.
        hides_last = chunk.finish_reason is FinishReason.STOP and bool(chunk.token_ids) and not self._include_stop
        self._num_visible = len(self.token_ids) - hides_last
        self._find_end(chunk.token_ids)

    def _find_end(self, token_ids: list[int]) -> None:
        """End the completion where its last tokens make it repetitive, or complete a stop string."""
        if self._repetition is not None:
            self._end_repetition(self._repetition, token_ids)
        if self._has_stop_strings:
            self.decode(len(self.token_ids))

    def _end_repetition(self, repetition: RepetitionDetector, token_ids: list[int]) -> None:
        """End the completion at the first of its last tokens at which it is repetitive, unless it ends there anyway."""
        count = repetition.push(token_ids)
        num_behind = len(token_ids) - (count or 0)
        if count is None or (num_behind == 0 and self.finish_reason is not None):
            return
        self._truncate(len(self.token_ids) - num_behind)
        self._num_visible = len(self.token_ids)
        self.finish_reason, self.stop_reason = FinishReason.REPETITION, "repetition_detected"

    def abort(self) -> None:
        """End the completion with the output that it has."""
        self.finish_reason = FinishReason.ABORT

    def decode(self, end: int) -> None:
        """Decode the tokens before `end` that have no text yet. A stop string in the text ends the completion."""
        if self._detokenizer is None:
            return
        start, visible = self._num_decoded, min(end, self._num_visible)
        self._num_decoded = max(start, visible)
        if match := self._detokenizer.push(self.token_ids[start:visible]):
            self._truncate(start + match.num_tokens)
            self.finish_reason, self.stop_reason = FinishReason.STOP, match.stop_string
        has_all = self.finish_reason is not None and end >= len(self.token_ids)
        if has_all and not match:
            self._detokenizer.flush()
        if text := self._detokenizer.pop_text():
            self._texts.append(text)
            self._text_ends.append(min(end, len(self.token_ids)))
        if has_all:
            self._detokenizer = None

    def pop_delta(self, max_tokens: int) -> CompletionDelta | None:
        """Return the output since the last call, with at most `max_tokens` tokens; None if there is nothing new."""
        start, end = self._num_read_tokens, min(self._num_read_tokens + max_tokens, len(self.token_ids))
        if self._is_held_back:
            return None
        self.decode(end)
        has_all = end == len(self.token_ids)
        num_texts = len(self._texts) if has_all else bisect_right(self._text_ends, end)
        text = "".join(self._texts[self._num_read_texts : num_texts])
        routed = None if self._routed_experts is None else self._routed_experts.pop_new()
        is_end = has_all and self.finish_reason is not None and not self.is_read
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
        if is_end:
            delta.weight_versions = self._weight_versions.spans(len(self.token_ids))
        if routed is not None:
            delta.routed_experts_start, delta.routed_experts = routed
        self._num_read_texts, self._num_read_tokens = num_texts, end
        self.is_read |= is_end
        return delta

    @property
    def _is_held_back(self) -> bool:
        """Whether there are too few new tokens for another delta."""
        num_new = len(self.token_ids) - self._num_read_tokens
        return self._num_read_tokens > 0 and num_new < self._stream_interval != 1 and self.finish_reason is None

    def output(self, *, with_logprobs: bool) -> CompletionOutput:
        """Return the whole output so far, read or not."""
        self.decode(len(self.token_ids))
        output = CompletionOutput(
            index=self.index,
            text="".join(self._texts),
            token_ids=list(self.token_ids),
            cumulative_logprob=None if self._logprobs is None else self._logprobs.cumulative(),
            logprobs=self._positions(0, len(self.token_ids)) if with_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            weight_versions=self._weight_versions.spans(len(self.token_ids)),
        )
        if self._routed_experts is not None:
            output.routed_experts = self._routed_experts.all()
            output.routed_experts_start = self._routed_experts.start
        return output

    def _positions(self, start: int, end: int) -> list[dict[int, Logprob]] | FlatLogprobs | None:
        """Return the log-probabilities of the tokens `start` to `end` - 1, or None if they were not requested."""
        if self._logprobs is None:
            return None
        positions = self._logprobs.positions(
            start, end, num_requested=self._num_requested_ids, tokenizer=self._tokenizer
        )
        return FlatLogprobs.of(positions) if self._is_flat else positions

    def _truncate(self, num_tokens: int) -> None:
        """Drop everything that was generated after the first `num_tokens` tokens."""
        del self.token_ids[num_tokens:]
        if self._logprobs is not None:
            self._logprobs.truncate(num_tokens)
        if self._routed_experts is not None:
            self._routed_experts.truncate(num_tokens)


class WeightVersions:
    """Versions of the weights that made the tokens of a completion, as a list of changes."""

    __slots__ = ("_starts",)

    def __init__(self) -> None:
        self._starts: list[tuple[int, str]] = [(0, FIRST_WEIGHT_VERSION)]

    def begin(self, version: str, index: int) -> None:
        """Give this version to the tokens from `index` on."""
        if self._starts[-1][0] == index:
            self._starts.pop()
        if not self._starts or self._starts[-1][1] != version:
            self._starts.append((index, version))

    def spans(self, num_tokens: int) -> list[WeightVersionSpan]:
        """Return the spans that cover `num_tokens` tokens, in order. Neighbours have different versions."""
        ends = [start for start, _ in self._starts[1:]] + [num_tokens]
        return [
            WeightVersionSpan(version=version, start=start, end=min(end, num_tokens))
            for (start, version), end in zip(self._starts, ends, strict=True)
            if start < num_tokens
        ]
