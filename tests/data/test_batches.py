"""Properties of shards, orders and seeds."""

import random
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest

from gluon_mgpu.data.batches import shuffled
from gluon_mgpu.data.splitting import shard_sizes
from gluon_mgpu.training.seeds import seed_of_step
from gluon_mgpu.training.workers import Group


@pytest.mark.parametrize("seed", range(200))
def test_shards_hold_every_example_once_and_are_as_close_to_the_shares_as_whole_numbers_can_be(seed):
    rng = random.Random(seed)
    examples, parts = rng.randrange(1, 300), rng.randrange(1, 9)
    shares = [rng.choice((1, 1, 2, 7, 0.5, 98)) for _ in range(parts)] if rng.random() < 0.7 else None
    sizes = shard_sizes(examples, parts, shares)
    assert sum(sizes) == examples and len(sizes) == parts
    assert min(sizes) >= min(1, examples // parts)  # every device gets an example, if there are enough
    exact = [examples * share / sum(shares or [1] * parts) for share in shares or [1] * parts]
    if examples > parts and min(exact) >= 1:
        assert max(abs(size - e) for size, e in zip(sizes, exact)) < 1
    if not shares:
        assert sizes == [len(part) for part in np.array_split(range(examples), parts)]


def test_workers_take_the_examples_that_as_many_devices_of_one_process_would():
    for workers, devices, examples in product(range(1, 4), range(1, 4), range(30)):
        groups = [Group(Mock(rank=rank, size=workers)) for rank in range(workers)]
        found = [group.local_indices(examples, devices).tolist() for group in groups]
        shards = np.array_split(range(examples), workers * devices)
        assert found == [[*map(int, np.concatenate(shards[devices * i :][:devices]))] for i in range(workers)]


def test_each_seed_worker_and_step_has_its_own_seed():
    seeds = [seed_of_step(*numbers) for numbers in product(range(3), repeat=3)]
    assert len({*seeds}) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)


def test_each_seed_and_epoch_has_its_own_order_of_all_examples():
    orders = [shuffled(50, seed, epoch) for seed, epoch in product(range(3), repeat=2)]
    assert all(np.array_equal(np.sort(order), np.arange(50)) for order in orders)
    assert len({order.tobytes() for order in orders}) == len(orders)
