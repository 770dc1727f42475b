"""Exercise split: split a batch in proportion to the devices' speeds.

A step takes as long as the slowest device needs for its shard. If the devices differ in speed, their shards have to
differ in size. `speeds` has one positive number per device: with speeds [1, 2], the second device gets two thirds of
the batch. Each example goes to exactly one device. n * speed / sum(speeds) need not be a whole number: round it up or
down, so that each size differs from it by less than 1.
"""


def split_and_load(data, ctx, speeds):
    """Split a batch (n, ...) along its first axis. Returns a list of shards: shard i is on ctx[i].

    speeds: a list of whole numbers, one per device. n is large enough that each device gets at least one example.
    """
    n, total = len(data), sum(speeds)
    bounds = [n * sum(speeds[:i]) // total for i in range(len(ctx) + 1)]
    return [data[start:end].as_in_context(c) for start, end, c in zip(bounds, bounds[1:], ctx)]
