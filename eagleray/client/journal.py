"""What must be known of a completion to go on with it elsewhere: what was sent, and what it has brought. Pure.

Draws depend on the seed and the position alone, and the seed is in the message: an engine that is given the prompt and
the tokens so far goes on as the one before it would have done.
"""

from __future__ import annotations

import msgspec

from eagleray.messages.requests import Generate


class ResumePoint:
    """A completion that has not ended. `message`: as it was sent first, or will be."""

    def __init__(self, message: Generate) -> None:
        self.message = message
        self.name = message.request_id
        """By which the engine that it is with knows it. Never used again: what an engine says late, and what is said of
        an older sending, hits nobody."""
        self._num_sendings = 0

    def next_message(
        self,
        *,
        token_ids: list[int],
        prompt_logprobs_from: int,
        routed_experts_from: int | None,
        is_suspect: bool,
        announce_start: bool,
    ) -> Generate:
        """The message that goes on after `token_ids`, and after the prompt log-probabilities and the routed experts
        before those positions."""
        self._num_sendings += 1
        if self._num_sendings == 1:
            return self.message
        self.name = f"{self.message.request_id}~{self._num_sendings}"
        return msgspec.structs.replace(
            self.message,
            request_id=self.name,
            output_token_ids=list(token_ids),
            prompt_logprobs_from=prompt_logprobs_from,
            routed_experts_from=routed_experts_from,
            is_suspect=is_suspect,
            announce_start=announce_start,
        )
