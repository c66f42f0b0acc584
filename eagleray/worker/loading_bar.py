"""The bar of a terminal that shows how many of the weights have been loaded."""

from __future__ import annotations

from typing import NoReturn

from tqdm import tqdm

from eagleray.log import open_bar


class LoadingBar:
    """A bar that opens with the first weights: before them kernels may be compiled, which has a bar of its own."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._bar: tqdm[NoReturn] | None = None

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are loaded."""
        if self._bar is None:
            self._bar = open_bar(
                desc="loading weights", total=total, unit="B", unit_scale=True, is_shown=self._is_shown
            )
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it is. Idempotent."""
        if self._bar is not None:
            self._bar.close()
