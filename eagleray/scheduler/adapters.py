"""The slots for low-rank adapters of an engine, and the requests that use them.

An adapter that is replaced or unloaded keeps its slot until the requests that began with it have finished. Owned by the
scheduler; `engine/adapters.py` has the workers load adapters into the slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eagleray.errors import InvalidRequest
from eagleray.messages.adapters import Adapter


@dataclass(eq=False, slots=True)
class AdapterInSlot:
    adapter: Adapter
    slot: int
    num_requests: int = 0
    num_running: int = 0
    """Number of the requests that have a row."""
    is_retired: bool = False
    """Whether the adapter was replaced or unloaded."""

    @property
    def number(self) -> int:
        return self.adapter.number


class AdapterSlots:
    """`num_slots` slots, all of them free at first."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(reversed(range(num_slots)))
        self._used: dict[int, AdapterInSlot] = {}
        """Adapters with a slot, by number."""
        self._missing: dict[str, str] = {}
        """Reasons why this engine lacks adapters of the instance, by name."""

    def __contains__(self, number: int) -> bool:
        return number in self._used

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the adapters of requests that have a row."""
        return _names(each for each in self._used.values() if each.num_running)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of the adapters of requests that have none."""
        return _names(each for each in self._used.values() if each.num_requests > each.num_running)

    def allocate(self, adapter: Adapter) -> AdapterInSlot:
        """Give a free slot to an adapter, which requests may use from now on."""
        assert adapter.number not in self._used
        used = self._used[adapter.number] = AdapterInSlot(adapter, self._free.pop())
        self._missing.pop(adapter.name, None)
        return used

    def set_missing(self, name: str, reason: str) -> None:
        """Let requests for an adapter that could not be loaded fail with this reason."""
        self._missing[name] = reason

    def retire(self, number: int) -> None:
        """Free the slot of an adapter as soon as no request uses it."""
        if used := self._used.get(number):
            used.is_retired = True
            self._free_if_unused(used)

    def retire_others(self, kept: Iterable[Adapter]) -> None:
        """Retire all adapters but these."""
        kept = list(kept)
        for number in self._used.keys() - {adapter.number for adapter in kept}:
            self.retire(number)
        names = {adapter.name for adapter in kept}
        self._missing = {name: reason for name, reason in self._missing.items() if name in names}

    def find(self, name: str, number: int) -> AdapterInSlot:
        """Return the adapter for a request. A request that comes from another engine, or was sent while the adapter was
        replaced, gets the current adapter if the one with its number is gone.

        Raises `InvalidRequest` if no adapter has the name.
        """
        used = self._used.get(number)
        if used is not None and used.adapter.name == name:
            return used
        current = [each for each in self._used.values() if each.adapter.name == name and not each.is_retired]
        if not current:
            reason = self._missing.get(name, "it is not loaded, or was unloaded")
            raise InvalidRequest(f"adapter {name!r} cannot be used: {reason}", param="model")
        return max(current, key=lambda each: each.number)

    def retain(self, used: AdapterInSlot) -> None:
        """Count a request that uses the adapter."""
        used.num_requests += 1

    def release(self, used: AdapterInSlot) -> None:
        """Count a request of the adapter as finished."""
        used.num_requests -= 1
        self._free_if_unused(used)

    def _free_if_unused(self, used: AdapterInSlot) -> None:
        if used.is_retired and used.num_requests == 0 and used.number in self._used:
            del self._used[used.number]
            self._free.append(used.slot)


def _names(adapters: Iterable[AdapterInSlot]) -> tuple[str, ...]:
    """Return the names in order, each once: an adapter and its replacement have the same."""
    return tuple(sorted({each.adapter.name for each in adapters}))
