"""gluon_mgpu/hybrid.py in PyTorch: a mesh of processes, with tensor parallelism in its rows.

torchrun --standalone --nproc-per-node 4 docs/pytorch/hybrid.py
"""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from ddp import batches, join, lenet
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from gluon_mgpu.data import datasets


def init_net(lr):
    world, net, device = dist.get_world_size(), lenet(), torch.get_default_device().type
    shape = (-(-world // 2), min(world, 2))  # 4 processes: 2 x 2
    mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "tensor"))
    # The names are those of W.T: the rows of W3 are divided, and the columns of W4.
    parallelize_module(net, mesh["tensor"], {"7": ColwiseParallel(), "9": RowwiseParallel()})
    return net, mesh["data"], torch.optim.SGD(net.parameters(), lr=lr)


def shard(data, group):
    """This row's part of a batch."""
    return torch.tensor_split(data, group.size())[group.get_local_rank()].to(torch.get_default_device())


def train_batch(X, y, net, data, trainer):
    """X: (n, 1, 28, 28), y: (n,), the whole batch. data: this process's column of the mesh. Returns the mean loss."""
    loss = F.cross_entropy(net(shard(X, data)), shard(y, data), reduction="sum") / len(X)
    loss.backward()  # sums over the row, in the layers that are divided
    for p in net.parameters():
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        dist.all_reduce(grad, group=data.get_group())
    trainer.step()
    trainer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total, group=data.get_group())
    return total


def full(net):
    """The parameters, gathered from the parts of a row."""
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in net.parameters()]


def difference(X, y, net, data, trainer):
    """The largest difference of a parameter after a step, from the same step on one device."""
    device, one = torch.get_default_device(), lenet()
    for p, value in zip(one.parameters(), full(net)):
        p.data.copy_(value)
    F.cross_entropy(one(X.to(device)), y.to(device)).backward()
    torch.optim.SGD(one.parameters(), lr=trainer.param_groups[0]["lr"]).step()
    train_batch(X, y, net, data, trainer)
    return max((a - b).abs().max().item() for a, b in zip(full(net), one.parameters()))


def train(dataset, steps, lr, out):
    images = datasets.load(dataset, limit=64 * steps)
    net, data, trainer = init_net(lr)
    for X, y in batches(images.train_images, images.train_labels, np.arange(64 * steps), batch_size=64):
        loss = train_batch(X, y, net, data, trainer)
    params = [p.cpu().numpy() for p in full(net)]
    if dist.get_rank() == 0:
        print(f"loss in step {steps}: {loss.item():.4f}", flush=True)
        if out:
            np.savez(out, *params)
    largest = difference(X, y, net, data, trainer)  # with the last batch
    if dist.get_rank() == 0:
        print(f"largest difference from one device after another step: {largest:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--out", help="save the parameters in this .npz file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options = vars(parser.parse_args())
    join(options.pop("device"))
    train(**options)
    dist.destroy_process_group()
    os._exit(0)  # PyTorch 2.13's gloo threads sometimes abort the process while Python shuts down
