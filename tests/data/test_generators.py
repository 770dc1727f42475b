"""Random numbers follow from the seed, the worker, the step and the epoch."""

from itertools import product

import numpy as np

from gluon_mgpu.data.batches import seed_of_step, shuffled


def test_each_seed_worker_and_step_has_its_own_seed():
    seeds = [seed_of_step(*numbers) for numbers in product(range(3), repeat=3)]
    assert len({*seeds}) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)


def test_each_seed_and_epoch_has_its_own_order_of_all_examples():
    orders = [shuffled(50, seed, epoch) for seed, epoch in product(range(3), repeat=2)]
    assert all(np.array_equal(np.sort(order), np.arange(50)) for order in orders)
    assert len({order.tobytes() for order in orders}) == len(orders)
