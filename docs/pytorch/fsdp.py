"""ddp.py with sharded parameters: FSDP2, which is ZeRO-3 (`zero3` in gluon_mgpu/sharded.py).

torchrun --standalone --nproc-per-node 2 docs/pytorch/fsdp.py
"""

import argparse
import os
from time import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from gluon_mgpu.data import datasets


def lenet(scale=0.1, seed=1):
    """Every process draws the same parameters."""
    conv1 = [nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2)]  # (n, 20, 13, 13)
    conv2 = [nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2)]  # (n, 50, 4, 4)
    dense = [nn.Flatten(), nn.Linear(800, 128), nn.ReLU()]  # (n, 128)
    net = nn.Sequential(*conv1, *conv2, *dense, nn.Linear(128, 10))
    rng = np.random.default_rng(seed)
    for p in net.parameters():
        weight = p.dim() > 1
        p.data = torch.tensor(rng.normal(0, scale, p.shape) if weight else np.zeros(p.shape), dtype=torch.float32)
    return net


def init_net(lr):
    net, device = lenet(), torch.get_default_device().type
    if device == "cuda" and dist.get_backend() == "gloo":
        raise SystemExit("fsdp.py needs a GPU for each process: start fewer processes, or pass --device cpu")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in net:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            fully_shard(layer, mesh=mesh)  # gathered before it is used, and freed afterward
    fully_shard(net, mesh=mesh)
    return net, torch.optim.SGD(net.parameters(), lr=lr)


def shard(data):
    """This process's part of a batch, on its device."""
    return torch.tensor_split(data, dist.get_world_size())[dist.get_rank()].to(torch.get_default_device())


def train_batch(X, y, net, trainer):
    """X: (n, 1, 28, 28), y: (n,), the whole batch."""
    losses = F.cross_entropy(net(shard(X)), shard(y), reduction="none")
    loss = losses.sum() * dist.get_world_size() / len(X)  # backward averages the gradients over the processes
    loss.backward()
    trainer.step()
    trainer.zero_grad()


def full(net):
    """The parameters, gathered from the chunks of all processes."""
    return [p.full_tensor().detach() for p in net.parameters()]


def difference(X, y, net, trainer):
    """The largest difference of a parameter after a step, from the same step on one device."""
    device, one = torch.get_default_device(), lenet()
    for p, value in zip(one.parameters(), full(net)):
        p.data.copy_(value)
    F.cross_entropy(one(X.to(device)), y.to(device)).backward()
    torch.optim.SGD(one.parameters(), lr=trainer.param_groups[0]["lr"]).step()
    train_batch(X, y, net, trainer)
    return max((a - b).abs().max().item() for a, b in zip(full(net), one.parameters()))


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
    net, trainer = init_net(lr)
    for epoch in range(1, epochs + 1):
        start = time()
        order = np.random.default_rng([1, epoch]).permutation(len(data.train_labels))  # as scratch.train with seed=1
        for X, y in batches(data.train_images, data.train_labels, order):
            train_batch(X, y, net, trainer)
        next(net.parameters()).cpu()  # waits until a GPU has updated it
        seconds = time() - start
        test_iter = batches(data.test_images, data.test_labels, np.arange(len(data.test_labels)))
        accuracy = evaluate_accuracy(test_iter, net)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, time: {seconds:.1f} sec, test acc: {accuracy:.2f}", flush=True)
    params = [p.cpu().numpy() for p in full(net)]
    if out and dist.get_rank() == 0:
        np.savez(out, *params)
    largest = difference(X, y, net, trainer)  # with the last batch
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
    os._exit(0)  # PyTorch 2.13's gloo threads sometimes abort the process while Python shuts down
