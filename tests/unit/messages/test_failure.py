from __future__ import annotations

import pytest

from eagleray.errors import ConfigError, ProcessCrashed, WorkerLost
from eagleray.identity import ClientId, DriverId, EngineId, WorkerId
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended, Failure


@pytest.mark.parametrize(
    ("failure", "text", "is_exception"),
    [
        (Failure.noticed("it was killed by SIGKILL"), "it was killed by SIGKILL", False),
        (Failure.of(ProcessCrashed("it was killed by SIGSEGV")), "it was killed by SIGSEGV", False),
        (Failure.of(WorkerLost("worker 1 is gone")), "WorkerLost: worker 1 is gone", True),
        (Failure.of(ConfigError("option `x`: too large")), "option `x`: too large", True),
    ],
)
def test_failure_text_names_the_exception_unless_the_message_is_complete(failure, text, is_exception):
    assert str(failure) == text
    assert failure.is_exception == is_exception


def test_failure_of_user_error_is_raised_as_the_same_class():
    assert isinstance(Failure.of(ConfigError("x")).as_user_error(), ConfigError)


@pytest.mark.parametrize(
    "member", [EngineId("i", 1, 2), ClientId("i", 3), WorkerId(EngineId("i", 0), tp=1), DriverId("i", 4)]
)
def test_ended_of_every_kind_of_process_survives_encoding(member):
    codec: Codec[Ended] = Codec(Ended)
    ended = Ended(member, Failure.noticed("it fell silent"))
    assert codec.decode(codec.encode(ended)) == ended
