"""Progress of many requests: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from eagleray.log import get_logger, has_bars, open_bar

logger = get_logger(__name__)

LINE_SECONDS = 10.0
"""Time between two lines where there is no terminal."""


class Progress:
    """Counts requests and tokens, and shows them, until it is closed. A context manager.

    `unit`: name of the requests, such as `prompts`. `total`: their number, if it is known. `is_terminal`: whether
    there is a bar; None: whether standard error may have bars. Without `is_shown`, nothing is shown.
    """

    def __init__(
        self,
        unit: str,
        total: int | None = None,
        *,
        is_terminal: bool | None = None,
        is_shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        has_bar = has_bars() if is_terminal is None else is_terminal
        self._unit = unit
        self._bar = open_bar(total=total, desc=unit, is_shown=has_bar and is_shown)
        self._has_lines = is_shown and not has_bar
        self._clock = clock
        self._began = self._last_line = clock()
        self.num_finished = self.num_failed = self.num_skipped = 0
        self.prompt_tokens = self.output_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def skip(self) -> None:
        """Count a request that was answered before."""
        self.num_skipped += 1

    def add_tokens(self, prompt: int, output: int) -> None:
        """Count the tokens of a request that finishes."""
        self.prompt_tokens += prompt
        self.output_tokens += output

    def finish(self, *, failed: bool = False) -> None:
        """Count a request that has finished."""
        self.num_finished += 1
        self.num_failed += failed
        if not self._bar.disable:
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update()
        elif self._has_lines and self._clock() - self._last_line >= LINE_SECONDS:
            self._last_line = self._clock()
            logger.info("%s", self.describe())

    def describe(self) -> str:
        """Return a line about everything so far."""
        of_all = "" if self._bar.total is None else f" of {self._bar.total}"
        failed = f", {self.num_failed} of them with errors" if self.num_failed else ""
        skipped = f", {self.num_skipped} answered before" if self.num_skipped else ""
        return f"{self.num_finished}{of_all} {self._unit} finished{failed}{skipped}; {self._rates()}"

    def close(self) -> None:
        """End the bar."""
        self._bar.close()

    def _rates(self) -> str:
        seconds = max(self._clock() - self._began, 1e-9)
        return f"{self.prompt_tokens / seconds:,.0f} tokens/s in, {self.output_tokens / seconds:,.0f} out"
