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
    """Start an engine and return its number of cache blocks."""
    return start_engine(build_config(**options), Executor(group), deadline=math.inf).info.num_kv_blocks


def test_start_engine_default_cache_uses_measured_memory():
    group = CountingGroup(available_bytes=5_000)
    assert start(group) == 50
    assert AllocateCache(50, 512) in group.calls
    assert MeasureMemory(512) in group.calls


def test_start_engine_cache_is_capped_at_rows_of_full_length():
    assert start(CountingGroup(available_bytes=10**9), max_num_seqs=2, block_size=10) == 20


def test_start_engine_cache_size_option_is_used():
    assert start(CountingGroup(), num_kv_blocks=33) == 33
    assert start(CountingGroup(), kv_cache_memory="2000") == 20


def test_start_engine_small_cache_error_names_what_fits():
    with pytest.raises(ConfigError) as raised:
        start(CountingGroup(max_model_len=100), num_kv_blocks=3)
    message = str(raised.value)
    assert "3 blocks, 48 tokens" in message
    assert "`max_model_len` to at most 48" in message
    assert "`num_kv_blocks` of 7" in message


def test_start_engine_auto_length_is_what_fits_into_the_cache(caplog):
    caplog.set_level("INFO", "eagleray")
    for num_blocks, length in ((3, 48), (7, 100)):
        config = build_config(max_model_len="auto", num_kv_blocks=num_blocks)
        started = start_engine(config, Executor(CountingGroup(max_model_len=100)), deadline=math.inf)
        assert started.info.max_model_len == length
    assert "3 blocks of 16 tokens, 0.00 GiB per worker: 48 tokens, 1 request of the full length of 48" in caplog.text
    assert caplog.text.count("`max_model_len` auto: 48 tokens") == 1


def test_start_engine_cache_size_beyond_use_is_explained(caplog):
    caplog.set_level("INFO", "eagleray")
    assert start(CountingGroup(max_model_len=10), max_num_seqs=2, block_size=10, kv_cache_memory="1GiB") == 2
    message = (
        "`kv_cache_memory` 1GiB is more than `max_num_seqs` 2 requests of 10 tokens can use: the cache has 2 blocks"
    )
    assert message in caplog.text


def test_start_engine_cache_beyond_slot_limit_is_refused():
    with pytest.raises(ConfigError, match="has more than 2,147,483,647 slots"):
        start(CountingGroup(), num_kv_blocks=2**27)


def test_check_kernels_different_kernels_are_refused():
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
