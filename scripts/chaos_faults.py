"""Fault injection: every few seconds a random process is killed or stopped for ever, or a host or its link fails."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from chaos_server import CONTROL_STORE, FORK_SERVER, RAYLET, Target, age

KILL, STOP, CUT, SHORT_CUT = "SIGKILL", "SIGSTOP", "cut", "short cut"
SIGNALS = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP}

WEIGHTS = {
    "engine": 5,
    "worker": 3,
    "API server": 2,
    "driver": 1,
    "host": 5,
    FORK_SERVER: 1,
    RAYLET: 3,
    CONTROL_STORE: 1,
}
NEVER_STOPPED = (RAYLET, CONTROL_STORE)
"""Daemons that are only killed: Ray waits a minute or more for a silent node, and chaos tests how exits are handled."""

STOP_SHARE = 0.25
"""Share of faults that are SIGSTOP: the process still exists, but no longer sends."""

HASTE_SHARE = 0.2
"""Share of faults that may hit a process that has just started. If all did, no engine would ever be ready."""

GRACE_SECONDS = 2.0
"""Clients may notice an exit before this program does, and a connection may wait in the backlog."""


@dataclass(frozen=True)
class Fault:
    when: float
    """Time of the fault, by `time.monotonic`."""
    member: Target
    how: str

    @property
    def label(self) -> str:
        return f"{self.how} {self.member.kind}"

    @property
    def is_stop(self) -> bool:
        return self.how == STOP

    @property
    def ends_engine(self) -> bool:
        return self.member.kind not in ("API server", FORK_SERVER)  # all engines of a driver exit with it


class Hosts(Protocol):
    """Faults of whole hosts."""

    def hosts(self) -> list[Target]:
        """Return the hosts that faults may hit."""

    def inject(self, host: Target, how: str) -> None:
        """Inject a fault; return when the number of hosts is the same as before."""


class FaultInjector:
    """Injects a fault about `every` seconds until it is cancelled or there were `most` of them, mostly into processes
    older than `settled` seconds.

    `members` returns the present processes, and `victims` has the kinds of them that may be hit. A stopped process is
    declared dead `missed_after` seconds later. `hosts`: the engines' own hosts, if they have some.
    """

    def __init__(
        self,
        members: Callable[[], list[Target]],
        *,
        every: float,
        settled: float,
        missed_after: float,
        rng: random.Random,
        victims: Collection[str] = tuple(WEIGHTS),
        hosts: Hosts | None = None,
        most: float = math.inf,
    ) -> None:
        self._members = members
        self._hosts = hosts
        self._every = every
        self._settled = settled
        self._missed_after = missed_after
        self._rng = rng
        self._victims = victims
        self._most = most
        self.faults: list[Fault] = []

    async def run(self) -> None:
        await asyncio.sleep(self._every / 2)
        while len(self.faults) < self._most:
            await self._inject(is_hasty=self._rng.random() < HASTE_SHARE)
            await asyncio.sleep(self._every * self._rng.uniform(0.5, 1.5))

    def may_have_hit_api_server(self, since: float) -> bool:
        """Whether an API server may have exited after `since` or shortly before. A stopped one exits when missed."""
        return any(
            fault.member.kind == "API server"
            and fault.when + GRACE_SECONDS + (self._missed_after if fault.is_stop else 0.0) > since
            for fault in self.faults
        )

    async def strike(self) -> None:
        """Inject a fault now, into a process that has been there for a while, unless there were `most`."""
        if len(self.faults) < self._most:
            await self._inject(is_hasty=False)

    async def _inject(self, *, is_hasty: bool) -> None:
        stopped = {fault.member.pid for fault in self.faults if fault.is_stop}
        members = [member for member in await asyncio.to_thread(self._members) if member.pid not in stopped]
        members += [] if self._hosts is None else await asyncio.to_thread(self._hosts.hosts)
        members = [member for member in members if member.kind in self._victims]
        settled = [member for member in members if age(member.pid) >= self._settled]
        if not settled:
            return
        candidates = members if is_hasty else settled
        kinds = sorted({member.kind for member in candidates})
        (kind,) = self._rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])
        member = self._rng.choice([member for member in candidates if member.kind == kind])
        if self._hosts is not None and member.kind == "host":
            how = self._rng.choice((KILL, CUT, SHORT_CUT))
            self.faults.append(Fault(time.monotonic(), member, how))
            await asyncio.to_thread(self._hosts.inject, member, how)
            return
        # a process that is stopped before its first message is missed only when its time to start has passed
        may_stop = not is_hasty and kind not in NEVER_STOPPED
        how = STOP if self._rng.random() < STOP_SHARE and may_stop else KILL
        try:
            os.kill(member.pid, SIGNALS[how])
        except ProcessLookupError:  # it has exited by itself
            return
        self.faults.append(Fault(time.monotonic(), member, how))
