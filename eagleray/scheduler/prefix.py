"""Block hashes: a block's hash stands for its tokens and for all tokens before them.

Pure functions with the same results on every machine, so that a client can compute the hashes of a prompt's blocks and
remember which engine holds them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

# 128 bits: two different prefixes with one hash are not to be expected before 2**64 blocks.
HASH_BYTES = 16


def root_hash(cache_salt: str, update: int = 0, num_loads: int = 0, *, adapter: int = 0) -> bytes:
    """Return the parent of a sequence's first block hash. Prefixes share a hash only if they have the same salt, and
    were computed with the weights of the same update, after the same number of other loads of weights (`num_loads`),
    and with the same adapter (`adapter`: number of its load, 0 without one)."""
    salt = update.to_bytes(8, "little") + num_loads.to_bytes(8, "little")
    key = adapter.to_bytes(8, "little") if adapter else b""
    return blake2b(cache_salt.encode(), digest_size=HASH_BYTES, key=key, salt=salt, person=b"eagleray salt").digest()


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], *, block_size: int, root: bytes) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not have yet."""
    while (len(hashes) + 1) * block_size <= len(token_ids):
        start = len(hashes) * block_size
        hashes.append(_child_hash(hashes[-1] if hashes else root, token_ids[start : start + block_size]))


def block_hashes(token_ids: Sequence[int], *, block_size: int, cache_salt: str = "") -> list[bytes]:
    """Return the hashes of all full blocks of a sequence, in order."""
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, block_size=block_size, root=root_hash(cache_salt))
    return hashes


def _child_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    content = parent + struct.pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(content, digest_size=HASH_BYTES, person=b"eagleray block").digest()
