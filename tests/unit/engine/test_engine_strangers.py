from __future__ import annotations

from eagleray.engine.early_requests import PATIENCE_SECONDS, EarlyRequests
from eagleray.identity import ClientId
from eagleray.messages.requests import CallWorkers, Generate
from eagleray.messages.sampling import Sampling, Stopping

ALICE, BOB = ClientId("i", 0), ClientId("i", 1)


def generate(request_id: str, client: ClientId = ALICE) -> Generate:
    return Generate(
        request_id=request_id,
        client=client,
        prompt_token_ids=[1],
        sampling=Sampling(seed=0),
        stopping=Stopping(max_tokens=1),
    )


def test_what_was_asked_is_kept_in_order_for_each():
    strangers = EarlyRequests()
    call = CallWorkers(client=ALICE, call_id=1, method="m", arguments=b"", timeout=1.0)
    asked = [generate("a"), call, generate("b")]
    for request in (*asked, generate("c", BOB)):
        strangers.keep(request, 0.0)
    assert strangers.take(ALICE) == asked
    assert strangers.take(ALICE) == []
    assert strangers.take(BOB) == [generate("c", BOB)]


def test_an_abort_takes_requests_back_but_no_calls():
    strangers = EarlyRequests()
    call = CallWorkers(client=ALICE, call_id=1, method="m", arguments=b"", timeout=1.0)
    for request in (generate("a"), call, generate("b"), generate("a", BOB)):
        strangers.keep(request, 0.0)
    strangers.abort(ALICE, ["a", "unknown"])
    strangers.abort(ClientId("i", 2), ["a"])
    assert strangers.take(ALICE) == [call, generate("b")]
    assert strangers.take(BOB) == [generate("a", BOB)]


def test_patience_counts_from_the_first_request_of_each():
    strangers = EarlyRequests()
    strangers.keep(generate("a"), 10.0)
    strangers.keep(generate("b"), 20.0)
    strangers.keep(generate("c", BOB), 20.0)
    assert strangers.expire(10.0 + PATIENCE_SECONDS) == []
    assert strangers.expire(11.0 + PATIENCE_SECONDS) == [ALICE]
    assert strangers.take(ALICE) == []
    assert strangers.take(BOB) == [generate("c", BOB)]
    strangers.keep(generate("a"), 100.0)
    assert strangers.expire(100.0) == []
