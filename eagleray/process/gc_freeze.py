"""Python's garbage collector, kept from pausing a process that serves."""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """For a process of ours, when it has made what it keeps to its end: the collector looks at that no more.

    Now and then it looks at all objects there are, in the middle of somebody's stream. With torch loaded that takes a
    tenth of a second, afterwards next to nothing. What is garbage by now stays, too: to collect it here would run Ray's
    finalizers inside compiled graphs, whose workers were seen to hang then.
    """
    gc.freeze()
