"""Properties of shards, for drawn batches, numbers of devices and shares."""

import random

import mxnet as mx
import numpy as np
import pytest

from gluon_mgpu.data.splitting import shard_sizes, split


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


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_a_batch_is_split_in_order_and_empty_shards_are_omitted(n):
    data, ctx = np.arange(2 * n).reshape(n, 2), [mx.cpu(i) for i in range(3)]
    shards = split(mx.nd.array(data), ctx)
    assert [shard.context for shard in shards] == ctx[:n]
    np.testing.assert_array_equal(np.concatenate([shard.asnumpy() for shard in shards]), data)
