"""Every error that eagleray raises on purpose.

    EagleRayError
    ├── UserError (ValueError)        the request cannot be fulfilled; the message says what to do instead
    │   ├── ConfigError               an option, or options that do not fit together
    │   ├── CheckpointError           a file of the model: names the file, the tensor, expected and found
    │   ├── ClusterError              Ray: not reachable, or lacks resources; says which there are
    │   ├── InvalidRequest            a request; `param` names the field
    │   │   ├── UnsupportedParameter  it asks for a feature that does not exist; says what there is instead
    │   │   └── PromptTooLong
    │   ├── UnknownModel
    │   ├── NotFound                  a directory, adapter or operation that does not exist
    │   ├── WrongState                a call that the instance's state forbids; says which call ends that state
    │   └── WeightsMismatch           weights that were pushed: names the tensor, expected and found
    ├── Unavailable                   cannot be served now, perhaps later; `retry_after` in seconds
    │   ├── Overloaded                too much is in flight already
    │   ├── EnginesMissing            a weight update needs engines that are missing
    │   └── TransferBroken            the connection to the trainer of a weight update broke
    ├── RequestFailed                 this request alone failed while it ran
    ├── EngineFailed                  an engine exited; the message says why
    ├── WorkerFailed                  a worker raised; identity, type, message and traceback of the original
    ├── WorkerLost                    a worker exited or sent no heartbeats; says which, and how it exited
    ├── ClusterLost                   a Ray cluster that was joined, or a part of it, is lost
    ├── ProcessCrashed                a process crashed by SIGSEGV or a like signal that no other process sent
    ├── DeadlineExceeded              a wait reached its deadline; the message names what it waited for
    └── ChannelClosed                 the other side exited, or this one closed
        └── ExpertGroupBroken         another engine of the expert group exited; the group is formed anew with its
                                      replacement

The user can correct a `UserError`; every other error is a fault of eagleray or of the machine.
"""

from __future__ import annotations


class EagleRayError(Exception):
    """Base class of all errors that eagleray raises on purpose."""


class UserError(EagleRayError, ValueError):
    """A request of the user that cannot be fulfilled."""


class ConfigError(UserError):
    """An option is wrong, or options contradict each other."""


class CheckpointError(UserError):
    """A checkpoint file is missing, damaged, or does not hold what its configuration says."""


class ClusterError(UserError):
    """The Ray cluster cannot be reached or lacks the requested resources."""


class InvalidRequest(UserError):
    """A request asks for something impossible. `param` names the offending field, if there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedParameter(InvalidRequest):
    """A request asks for a feature that does not exist. The message says what there is instead."""


class PromptTooLong(InvalidRequest):
    """The prompt does not fit into the model's length."""

    @classmethod
    def for_model(cls, cause: str, max_model_len: int, *, param: str = "prompt") -> PromptTooLong:
        """Return the error for a prompt that leaves no room for an output. `cause` says why it is too long.

        Client libraries look for the sentence's first words, and for "prompt is too long".
        """
        return cls(
            f"This model's maximum context length is {max_model_len} tokens, prompt and output together. The prompt is "
            f"too long: {cause}; shorten it to at most {max_model_len - 1}.",
            param=param,
        )


class UnknownModel(UserError):
    """The request names a model that is not served here."""


class NotFound(UserError):
    """A directory, an adapter or an operation that does not exist."""


class WrongState(UserError):
    """The state of the instance forbids the call. The message says which call ends that state."""


class WeightsMismatch(UserError):
    """Weights that were pushed do not fit the model. The old ones stay."""


class Unavailable(EagleRayError):
    """The request cannot be served at present."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Overloaded(Unavailable):
    """The limit of requests in flight is reached."""


class EnginesMissing(Unavailable):
    """A weight update needs engines that are missing. The message says why they are."""


class TransferBroken(Unavailable):
    """The transfer of weights from a trainer broke. The old weights stay."""


class RequestFailed(EagleRayError):
    """A request failed while it ran; no other was affected."""


class EngineFailed(EagleRayError):
    """An engine exited. The message names the engine and the root cause."""


class WorkerFailed(EagleRayError):
    """An exception on a worker, with the original's type, message and traceback in the message."""


class WorkerLost(EagleRayError):
    """A worker exited or stopped sending heartbeats."""


class ClusterLost(EagleRayError):
    """A Ray cluster that was joined, or a part of it that held an engine, is lost. Another attempt may succeed; the
    user made no mistake."""


class ProcessCrashed(EagleRayError):
    """A process crashed by a signal such as SIGSEGV, which no other process sent."""


class DeadlineExceeded(EagleRayError, TimeoutError):
    """A wait reached its deadline; the message names what it waited for."""


class ChannelClosed(EagleRayError):
    """The channel was closed, by this side or by the exit of the other."""


class ExpertGroupBroken(ChannelClosed):
    """A worker of another engine of the expert group exited. This worker is intact and can join a group of a later
    epoch."""


class FailedCall(Exception):
    """A call failed on a rank of a compiled graph. Raised, because a graph returns results only once all ranks have
    one, and the peers of a failed rank wait for it."""

    def __init__(self, reply: bytes) -> None:
        super().__init__(reply)
        self.reply = reply
        """The encoded `Reply`, with its `Ended`."""
