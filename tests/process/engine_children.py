"""Engines of `test_engine_process.py` that do not survive their first step."""

from __future__ import annotations

import functools
import os
import time
from typing import Any, NoReturn

from eagleray.engine import entry
from eagleray.engine.watchdog import Watchdog
from eagleray.process.parent import Parent
from eagleray.worker.runner import Runner


def hang_in_a_step(payload: bytes, parent: Parent) -> None:
    def begin(self: Runner, plan: Any) -> NoReturn:
        while True:
            time.sleep(60)

    Runner.begin = begin
    entry.Watchdog = functools.partial(Watchdog, grace=0.1, tick=0.1)
    entry.run(payload, parent)


def die_in_a_step(payload: bytes, parent: Parent) -> None:
    def begin(self: Runner, plan: Any) -> NoReturn:
        time.sleep(0.5)  # messages are sent by a thread, which an exit at once would not let run
        os._exit(3)

    Runner.begin = begin
    entry.run(payload, parent)
