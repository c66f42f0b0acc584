"""Routed experts in the form of SkyRL."""

from __future__ import annotations

import base64

import msgspec
import numpy as np
import pytest

from eagleray.server.routed_experts import compact_routed_experts


@pytest.mark.parametrize(
    ("highest", "name"), [(0, "uint8"), (255, "uint8"), (256, "int16"), (32767, "int16"), (32768, "int32")]
)
def test_compact_routed_experts_takes_the_smallest_type(highest, name):
    rows = np.array([[[0, 1]], [[2, highest]]], "<u2")
    fields = msgspec.json.decode(msgspec.json.encode(compact_routed_experts(rows, 3)))
    assert (fields["shape"], fields["dtype"], fields["start"]) == ([2, 1, 2], name, 3)
    decoded = np.frombuffer(base64.b64decode(fields["data"]), name).reshape(fields["shape"])
    assert decoded.tolist() == rows.tolist()


def test_skyrl_generate_answers_as_the_route_of_vllm(api):
    body = {"request_id": "mine", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2, "logprobs": 0}}
    answers = [api.post(path, body).json() for path in ("/skyrl/v1/generate", "/inference/v1/generate")]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert len(answers[0]["choices"][0]["token_ids"]) == 2
