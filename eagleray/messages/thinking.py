"""The thinking before the answer of a completion, as it travels from the client to the worker that samples."""

from __future__ import annotations

import msgspec


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token ids by which the thinking of a completion is followed, and its limits. Raises `ValueError` if it would not
    end."""

    end: tuple[int, ...]
    """Marker by which the model ends its thinking."""
    starts: tuple[tuple[int, ...], ...] = ()
    """Markers by which the model may begin to think, as the first tokens of the completion."""
    is_open: bool = False
    """Whether the completion begins with thinking, even without a marker."""
    is_required: bool = False
    """Whether a completion with a grammar must begin with one of `starts`, unless it `is_open`."""
    budget: int | None = None
    """Number of tokens of thinking after which it is ended; None: no limit."""
    forced_end: tuple[int, ...] = ()
    """Tokens that are generated when the budget is used. They end with `end`."""
    interrupts: tuple[int, ...] = ()
    """Tokens that end the thinking without an end marker, and belong to the answer."""
    forbidden: tuple[int, ...] = ()
    """Tokens that are not generated during the thinking."""
    answer_header: tuple[int, ...] = ()
    """Tokens that are generated between the thinking and the text of a grammar."""

    def __post_init__(self) -> None:
        if not self.end or (self.budget is not None and self.forced_end[-len(self.end) :] != self.end):
            raise ValueError("`end` must have tokens, and with a budget `forced_end` must end with them")
