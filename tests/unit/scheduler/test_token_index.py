"""The table of n-grams: it finds only equal tokens, and does find them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.scheduler.token_index import LEAST_AT_ONCE, TokenIndex

NUM_DOMAINS = 2
LENGTHS = (2, 3)


class Model:
    """An index of sequences that grow, and the same by comparing all tokens."""

    def __init__(self, *, num_buckets=2**17, max_match=6):
        self.index = TokenIndex(LENGTHS, max_match=max_match, num_buckets=num_buckets)
        self.max_match = max_match
        self.sequences = []

    def add(self, domain, first_place):
        tokens = [0] * first_place
        self.sequences.append((self.index.add(tokens, domain=domain, first_place=first_place), tokens))

    def grow(self, number, tokens):
        sequence, own = self.sequences[number]
        own.extend(tokens)
        while sequence.num_indexed < len(own):
            self.index.insert(sequence, 50)

    def longest(self, number, domain):
        """Return the longest match in the index's domain, as long as an n-gram."""
        _, tokens = self.sequences[number]
        lengths = [
            self.equal(tokens, others, place)
            for other, others in self.sequences
            for place in range(other.first_place, len(others))
            if other.domain == domain
        ]
        return max((length for length in lengths if length >= min(LENGTHS)), default=0)

    def equal(self, tokens, others, place):
        count = 0
        while count < min(place, len(tokens), self.max_match) and tokens[-1 - count] == others[place - 1 - count]:
            count += 1
        return count

    def check(self, number, domain):
        """Return the length of the match, which is checked."""
        sequence, tokens = self.sequences[number]
        places, length = self.index.find(sequence, tokens, domain)
        for others, place in places:
            (owner,) = [one for one, its in self.sequences if its is others]
            assert owner.domain == domain and owner.first_place <= place < len(others)
            assert self.equal(tokens, others, place) == length
        assert (length >= min(LENGTHS)) == bool(places)
        return length


GROWTH = st.tuples(
    st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=3) | st.lists(st.integers(0, 3), max_size=60)
)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=4), st.lists(GROWTH))
def test_token_index_random_sequences_finds_only_equal_tokens_and_own_ones(first_places, growths):
    """Two sequences share a domain, and two have their own. An entry at the end of another sequence may hide others."""
    model = Model()
    for domain, first_place in zip((1, 2, 3, 3), first_places, strict=True):
        model.add(domain, first_place)
    for number, tokens in growths:
        model.grow(number, tokens)
        for domain in (1, 2, 3):
            longest, found = model.longest(number, domain), model.check(number, domain)
            assert found <= longest
            if number + 1 == domain < 3:
                assert bool(found) == bool(longest)


def test_token_index_full_table_finds_only_equal_tokens():
    """Entries are overwritten and collide all the time, and sequences are discarded."""
    choose = random.Random(0)
    model = Model(num_buckets=8)
    num_found = 0
    for step in range(3000):
        if step % 100 == 0:
            model.add(1 + choose.randrange(NUM_DOMAINS), 0)
            if len(model.sequences) > 4:
                model.index.discard(model.sequences.pop(0)[0])
        number = choose.randrange(len(model.sequences))
        model.grow(number, [choose.randrange(3) for _ in range(choose.choice([1, 1, 1, LEAST_AT_ONCE]))])
        num_found += model.check(number, 1 + choose.randrange(NUM_DOMAINS)) > 0
    assert num_found > 500
    assert len(model.index) == len(model.sequences)


@pytest.mark.parametrize("lengths", [(1,), (2, 5), (3, 8), (7,), (12, 30)])
def test_token_index_at_once_and_one_by_one_keys_are_equal(lengths):
    tokens = np.random.default_rng(0).integers(0, 200_000, 400).tolist()
    keys = []
    for parts in ([1] * 400, [3, 40, 1, 100, LEAST_AT_ONCE, 400], [400]):
        index = TokenIndex(lengths, max_match=64)
        sequence = index.add(tokens, domain=3)
        for part in parts:
            index.insert(sequence, part)
        keys.append(sequence.keys)
        assert sequence.num_indexed == 400
        repeated = [*tokens[200:300], *tokens[100:140]]
        follower = index.add(repeated, domain=3)
        index.insert(follower, len(repeated))
        (place,), length = index.find(follower, repeated, 3)
        assert place == (tokens, 140) and length == 40
    assert keys[0] == keys[1] == keys[2]


def test_token_index_repeated_ngram_newest_place_is_first():
    index = TokenIndex([2], max_match=2)
    tokens = [number % 5 for number in range(60)]
    sequence = index.add(tokens, domain=1)
    for _ in tokens:
        index.insert(sequence, 1)
    places, _ = index.find(sequence, tokens, 1)
    assert places[0].position == 55
    assert [place.position for place in places] == sorted((place.position for place in places), reverse=True)
    assert len(places) > 3
