"""Refusals of requests for several reasons at once, in one error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from eagleray.errors import InvalidRequest, UnsupportedParameter

MAX_REASONS = 16
"""Number of reasons that an error names; the others are counted."""


class InvalidFields(InvalidRequest):
    """A request with several wrong or unsupported fields. Unsupported ones come first: users ask for them on purpose,
    and the other fields are often wrong only because the feature does not exist. `param` is the first field.
    """

    def __init__(self, reasons: Sequence[InvalidRequest]) -> None:
        unsupported = [reason for reason in reasons if isinstance(reason, UnsupportedParameter)]
        others = [reason for reason in reasons if not isinstance(reason, UnsupportedParameter)]
        self.reasons = [*unsupported, *others]
        num_more = len(reasons) - MAX_REASONS
        texts = [str(reason) for reason in self.reasons[:MAX_REASONS]]
        more = [f"{num_more} more fields are wrong"] if num_more > 0 else []
        super().__init__("; and ".join([*texts, *more]), param=self.reasons[0].param)


class Reasons:
    """Collects the reasons why one request is refused."""

    def __init__(self) -> None:
        self.found: list[InvalidRequest] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep an `InvalidRequest` that the block raises."""
        try:
            yield
        except InvalidFields as error:
            self.found += error.reasons
        except InvalidRequest as error:
            self.found.append(error)

    def check(self) -> None:
        """Raise the error for what was found. Harmless if there is nothing."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise InvalidFields(self.found)
