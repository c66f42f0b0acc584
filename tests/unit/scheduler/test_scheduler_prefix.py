"""Hashes of cache blocks."""

from eagleray.scheduler.prefix import block_hashes, extend_hashes, root_hash


def test_only_full_blocks_have_a_hash():
    assert block_hashes([1, 2, 3], block_size=4) == []
    assert len(block_hashes(range(11), block_size=4)) == 2


def test_a_hash_stands_for_everything_before_it():
    one, other = block_hashes([1, 2, 3, 4], block_size=2), block_hashes([9, 2, 3, 4], block_size=2)
    assert one[0] != other[0] and one[1] != other[1]
    assert block_hashes([1, 2, 3, 4, 5, 6], block_size=2)[:2] == one


def test_salts_share_nothing():
    tokens = list(range(8))
    assert not set(block_hashes(tokens, block_size=2)) & set(block_hashes(tokens, block_size=2, cache_salt="tenant"))


def test_a_salt_cannot_imitate_a_prefix():
    """The bytes that a block's hash is made of, used as a salt, must not give that block's hash as the root."""
    hashes: list[bytes] = []
    extend_hashes(hashes, [0x41414141, 0x42424242], block_size=2, root=b"P" * 16)
    assert hashes[0] != root_hash("P" * 16 + "AAAABBBB")


def test_hashes_are_extended_not_computed_anew():
    tokens = list(range(10))
    hashes = [b"first", b"second"]
    extend_hashes(hashes, tokens, block_size=4, root=b"")
    assert hashes == [b"first", b"second"]
    extend_hashes(hashes, [*tokens, 10, 11], block_size=4, root=b"")
    assert hashes[:2] == [b"first", b"second"] and len(hashes) == 3


def test_hashes_are_the_same_on_every_machine_and_in_every_release():
    """Clients and engines of one fleet may run different Pythons."""
    hashes = block_hashes([1, 2, 3, 70000], block_size=2, cache_salt="é")
    assert [value.hex() for value in hashes] == [
        "9434ad9c2a836458c05f265d0fd1a659",
        "b9e2d0e6c3b29aab898af4c4c699e30c",
    ]
