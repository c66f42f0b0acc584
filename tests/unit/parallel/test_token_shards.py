from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from eagleray.parallel.token_shards import token_counts, token_shard


@given(size=st.integers(1, 8), count=st.integers(0, 40))
def test_token_shard_all_ranks_cover_the_batch_in_order(size, count):
    shards = [token_shard(count, SimpleNamespace(rank=rank, size=size)) for rank in range(size)]
    assert [token for shard in shards for token in shard] == list(range(count))
    assert [len(shard) for shard in shards] == token_counts(count, size)
    assert max(map(len, shards)) == -(-count // size)
