"""Two exercises: write DistributedDataParallel by hand. Complete `Buckets`, then check it:

gluon-mgpu check by_hand.py
torchrun --standalone --nproc-per-node 2 by_hand.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class Buckets:
    """Sums gradients in buckets: vectors of at most `limit` numbers, or of one larger gradient.

    First, wait for each sum at once. Then wait only in `finish`, so that the sums overlap the backward pass. Extend
    `__init__`; one object serves all steps.
    """

    def __init__(self, limit):
        self.limit = limit

    def ready(self, p):
        """The backward pass has computed p.grad. Put it into the current bucket; if it does not fit, first sum that
        bucket, with all_reduce(vector), and begin the next one."""
        raise NotImplementedError("write this method")

    def finish(self):
        """The backward pass is complete. Make each p.grad the sum over the processes."""
        raise NotImplementedError("write this method")


class all_reduce:  # noqa: N801  # like a function
    """Begin to sum a vector over the processes, in place; `wait()` waits for the sum."""

    def __init__(self, vector):
        events.append(("sum", vector.numel()))
        self.work = dist.all_reduce(vector, async_op=True)

    def wait(self):
        events.append(("wait", None))
        self.work.wait()


events = []  # of a step, in order


def init_net(lr):
    torch.manual_seed(1)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), *hidden, nn.Linear(32, 10))
    net.buckets = Buckets(limit=1418)  # just as large as the first bucket

    def ready(p):
        events.append(("gradient", p.numel()))
        net.buckets.ready(p)

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(ready)
    return net, torch.optim.SGD(net.parameters(), lr=lr)


def shard(data):
    return torch.tensor_split(data, dist.get_world_size())[dist.get_rank()]


def train_batch(X, y, net, trainer):
    """X: (n, 1, 28, 28), y: (n,), the whole batch."""
    (F.cross_entropy(net(shard(X)), shard(y), reduction="sum") / len(X)).backward()
    net.buckets.finish()
    trainer.step()
    trainer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    net, trainer = init_net(lr=0.1)
    X, y = torch.rand(8, 1, 28, 28), torch.arange(8)
    for _ in range(2):
        events.clear()
        before = [p.detach().clone() for p in net.parameters()]
        grads = torch.autograd.grad(F.cross_entropy(net(X), y), [*net.parameters()])  # calls no hooks
        train_batch(X, y, net, trainer)
    far = max((p - (a - 0.1 * grad)).abs().max().item() for p, a, grad in zip(net.parameters(), before, grads))
    if dist.get_rank() == 0:
        print(*(f"{what} {size or ''}" for what, size in events), sep="\n")
        expected = [0]
        for size in (size for what, size in events if what == "gradient"):
            expected = [*expected[:-1], expected[-1] + size] if expected[-1] + size <= 1418 else [*expected, size]
        sizes = [size for what, size in events if what == "sum"]
        kinds = [what for what, _ in events]
        mistakes = {
            f"sums of {sizes} numbers, not {expected}": sizes != expected,
            f"{kinds.count('wait')} calls of wait() for {len(sizes)} sums": kinds.count("wait") != len(sizes),
            f"a parameter differs by {far:.0e} from one process's": far > 1e-6,
        }
        mistake = next((text for text, wrong in mistakes.items() if wrong), "")
        print("buckets:", mistake or "correct")
        backward = kinds[: len(kinds) - kinds[::-1].index("gradient")]
        begun, ended = backward.count("sum"), backward.count("wait")
        overlap = f"{begun} of {len(sizes)} sums begin during backward, {ended} end"
        if begun >= len(sizes) - 2 and not ended:  # the last two buckets are complete when backward ends
            overlap = "correct"
        print("overlap:", "first correct the buckets" if mistake else overlap)
    dist.destroy_process_group()
