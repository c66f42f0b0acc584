"""Numbers of log-probabilities on all generating routes, in the modes that give others than log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
from server_fakes import Chunk, FinishReason

from eagleray.messages.outputs import TokenLogprobs

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6], "logprobs": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"logprobs": 2}},
}


def numbers_of(logprobs: dict[str, Any]) -> list[float]:
    """Return the number of the first token, then those of the likeliest."""
    if "token_logprobs" in logprobs:
        return [logprobs["token_logprobs"][0], *logprobs["top_logprobs"][0].values()]
    (entry,) = logprobs["content"]
    return [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])]


@pytest.mark.parametrize("path", BODIES)
def test_answers_show_logits_and_minus_infinity_as_a_finite_number(api, path):
    def script(request):
        reported = TokenLogprobs([8, 8, 9], [12.5, 12.5, -math.inf], 1)
        fields = {"token_ids": [8], "logprobs": [reported], "finish_reason": FinishReason.LENGTH}
        yield Chunk(request_id=request.request_id, **fields)

    api.engine.script = script
    whole = numbers_of(api.post(path, BODIES[path]).json()["choices"][0]["logprobs"])
    assert whole == [12.5, 12.5, -9999.0]
    parts = [choice["logprobs"] for event in api.events(path, BODIES[path]) for choice in event["choices"]]
    assert [numbers_of(part) for part in parts if part] == [whole]
