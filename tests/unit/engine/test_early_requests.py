from __future__ import annotations

from eagleray.engine.early_requests import JOIN_TIMEOUT_SECONDS, EarlyRequests
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


def test_early_requests_are_kept_in_order_per_client():
    early = EarlyRequests()
    call = CallWorkers(client=ALICE, call_id=1, method="m", arguments=b"", timeout=1.0)
    asked = [generate("a"), call, generate("b")]
    for request in (*asked, generate("c", BOB)):
        early.keep(request, 0.0)
    assert early.pop(ALICE) == asked
    assert early.pop(ALICE) == []
    assert early.pop(BOB) == [generate("c", BOB)]


def test_early_requests_abort_keeps_worker_calls():
    early = EarlyRequests()
    call = CallWorkers(client=ALICE, call_id=1, method="m", arguments=b"", timeout=1.0)
    for request in (generate("a"), call, generate("b"), generate("a", BOB)):
        early.keep(request, 0.0)
    early.abort(ALICE, ["a", "unknown"])
    early.abort(ClientId("i", 2), ["a"])
    assert early.pop(ALICE) == [call, generate("b")]
    assert early.pop(BOB) == [generate("a", BOB)]


def test_early_requests_expiry_counts_from_first_request():
    early = EarlyRequests()
    early.keep(generate("a"), 10.0)
    early.keep(generate("b"), 20.0)
    early.keep(generate("c", BOB), 20.0)
    assert early.expire(10.0 + JOIN_TIMEOUT_SECONDS) == []
    assert early.expire(11.0 + JOIN_TIMEOUT_SECONDS) == [ALICE]
    assert early.pop(ALICE) == []
    assert early.pop(BOB) == [generate("c", BOB)]
    early.keep(generate("a"), 100.0)
    assert early.expire(100.0) == []
