"""PyTorch's side of `peers`: the same networks, and a process that trains one; the only module that imports torch.

A worker, `python -m bench.torch_peers SUBJECT JOB FOLDER RANK`, is one process of a subject; several meet
over gloo as DistributedDataParallel. It never imports mxnet: each brings an OpenMP of its own.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bench import peers


def lenet() -> nn.Sequential:
    """`highlevel.lenet` in PyTorch: images (n, 1, 28, 28) to scores (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, 10),
    )


class Residual(nn.Module):
    """`highlevel.Residual` in PyTorch. BatchNorm's defaults are Gluon's: epsilon 1e-5, and 0.1 here is momentum 0.9."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(inputs, channels, 1, stride) if inputs != channels else None

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        Y = F.relu(self.bn1(self.conv1(X)), inplace=True)
        Y = self.bn2(self.conv2(Y))
        return F.relu(Y + (self.conv3(X) if self.conv3 else X), inplace=True)


def resnet18() -> nn.Sequential:
    """`highlevel.resnet18` in PyTorch: images (n, 1, 28, 28) to scores (n, 10)."""
    stages, inputs = [], 64
    for channels in (64, 128, 256, 512):
        stages += [Residual(inputs, channels, 1 + (channels > 64)), Residual(channels, channels, 1)]
        inputs = channels
    stem = nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


MODELS = {"lenet": lenet, "resnet18": resnet18}


def network(model: str, seed: int) -> nn.Module:
    """A network with the parameters that every subject of `peers` begins with."""
    net = MODELS[model]()
    for name, p in net.named_parameters():
        if name.endswith("bias"):  # PyTorch draws those of convolutions and dense layers
            nn.init.zeros_(p)
    parameters = {name: p.detach().numpy() for name, p in net.named_parameters()}
    load(net, peers.initial(parameters, seed))
    return net


@torch.no_grad()
def load(net: nn.Module, arrays: dict[Any, np.ndarray]) -> None:
    """Copy arrays, {any name: NumPy array} in the order of the network's parameters, into it."""
    for p, array in zip(net.parameters(), arrays.values()):
        p.copy_(torch.from_numpy(array))


def _worker(subject: peers.Subject, job: dict, folder: str, rank: int) -> None:
    """Print what `peers.work` gives, of one of the subject's processes, and end it; rank: which one."""
    torch.set_num_threads(subject.threads)
    data, size = peers.dataset(job), job["batch_size"]
    net = network(job["model"], job["seed"])
    layout = torch.channels_last if subject.channels_last else torch.contiguous_format
    net.to(memory_format=layout)
    # Compiled inside DistributedDataParallel: around it, torch 2.13 leaves a Sequential uncompiled, and says nothing.
    model = torch.compile(net) if subject.compiled else net
    if subject.parts > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=subject.parts)
        # Buckets are left at 25 MB, and batch normalization's statistics are those of process 0, as by default.
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=job["lr"])

    def batch(images: np.ndarray, labels: np.ndarray, chosen: np.ndarray | slice) -> tuple[torch.Tensor, torch.Tensor]:
        X = np.divide(images[chosen], 255, dtype=np.float32)
        return torch.from_numpy(X).to(memory_format=layout), torch.from_numpy(labels[chosen].astype(np.int64))

    def train(order: np.ndarray) -> tuple[float, float]:
        losses, sizes = [], []
        for start in range(0, len(order), size):
            shard = np.array_split(order[start : start + size], subject.parts)[rank]
            X, y = batch(data.train_images, data.train_labels, shard)
            loss = F.cross_entropy(model(X), y)
            optimizer.zero_grad()
            loss.backward()  # and the mean over the processes, which is that over the batch
            optimizer.step()
            losses.append(loss.detach())
            sizes.append(len(shard))
        return np.average(torch.stack(losses).numpy(), weights=sizes), 0

    @torch.no_grad()
    def accuracy() -> float:
        net.eval()
        right = 0
        for start in range(0, len(data.test_labels), size):
            X, y = batch(data.test_images, data.test_labels, slice(start, start + size))
            right += (net(X).argmax(1) == y).sum().item()
        net.train()
        return right / len(data.test_labels)

    print(json.dumps(peers.work(job, data, train, accuracy)), flush=True)
    if subject.parts > 1:
        dist.barrier()
    # Not by way of destroy_process_group, nor of Python's end: there gloo's threads now and then hang or abort.
    os._exit(0)


if __name__ == "__main__":
    try:
        _worker(peers.Subject(**json.loads(sys.argv[1])), json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    except Exception as error:  # PyTorch's messages have many lines, and the last one is advice
        traceback.print_exc()
        sys.exit(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
