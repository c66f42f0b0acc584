"""What is done to the server: every few seconds a random process is killed, or stopped for ever; or a host dies, or
its link breaks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from chaos_server import CONTROL_STORE, RAYLET, Member, age

KILL, STOP, CUT, SHORT_CUT = "SIGKILL", "SIGSTOP", "cut", "short cut"
SIGNALS = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP}

WEIGHTS = {"engine": 5, "worker": 3, "API server": 2, "driver": 1, "host": 5, RAYLET: 3, CONTROL_STORE: 1}
NEVER_STOPPED = (RAYLET, CONTROL_STORE)
"""Ray gives a node that is silent a minute or more; chaos is about what the server makes of deaths."""

STOP_SHARE = 0.25
"""So many of the blows are SIGSTOP: a process that is still there, and says nothing any more."""

HASTE_SHARE = 0.2
"""So many of the blows may hit a process that has just begun. All of them would: nobody would ever be there."""

GRACE_SECONDS = 2.0
"""The news of a death may reach a client before it reaches us, and a connection may wait in the backlog."""


@dataclass(frozen=True)
class Blow:
    when: float
    """By `time.monotonic`."""
    member: Member
    how: str

    @property
    def label(self) -> str:
        return f"{self.how} {self.member.kind}"

    @property
    def is_stop(self) -> bool:
        return self.how == STOP

    @property
    def ends_engine(self) -> bool:
        return self.member.kind != "API server"  # all engines of a driver end with it


class Hosts(Protocol):
    """What can be done to hosts as a whole."""

    def hosts(self) -> list[Member]:
        """Those that may be struck."""

    def strike(self, host: Member, how: str) -> None:
        """Until it is over, and there are as many hosts as before."""


class Blows:
    """Strikes until it is cancelled: `every` so many seconds, and mostly who has been there for `settled` seconds.
    `members` says who is there, and `victims` the kinds of them that may be hit; one that is stopped is missed
    `missed_after` seconds later. `hosts`: if there are some besides the one of the server."""

    def __init__(
        self,
        members: Callable[[], list[Member]],
        *,
        every: float,
        settled: float,
        missed_after: float,
        rng: random.Random,
        victims: Collection[str] = tuple(WEIGHTS),
        hosts: Hosts | None = None,
    ) -> None:
        self._members = members
        self._hosts = hosts
        self._every = every
        self._settled = settled
        self._missed_after = missed_after
        self._rng = rng
        self._victims = victims
        self.struck: list[Blow] = []

    async def run(self) -> None:
        await asyncio.sleep(self._every / 2)
        while True:
            await self._strike()
            await asyncio.sleep(self._every * self._rng.uniform(0.5, 1.5))

    def hit_api_server(self, since: float) -> bool:
        """Whether an API server has died after, or shortly before, that time. A stopped one dies when it is missed."""
        return any(
            blow.member.kind == "API server"
            and blow.when + GRACE_SECONDS + (self._missed_after if blow.is_stop else 0.0) > since
            for blow in self.struck
        )

    async def _strike(self) -> None:
        stopped = {blow.member.pid for blow in self.struck if blow.is_stop}
        is_hasty = self._rng.random() < HASTE_SHARE
        members = [member for member in await asyncio.to_thread(self._members) if member.pid not in stopped]
        members += [] if self._hosts is None else await asyncio.to_thread(self._hosts.hosts)
        members = [member for member in members if member.kind in self._victims]
        settled = [member for member in members if age(member.pid) >= self._settled]
        if not settled:
            return
        there = members if is_hasty else settled
        kinds = sorted({member.kind for member in there})
        (kind,) = self._rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])
        member = self._rng.choice([member for member in there if member.kind == kind])
        if self._hosts is not None and member.kind == "host":
            how = self._rng.choice((KILL, CUT, SHORT_CUT))
            self.struck.append(Blow(time.monotonic(), member, how))
            await asyncio.to_thread(self._hosts.strike, member, how)
            return
        # Who is stopped before it has said anything is missed only when its time to start is over.
        may_stop = not is_hasty and kind not in NEVER_STOPPED
        how = STOP if self._rng.random() < STOP_SHARE and may_stop else KILL
        try:
            os.kill(member.pid, SIGNALS[how])
        except ProcessLookupError:  # it was faster
            return
        self.struck.append(Blow(time.monotonic(), member, how))
