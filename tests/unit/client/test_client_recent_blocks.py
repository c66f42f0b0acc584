"""The guess of the blocks in an engine's prefix cache."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from eagleray.client.routing.recent_blocks import RecentBlocks, block_hashes


def test_block_hashes_name_full_blocks_without_last_token():
    hashes = block_hashes([1, 2, 3, 4, 5], block_size=2, cache_salt="")
    assert len(hashes) == 2
    assert len(block_hashes([1, 2, 3, 4], block_size=2, cache_salt="")) == 1  # the last token is always computed
    assert block_hashes([1], block_size=2, cache_salt="") == []
    assert block_hashes([1, 2, 3, 4, 9], block_size=2, cache_salt="") == hashes
    assert block_hashes([1, 2, 9, 4, 5], block_size=2, cache_salt="")[0] == hashes[0]
    assert block_hashes([9, 2, 3, 4, 5], block_size=2, cache_salt="")[1] != hashes[1]
    assert not set(block_hashes([1, 2, 3, 4, 5], block_size=2, cache_salt="s")) & set(hashes)


def test_recent_blocks_over_capacity_forget_oldest_from_end_of_prompt():
    blocks = RecentBlocks(5)
    blocks.use([1, 2, 3])
    blocks.use([4, 5, 6])
    assert [blocks.match(hashes) for hashes in ([1, 2, 3], [4, 5, 6], [4, 9])] == [2, 3, 1]
    blocks.use([1, 2, 7])
    assert [blocks.match(hashes) for hashes in ([1, 2, 7], [4, 5, 6], [1, 2, 3])] == [3, 2, 2]
    blocks.use(list(range(10, 20)))
    assert (len(blocks), blocks.match(list(range(10, 20)))) == (5, 5)


def test_confirm_fewer_blocks_than_expected_forgets_older_ones():
    blocks = RecentBlocks(100)
    for hashes in ([1, 2], [3, 4, 5], [6]):
        blocks.confirm(blocks.use(hashes), 0)
    use = blocks.use([3, 4, 5, 8])
    assert len(use.expected) == 3
    blocks.confirm(use, 1)
    assert [blocks.match(hashes) for hashes in ([1, 2], [3, 4, 5, 8], [6])] == [0, 4, 1]
    use = blocks.use([6])
    blocks.confirm(use, 1)
    assert blocks.match([6]) == 1


def test_use_of_unconfirmed_blocks_expects_nothing():
    blocks = RecentBlocks(100)
    blocks.confirm(blocks.use([9]), 0)
    first, second = blocks.use([1, 2]), blocks.use([1, 2])
    assert second.expected == []
    blocks.confirm(first, 0)
    blocks.confirm(second, 0)
    assert (blocks.match([1, 2]), blocks.match([9])) == (2, 1)
    dropped = blocks.use([1, 2, 3])
    assert len(dropped.expected) == 2
    blocks.drop(dropped)
    assert len(blocks.use([1, 2, 3]).expected) == 3


PROMPTS = st.lists(st.integers(0, 2), max_size=7)


@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(1, 12), events=st.lists(st.tuples(PROMPTS, st.integers(0, 7)), max_size=40))
def test_match_known_blocks_are_first_of_prompt(capacity, events):
    blocks = RecentBlocks(capacity)
    seen = []
    for prompt, num_found in events:
        hashes = block_hashes([*prompt, 0], block_size=1, cache_salt="")
        blocks.confirm(blocks.use(hashes), num_found)
        seen.append(hashes)
        assert blocks.match(hashes) == min(len(hashes), capacity)
        assert len(blocks) <= capacity
        for known in seen:
            matched = blocks.match(known)
            assert [blocks.match([name]) for name in known] == [1] * matched + [0] * (len(known) - matched)
