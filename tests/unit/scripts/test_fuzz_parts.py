"""scripts/fuzz.py: its JSON encoder, its maker of bodies, and its judgement of answers and of attacks."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from fuzzing.arena import Arena
from fuzzing.canary import Notes
from fuzzing.schema import BodyMaker
from fuzzing.values import HOSTILE, Raw, encode, nested
from fuzzing.verdict import MEGABYTE, AttackOutcome, Limits, judge
from fuzzing.wire import Reply

from eagleray.server.openai.requests import CompletionRequest

FORM = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}


@pytest.fixture
def arena():
    return Arena(("127.0.0.1", 1), seed=0, seconds=1.0)


def refusal(status: int, error: object = FORM, **headers: str) -> Reply:
    return Reply(status=status, body=json.dumps({"error": error}).encode(), headers=headers)


def test_encode_plain_values_equals_json():
    value = {"a": [1, 2.5, None, True, "x\ud800"], "b": {"c": [], "d": [{"e": {}}]}}
    assert json.loads(encode(value)) == value


def test_encode_raw_text_is_inserted_as_it_stands():
    assert encode({"n": Raw("1" + "0" * 400), "m": [Raw("NaN"), nested(2)]}) == (
        b'{"n":1' + b"0" * 400 + b',"m":[NaN,[[1]]]}'
    )


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_encode_every_hostile_value_gives_bytes(name):
    assert encode({"x": HOSTILE[name](random.Random(0))}).startswith(b'{"x":')


def maker() -> BodyMaker:
    (schema,), components = msgspec.json.schema_components(
        [CompletionRequest], ref_template="#/components/schemas/{name}"
    )
    operation = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
    control = {**operation, "responses": {"403": {}}}
    paths = {"/v1/completions": {"post": operation}, "/pause": {"post": control}}
    return BodyMaker({"paths": paths, "components": {"schemas": components}})


def test_body_maker_same_seed_gives_the_same_bodies():
    made = [[maker().make(random.Random(f"{seed}")) for seed in range(30)] for _ in range(2)]
    assert made[0] == made[1]


def test_body_maker_makes_no_bodies_for_control_routes():
    bodies = maker()
    assert bodies.operations.keys() == {"/v1/completions", "/pause"}
    assert {bodies.make(random.Random(f"{seed}"))[0] for seed in range(50)} == {"/v1/completions"}


def test_body_maker_nothing_hostile_fits_the_schema():
    bodies = [maker().make(random.Random(f"{seed}")) for seed in range(200)]
    sane = [body for _, body, what in bodies if what == "nothing"]
    assert len(sane) > 10
    for body in sane:
        try:
            msgspec.json.decode(body, type=CompletionRequest)
        except msgspec.ValidationError as error:  # fields that limit each other, which a schema cannot express
            assert "repetition_detection" in str(error) or "exactly one of" in str(error)


@pytest.mark.parametrize("status", [200, 400, 413, 429, 503])
def test_judge_documented_answer_is_no_finding(arena, status):
    arena.judge(refusal(status, **{"retry-after": "1"}), "x")
    assert arena.findings == []


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (refusal(500), "500"),
        (refusal(504), "504"),
        (refusal(429), "Retry-After"),
        (refusal(400, {**FORM, "type": "oops"}), "documented form"),
        (refusal(400, {"message": "no"}), "documented form"),
        (Reply(status=400, body=b"Bad Request"), "documented form"),
        (Reply(trouble="ConnectionResetError"), "no answer"),
        (Reply(status=200, body=b'data: {"error":{"message":"","code":"internal_error"}}'), "no request may cause"),
    ],
)
def test_judge_other_answers_are_findings(arena, reply, words):
    arena.judge(reply, "x")
    assert any(words in finding for finding in arena.findings)


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (400, "invalid_request_error", ""),
        (529, "overloaded_error", ""),
        (400, "server_error", "documented form"),
        (500, "api_error", "500"),
    ],
)
def test_judge_error_of_messages_has_the_form_of_that_route(arena, status, kind, words):
    body = json.dumps({"type": "error", "error": {"type": kind, "message": "no"}}).encode()
    arena.judge(Reply(status=status, body=body, headers={"retry-after": "1"}), "x", path="/v1/messages/count_tokens")
    assert [words in finding for finding in arena.findings] == ([True] if words else [])
    arena.judge(refusal(400), "x", path="/v1/messages")
    assert "documented form" in arena.findings[-1]


def test_judge_timeout_of_the_request_itself_is_no_finding(arena):
    arena.judge(refusal(504), "x", has_timeout=True)
    assert arena.findings == []


CALM = {
    "gaps": [(1.0, 0.9)],
    "live": [(1.0, 0.4, "")],
    "memory": [(0.0, 500 * MEGABYTE), (1.0, 790 * MEGABYTE), (2.0, 550 * MEGABYTE)],
    "pids": [(0.0, (1, 2, 3))],
}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, None),
        ({"gaps": [(1.0, 1.1)]}, "paused for 1.10 s"),
        ({"live": [(1.0, 0.6, "")]}, "/live took 0.60 s"),
        ({"live": [(1.0, 0.1, "0 refused")]}, "/live failed"),
        ({"troubles": [(1.0, "other tokens")]}, "other tokens"),
        ({"memory": [(0.0, 0), (1.0, 400 * MEGABYTE), (2.0, 0)]}, "grew by 400 MB"),
        ({"memory": [(0.0, 0), (1.0, 100 * MEGABYTE)]}, "100 MB more"),
        ({"pids": [(0.0, (1, 2)), (1.0, (1, 4))]}, "processes have died"),
    ],
)
def test_judge_violations_name_the_effects_on_others(arena, more, words):
    outcome = AttackOutcome("x")
    judge(outcome, arena, Notes(**(CALM | more)), Limits(), seconds=1.0)
    assert len(outcome.violations) == (words is not None)
    assert all(words in violation for violation in outcome.violations)
