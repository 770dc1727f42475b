"""Exercise process: write the step of one process.

In PyTorch, each device has its own process, and all run the same program. Here, each process has the whole batch, and
takes its own shard of it; any division will do that gives each process some examples. `dist` has three functions of
torch.distributed:

    dist.get_rank()           the number of this process: 0 to k - 1
    dist.get_world_size()     the number of processes, k
    dist.all_reduce(array)    sums the arrays of all processes, in place; waits until all have called it

`gradient` is what `losses.mean().backward()` computes: the gradient of a mean. The step of all processes is that of a
single one, even if their shards differ in size:

    w -= lr * (gradient of the mean loss of the whole batch)
"""


def gradient(X, y, w):
    """Returns the gradient (d,) of the mean loss of n examples X (n, d), y (n,), for a linear model with weights w."""
    return (X @ w - y) @ X / len(X)


def train_batch(X, y, w, lr, dist):
    """Train one step on a batch X (n, d), y (n,); n is at least k. w (d,): this process's weights, changed in place.

    All arrays are NumPy arrays.
    """
    shard = slice(dist.get_rank(), None, dist.get_world_size())
    g = gradient(X[shard], y[shard], w) * len(X[shard])
    dist.all_reduce(g)
    w -= lr * g / len(X)
