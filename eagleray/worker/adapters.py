"""Loading of adapters at one worker."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from eagleray.errors import CheckpointError, UserError
from eagleray.messages.failure import Failure
from eagleray.messages.steps import AdapterWritten, WriteAdapter
from eagleray.models.base import Model


def write_adapter(model: Model, call: WriteAdapter) -> AdapterWritten:
    """Read an adapter into its slot. A file that is wrong or disappears is a failure in the reply, not of the worker:
    no row uses the slot."""
    assert model.adapters is not None, "the model was loaded without slots for adapters"
    try:
        return AdapterWritten(digest=model.adapters.load(call.slot, Path(call.path)))
    except UserError as error:
        return AdapterWritten(failure=Failure.of(error))
    except (OSError, SafetensorError, ValueError) as error:
        return AdapterWritten(failure=Failure.of(CheckpointError(f"{call.path}: cannot be read: {error}")))
