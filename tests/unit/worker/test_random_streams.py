from __future__ import annotations

import numpy as np
from sampling_oracle import splitmix_uniform

from eagleray.worker.random_sampler import stream_of, uniform


def test_known_outputs_of_splitmix64() -> None:
    known = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    drawn = uniform(np.full(5, 1234567, dtype=np.uint64), np.arange(5))
    assert drawn.tolist() == [((output >> 12) + 0.5) / 2**52 for output in known]


def test_a_number_depends_on_seed_and_position_alone() -> None:
    seeds = [0, 1, -1, 42, 2**63 - 1, -(2**63) + 1]
    positions = [0, 1, 17, 40_000, 3, 2**31]
    streams = np.array([stream_of(seed) for seed in seeds], dtype=np.uint64)
    together = uniform(streams, np.array(positions)).tolist()
    assert together == [splitmix_uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]


def test_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    one_seed = uniform(np.full(20_000, stream_of(5), dtype=np.uint64), np.arange(20_000))
    many_seeds = uniform(np.array([stream_of(seed) for seed in range(20_000)], dtype=np.uint64), np.full(20_000, 7))
    for numbers in (one_seed, many_seeds):
        assert numbers.min() > 0 and numbers.max() < 1
        counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
        assert ((counts - 400) ** 2 / 400).sum() < 90  # chi-square with 49 degrees of freedom: 1 in 3,000 is above
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
