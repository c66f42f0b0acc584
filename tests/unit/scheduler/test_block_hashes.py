"""Hashes of cache blocks."""

from collections.abc import Sequence

from eagleray.scheduler.blocks import extend_hashes, root_hash


def block_hashes(token_ids: Sequence[int], *, block_size: int, cache_salt: str = "") -> list[bytes]:
    """Return the hashes of all full blocks of a sequence, in order."""
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, block_size=block_size, root=root_hash(cache_salt))
    return hashes


def test_block_hashes_partial_block_has_none():
    assert block_hashes([1, 2, 3], block_size=4) == []
    assert len(block_hashes(range(11), block_size=4)) == 2


def test_block_hashes_different_prefix_gives_different_hash():
    one, other = block_hashes([1, 2, 3, 4], block_size=2), block_hashes([9, 2, 3, 4], block_size=2)
    assert one[0] != other[0] and one[1] != other[1]
    assert block_hashes([1, 2, 3, 4, 5, 6], block_size=2)[:2] == one


def test_block_hashes_different_salts_share_nothing():
    tokens = list(range(8))
    assert not set(block_hashes(tokens, block_size=2)) & set(block_hashes(tokens, block_size=2, cache_salt="tenant"))


def test_root_hash_different_updates_share_nothing():
    assert (
        len({root_hash("tenant", update) for update in range(3)} | {root_hash("", update) for update in range(3)}) == 6
    )
    assert root_hash("tenant", 0) == root_hash("tenant")


def test_root_hash_salt_cannot_equal_a_block_hash():
    """The bytes that a block's hash is made of, used as a salt, must not give that block's hash as the root."""
    hashes: list[bytes] = []
    extend_hashes(hashes, [0x41414141, 0x42424242], block_size=2, root=b"P" * 16)
    assert hashes[0] != root_hash("P" * 16 + "AAAABBBB")


def test_extend_hashes_known_hashes_are_kept():
    tokens = list(range(10))
    hashes = [b"first", b"second"]
    extend_hashes(hashes, tokens, block_size=4, root=b"")
    assert hashes == [b"first", b"second"]
    extend_hashes(hashes, [*tokens, 10, 11], block_size=4, root=b"")
    assert hashes[:2] == [b"first", b"second"] and len(hashes) == 3


def test_block_hashes_fixed_input_gives_fixed_value():
    """Clients and engines of one fleet may run different Pythons."""
    hashes = block_hashes([1, 2, 3, 70000], block_size=2, cache_salt="é")
    assert [value.hex() for value in hashes] == [
        "9434ad9c2a836458c05f265d0fd1a659",
        "b9e2d0e6c3b29aab898af4c4c699e30c",
    ]
