"""The memory that the cache may take, and the wait for memory that others give back."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from eagleray.errors import ConfigError
from eagleray.worker.memory import (
    check_cache_fits,
    gpu_cache_bytes,
    host_cache_bytes,
    wait_for_memory,
    wait_for_weights,
)
from eagleray.worker.timeouts import MEMORY_POLL_SECONDS, MEMORY_SETTLE_SECONDS, MEMORY_TIMEOUT_SECONDS

GIB = 2**30
SIZES = {"total": 80 * GIB, "utilization": 0.9, "reserved": GIB, "num_tokens": 8192, "num_weight_bytes": 60 * GIB}


class FakeGpu:
    """A GPU whose free memory is a function of the time since the beginning."""

    def __init__(self, free_at: Callable[[float], float]) -> None:
        self.now = 1000.0
        self._free_at = free_at

    def read_free(self) -> int:
        return int(self._free_at(self.now - 1000.0) * GIB)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, wanted: float) -> tuple[float, float]:
        """Return (GiB that are free in the end, seconds waited)."""
        free = wait_for_memory(int(wanted * GIB), self.read_free, clock=lambda: self.now, sleep=self.sleep)
        return free / GIB, self.now - 1000.0


def test_gpu_cache_takes_what_the_engine_may_use_beside_what_is_used():
    assert gpu_cache_bytes(free=18 * GIB, **SIZES) == 72 * GIB - 62 * GIB - GIB


def test_gpu_cache_without_memory_is_an_error_with_numbers_and_options():
    with pytest.raises(ConfigError, match=r"80\.0 GiB, of which 9\.0 GiB are free .*60\.0 GiB.*8192 tokens") as error:
        gpu_cache_bytes(free=9 * GIB, **SIZES)
    for option in ("gpu_memory_utilization", "now 0.9", "max_num_batched_tokens", "tensor_parallel_size"):
        assert option in str(error.value)


def test_gpu_cache_without_memory_names_the_slots_for_adapters():
    message = r"60\.0 GiB, with slots for adapters of 4\.0 GiB\) .* lower `max_loras`, `max_lora_rank`, `max_num_b"
    with pytest.raises(ConfigError, match=message):
        gpu_cache_bytes(free=9 * GIB, num_adapter_bytes=4 * GIB, **SIZES)


def test_host_cache_takes_half_of_what_a_workers_steps_leave():
    assert host_cache_bytes(free=10 * GIB, step_bytes=GIB, num_workers=2) == 2 * GIB


def test_host_cache_without_memory_is_an_error_with_numbers_and_options():
    with pytest.raises(ConfigError, match=r"up to 3\.0 GiB, and 5\.0 GiB are free .*for 2 workers.*`max_num_batched"):
        host_cache_bytes(free=5 * GIB, step_bytes=3 * GIB, num_workers=2)


def test_check_cache_fits_larger_than_the_device_is_an_error_with_options():
    check_cache_fits(8 * GIB, total=16 * GIB, num_workers=2)
    message = r"cache of 9\.0 GiB for each of 2 workers does not fit: .* has 16\.0 GiB; lower `kv_cache_memory` or"
    with pytest.raises(ConfigError, match=message):
        check_cache_fits(9 * GIB, total=16 * GIB, num_workers=2)


def test_wait_for_memory_that_is_free_does_not_wait(caplog):
    with caplog.at_level(logging.INFO):
        assert FakeGpu(lambda _: 10).wait(10) == (10, 0)
    assert not caplog.records


def test_wait_for_memory_lasts_until_predecessor_has_exited(caplog):
    with caplog.at_level(logging.INFO):
        free, waited = FakeGpu(lambda now: 2 if now < 4.5 else 70).wait(64)
    assert free == 70 and 4.5 <= waited < 4.5 + 2 * MEMORY_POLL_SECONDS
    assert "until 64.0 GiB of the GPU are free, now 2.0 GiB" in caplog.records[0].getMessage()


def test_wait_for_memory_that_others_keep_ends_soon():
    free, waited = FakeGpu(lambda _: 20).wait(64)
    assert free == 20 and MEMORY_SETTLE_SECONDS <= waited < MEMORY_SETTLE_SECONDS + 2 * MEMORY_POLL_SECONDS


def test_wait_for_memory_goes_on_while_some_is_given_back():
    free, waited = FakeGpu(lambda now: 10 + now).wait(40)
    assert free >= 40 and 30 <= waited < 31


def test_wait_for_memory_has_a_deadline():
    free, waited = FakeGpu(lambda now: now / 10).wait(64)
    assert free < 64 and MEMORY_TIMEOUT_SECONDS <= waited < MEMORY_TIMEOUT_SECONDS + 2 * MEMORY_POLL_SECONDS


def test_wait_for_memory_that_others_take_is_no_memory_given_back():
    free, waited = FakeGpu(lambda now: 30 if int(now) % 4 else 20).wait(64)
    assert free < 64 and waited < 2 * MEMORY_SETTLE_SECONDS


def test_wait_for_weights_that_do_not_fit_is_an_error_with_numbers_and_options():
    wait_for_weights(5 * GIB, lambda: 0, lambda wanted, _: wanted)
    with pytest.raises(ConfigError, match=r"take 5\.0 GiB .* 4\.0 GiB of its GPU are free.*`tensor_parallel_size`"):
        wait_for_weights(5 * GIB, lambda: 0, lambda *_: 4 * GIB)
