"""The pool of cache blocks: examples, then any order of operations against a plain model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eagleray.scheduler.blocks import BlockPool


def test_block_pool_last_reference_released_block_is_free():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.retain(blocks)
    pool.release(blocks)
    assert pool.num_free == 2
    pool.release(blocks)
    assert pool.num_free == 4


def test_block_pool_freed_block_is_found_until_allocated():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, b"a")
    pool.release([block])
    assert pool.find(b"a") == block
    pool.allocate(1)
    assert pool.find(b"a") == block, "the blank block goes first"
    pool.allocate(1)
    assert pool.find(b"a") is None


def test_block_pool_eviction_takes_least_recently_used_and_tails_first():
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, name in zip([*old, *new], [b"old0", b"old1", b"new0", b"new1"], strict=True):
        pool.register(block, name)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(4) == [old[1], old[0], new[1], new[0]]


def test_block_pool_retained_free_block_becomes_recent():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"1")
    pool.register(second, b"2")
    pool.release([first])
    pool.release([second])
    pool.retain([first])
    pool.release([first])
    assert pool.allocate(1) == [second]


def test_block_pool_equal_blocks_first_stays_cached():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.find(b"same") == first
    pool.release([second])
    assert pool.allocate(1) == [second], "a block that nobody can find is blank"
    assert pool.find(b"same") == first


def test_block_pool_invalidated_block_is_not_found_and_hash_is_free():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.invalidate([first, second])
    assert pool.find(b"a") is None
    pool.register(second, b"a")
    assert pool.find(b"a") == second


def test_block_pool_twin_with_routed_experts_replaces_one_without():
    pool = BlockPool(3)
    held, freed, rich = pool.allocate(3)
    pool.register(held, b"a")
    pool.register(freed, b"b")
    pool.release([freed])
    pool.register(rich, b"a", has_routed_experts=True)
    assert pool.find(b"a") == rich and pool.has_routed_experts(rich)
    pool.invalidate([rich])
    assert not pool.has_routed_experts(rich)
    pool.register(rich, b"b", has_routed_experts=True)
    assert pool.find(b"b") == rich
    pool.release([rich, held])
    assert set(pool.allocate(2)) == {held, freed}, "blocks that nobody can find are blank"
    assert pool.find(b"b") == rich


def test_block_pool_twin_never_replaces_one_with_routed_experts():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"a", has_routed_experts=True)
    pool.register(second, b"a", has_routed_experts=True)
    assert pool.find(b"a") == first


class PoolMachine(RuleBasedStateMachine):
    """Sequences take, share and release blocks; the model is the list of what each sequence holds."""

    NUM_BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.rich: set[int] = set()  # of those, the ones with rows
        self.num_names = 0

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        if count > self.pool.num_free:
            return
        in_use = {block for blocks in self.held for block in blocks}
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count and not in_use & set(blocks)
        for block in blocks:
            self.content.pop(block, None)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), fresh=st.booleans(), has_routed_experts=st.booleans())
    def register(self, data: st.DataObject, fresh: bool, has_routed_experts: bool) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.held))))
        if block in self.content:
            return
        known = sorted(set(self.content.values()))
        if fresh or not known:
            self.num_names += 1
            name = str(self.num_names).encode()
            self.name(block, name, has_routed_experts)
        else:
            name = data.draw(st.sampled_from(known))
            (twin,) = (other for other, content in self.content.items() if content == name)
            if has_routed_experts and twin not in self.rich:
                del self.content[twin]
                self.name(block, name, has_routed_experts)
        self.pool.register(block, name, has_routed_experts=has_routed_experts)

    def name(self, block: int, name: bytes, has_routed_experts: bool) -> None:
        self.content[block] = name
        self.rich = self.rich | {block} if has_routed_experts else self.rich - {block}

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        known = sorted(self.content)
        if known:
            blocks = data.draw(st.lists(st.sampled_from(known), unique=True, min_size=1))
            self.pool.retain(blocks)
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.invalidate(blocks)
        for block in blocks:
            self.content.pop(block, None)

    @invariant()
    def free_and_used_add_up(self) -> None:
        used = {block for blocks in self.held for block in blocks}
        assert self.pool.num_free + len(used) == self.NUM_BLOCKS
        assert self.pool.num_free_among(range(self.NUM_BLOCKS)) == self.pool.num_free

    @invariant()
    def known_content_is_found_where_it_is(self) -> None:
        for number in range(1, self.num_names + 1):
            block = self.pool.find(str(number).encode())
            assert self.content.get(block) == str(number).encode() if block is not None else True
        for block, name in self.content.items():
            assert self.pool.find(name) == block
            assert self.pool.has_routed_experts(block) == (block in self.rich)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
