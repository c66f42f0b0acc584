"""Progress of a batch: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from tqdm import tqdm

from eagleray.log import get_logger

logger = get_logger(__name__)

LINE_SECONDS = 10.0
"""Time between two lines where there is no terminal."""


class _UsageFields(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _AnswerFields(msgspec.Struct):
    usage: _UsageFields | None = None


_USAGE = msgspec.json.Decoder(_AnswerFields)


class BatchProgress:
    """Counts rows and tokens, and shows them: by a bar if `is_terminal`, not at all unless `is_shown`."""

    def __init__(
        self, *, is_terminal: bool, is_shown: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bar = tqdm(desc="rows", unit=" rows", disable=not (is_terminal and is_shown))
        self._has_lines = is_shown and not is_terminal
        self._clock = clock
        self._began = self._last_line = clock()
        self.num_rows = self.num_failed = self.num_skipped = 0
        self.prompt_tokens = self.output_tokens = 0

    def skip(self) -> None:
        """Count a row that was answered before."""
        self.num_skipped += 1

    def count_tokens(self, body: bytes) -> None:
        """Count the tokens of an answer, if it tells them."""
        try:
            usage = _USAGE.decode(body).usage
        except msgspec.MsgspecError:
            return
        if usage is not None:
            self.prompt_tokens += usage.prompt_tokens + usage.input_tokens
            self.output_tokens += usage.completion_tokens + usage.output_tokens

    def finish_row(self, *, failed: bool) -> None:
        """Count an answer that has been written."""
        self.num_rows += 1
        self.num_failed += failed
        if not self._bar.disable:
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update()
        elif self._has_lines and self._clock() - self._last_line >= LINE_SECONDS:
            self._last_line = self._clock()
            logger.info("%s", self.describe())

    def describe(self) -> str:
        """Return a line about everything so far."""
        skipped = f", {self.num_skipped} answered before" if self.num_skipped else ""
        return f"{self.num_rows} rows answered, {self.num_failed} of them by errors{skipped}; {self._rates()}"

    def close(self) -> None:
        """End the bar."""
        self._bar.close()

    def _rates(self) -> str:
        seconds = max(self._clock() - self._began, 1e-9)
        return f"{self.prompt_tokens / seconds:,.0f} tokens/s in, {self.output_tokens / seconds:,.0f} out"
