"""Every error that eagleray raises on purpose.

    EagleRayError
    ├── UserError (ValueError)        what was asked for cannot be done; the message says what to do instead
    │   ├── ConfigError               an option, or options that do not fit together
    │   ├── CheckpointError           a file of the model: names the file, the tensor, expected and found
    │   ├── ClusterError              Ray: not reachable, or it lacks what was asked for; says what there is
    │   ├── InvalidRequest            a request; `param` names the field
    │   │   └── PromptTooLong
    │   └── UnknownModel
    ├── Unavailable                   cannot be served now, may be later; `retry_after` in seconds
    │   └── Overloaded                too much is in flight already
    ├── RequestFailed                 this request alone failed while it ran
    ├── EngineFailed                  an engine ended; `cause` says why
    ├── WorkerFailed                  a worker raised; identity, type, message and traceback of the original
    ├── WorkerLost                    a worker died, or was silent for too long; says which, and how it ended
    ├── ClusterLost                   a Ray cluster, or a part of it, that was there is gone
    ├── ProcessCrashed                a process ended by SIGSEGV or its like: nobody else has killed it
    ├── DeadlineExceeded              a wait ended without what it waited for
    └── ChannelClosed                 the other side is gone, or we closed
        └── ExpertGroupBroken         an engine that shares the experts is gone; the others go on with its successor

`UserError`s are the user's to mend, everything else is ours or the machine's.
"""

from __future__ import annotations


class EagleRayError(Exception):
    """Base of all errors that eagleray raises on purpose."""


class UserError(EagleRayError, ValueError):
    """What the user asked for cannot be done."""


class ConfigError(UserError):
    """An option is wrong, or options contradict each other."""


class CheckpointError(UserError):
    """A checkpoint file is missing, damaged, or does not hold what its configuration says."""


class ClusterError(UserError):
    """The Ray cluster cannot be reached, or has not got what was asked for."""


class InvalidRequest(UserError):
    """A request asks for something impossible. `param` is the offending field, if it is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    """The prompt does not fit into the model's length."""


class UnknownModel(UserError):
    """The request names a model that is not served here."""


class Unavailable(EagleRayError):
    """The request cannot be served at present."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Overloaded(Unavailable):
    """There are as many requests in flight as are allowed."""


class RequestFailed(EagleRayError):
    """One request failed while it ran; no other was touched."""


class EngineFailed(EagleRayError):
    """An engine ended. The message names the engine and the root cause."""


class WorkerFailed(EagleRayError):
    """An exception on a worker, with the original's type, message and traceback in the message."""


class WorkerLost(EagleRayError):
    """A worker is gone, or was not heard of for too long."""


class ClusterLost(EagleRayError):
    """A Ray cluster that was joined, or a part of it that held an engine, is gone. Another try may find it back, or do
    without: nobody's mistake."""


class ProcessCrashed(EagleRayError):
    """A process ended by an instruction of its own that the system does not allow."""


class DeadlineExceeded(EagleRayError, TimeoutError):
    """A wait ended without what it waited for; the message says what that was."""


class ChannelClosed(EagleRayError):
    """The channel was closed, by us or by the death of the other side."""


class ExpertGroupBroken(ChannelClosed):
    """A worker of another engine, with which this one shares the experts, is gone. This one is well, and can join a
    group of a later epoch."""
