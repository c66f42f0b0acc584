"""Python's garbage collector, kept from pausing a process that serves."""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Exclude all present objects from garbage collection; called once a process has made what it keeps.

    A full collection visits every object, in the middle of a stream: 0.1 s with torch loaded, next to nothing
    afterwards. Present garbage is kept too: collecting it here would run Ray's finalizers inside compiled graphs, whose
    workers were seen to hang then.
    """
    gc.freeze()
