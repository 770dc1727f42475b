"""gluon_mgpu/scratch.py in PyTorch: one process per device, and dist.all_reduce sums the gradients.

torchrun --standalone --nproc-per-node 2 docs/pytorch/scratch.py
"""

import argparse
import os
from time import time

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from gluon_mgpu.data import datasets


def init_params(scale=0.1, seed=1):
    """Every process draws the same parameters."""
    rng, params = np.random.default_rng(seed), []
    for shape in [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]:
        params += [torch.tensor(rng.normal(0, scale, shape), dtype=torch.float32), torch.zeros(shape[0])]
    for p in params:
        p.requires_grad_()
    return params


def lenet(X, params):
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1 = F.avg_pool2d(F.relu(F.conv2d(X, W1, b1)), 2)  # (n, 20, 13, 13)
    h2 = F.avg_pool2d(F.relu(F.conv2d(h1, W2, b2)), 2)  # (n, 50, 4, 4)
    h3 = F.relu(F.linear(h2.flatten(1), W3, b3))  # (n, 128)
    return F.linear(h3, W4, b4)  # (n, 10)


def shard(data):
    """This process's part of a batch, on its device."""
    return torch.tensor_split(data, dist.get_world_size())[dist.get_rank()].to(torch.get_default_device())


def sgd(params, lr, batch_size):
    with torch.no_grad():
        for p in params:
            p -= lr / batch_size * p.grad
            p.grad = None


def train_batch(X, y, params, lr):
    """X: (n, 1, 28, 28), y: (n,), the whole batch."""
    losses = F.cross_entropy(lenet(shard(X), params), shard(y), reduction="none")
    losses.sum().backward()
    for p in params:
        dist.all_reduce(p.grad)
    sgd(params, lr, len(X))


def difference(X, y, params, lr):
    """The largest difference of a parameter after a step, from the same step on one device."""
    device = torch.get_default_device()
    one = [p.detach().clone().requires_grad_() for p in params]
    F.cross_entropy(lenet(X.to(device), one), y.to(device), reduction="sum").backward()
    sgd(one, lr, len(X))
    train_batch(X, y, params, lr)
    return max((a - b).abs().max().item() for a, b in zip(params, one))


@torch.no_grad()
def evaluate_accuracy(data_iter, net):
    """Each process scores its part of each batch."""
    correct, total = torch.zeros(()), 0
    for X, y in data_iter:
        correct += (net(shard(X)).argmax(1) == shard(y)).sum()
        total += len(y)
    dist.all_reduce(correct)
    return correct.item() / total


def batches(images, labels, order, batch_size=256):
    for chosen in np.split(order, range(batch_size, len(order), batch_size)):
        yield torch.from_numpy(images[chosen]) / 255, torch.from_numpy(labels[chosen]).long()


def join(device):
    """Connect the processes: with nccl if each has a GPU of its own, else with gloo. New tensors are on `device`."""
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
    torch.set_default_device(device)
    torch.backends.cudnn.allow_tf32 = False  # or convolutions on a GPU are rounded to 10 bits
    dist.init_process_group("nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo")


def train(dataset, limit, epochs, lr, out):
    data = datasets.load(dataset, limit=limit)
    params = init_params()
    for epoch in range(1, epochs + 1):
        start = time()
        order = np.random.default_rng([1, epoch]).permutation(len(data.train_labels))  # as scratch.train with seed=1
        for X, y in batches(data.train_images, data.train_labels, order):
            train_batch(X, y, params, lr)
        params[0].cpu()  # waits until a GPU has updated it
        seconds = time() - start
        test_iter = batches(data.test_images, data.test_labels, np.arange(len(data.test_labels)))
        accuracy = evaluate_accuracy(test_iter, lambda X: lenet(X, params))
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, time: {seconds:.1f} sec, test acc: {accuracy:.2f}", flush=True)
    if out and dist.get_rank() == 0:
        np.savez(out, *[p.detach().cpu().numpy() for p in params])
    largest = difference(X, y, params, lr)  # with the last batch
    if dist.get_rank() == 0:
        print(f"largest difference from one device after another step: {largest:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--out", help="save the parameters in this .npz file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options = vars(parser.parse_args())
    join(options.pop("device"))
    train(**options)
    dist.destroy_process_group()
