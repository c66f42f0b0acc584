from __future__ import annotations

import math

import msgspec
import pytest
from engine_fakes import CountingGroup

from eagleray.config.build import build_config
from eagleray.engine.startup import check_kernels, start_engine
from eagleray.errors import ConfigError
from eagleray.executor.executor import Executor
from eagleray.messages.steps import AllocateCache, MeasureMemory, ModelLoaded


def start(group: CountingGroup, **options) -> int:
    """The number of cache blocks that the engine got."""
    return start_engine(build_config(**options), Executor(group), depth=1, deadline=math.inf).info.num_kv_blocks


def test_the_cache_takes_the_memory_that_there_is():
    group = CountingGroup(available_bytes=5_000)
    assert start(group) == 50
    assert AllocateCache(50) in group.calls
    assert MeasureMemory(512) in group.calls


def test_the_cache_takes_no_more_than_its_rows_could_use():
    assert start(CountingGroup(available_bytes=10**9), max_num_seqs=2, block_size=10) == 20


def test_the_user_decides_the_size_in_blocks_or_bytes():
    assert start(CountingGroup(), num_kv_blocks=33) == 33
    assert start(CountingGroup(), kv_cache_memory="2000") == 20


def test_a_cache_too_small_for_one_sequence_says_what_would_fit():
    with pytest.raises(ConfigError) as raised:
        start(CountingGroup(max_model_len=100), num_kv_blocks=3)
    message = str(raised.value)
    assert "3 blocks, 48 tokens" in message
    assert "`max_model_len` to at most 48" in message
    assert "`num_kv_blocks` of 7" in message


def test_a_cache_has_no_more_places_than_kernels_can_count():
    with pytest.raises(ConfigError, match="has more than 2,147,483,647 places"):
        start(CountingGroup(), num_kv_blocks=2**27)


def test_workers_with_different_kernels_do_not_work_together():
    one = ModelLoaded(
        architecture="",
        num_parameters=1,
        vocab_size=2,
        max_model_len=3,
        bytes_per_block=4,
        device="cpu",
        kernels="CpuBackend",
    )
    check_kernels([one, one])
    with pytest.raises(ConfigError, match=r"CpuBackend: rank 0, 2; OneDnnBackend: rank 1"):
        check_kernels([one, msgspec.structs.replace(one, kernels="OneDnnBackend"), one])
