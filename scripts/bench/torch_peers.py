"""The PyTorch part of `peers`: this project's networks in PyTorch, and a worker that trains one of them.

Only this module imports torch. A worker starts the processes of DistributedDataParallel itself. It never imports mxnet,
which would load a second OpenMP runtime.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bench import harness
from bench.harness import BATCH_SIZE, LR, Dataset, Train


def lenet() -> nn.Sequential:
    """Create `highlevel.lenet` in PyTorch: images (n, 1, 28, 28) to scores (n, 10)."""
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
    """`networks.Residual` in PyTorch. BatchNorm has Gluon's defaults: epsilon 1e-5, and momentum 0.1, which Gluon
    writes as 0.9."""

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
    """Create `networks.resnet18` in PyTorch: images (n, 1, 28, 28) to scores (n, 10)."""
    stages, inputs = [], 64
    for channels in (64, 128, 256, 512):
        stages += [Residual(inputs, channels, 1 + (channels > 64)), Residual(channels, channels, 1)]
        inputs = channels
    stem = nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


MODELS = {"lenet": lenet, "resnet18": resnet18}


def network(model: str) -> nn.Module:
    """Create a network with the initial parameters that all subjects of `peers` share."""
    net = MODELS[model]()
    for name, p in net.named_parameters():
        if name.endswith("bias"):  # PyTorch draws biases of convolutions and dense layers at random
            nn.init.zeros_(p)
    load(net, harness.initial({name: p.detach().numpy() for name, p in net.named_parameters()}))
    return net


@torch.no_grad()
def load(net: nn.Module, arrays: dict[Any, np.ndarray]) -> None:
    """Copy arrays, {any name: NumPy array}, into the network's parameters, in the order of `net.parameters()`."""
    for p, array in zip(net.parameters(), arrays.values()):
        p.copy_(torch.from_numpy(array))


def trainer(
    rank: int, model: str, processes: int, threads: int, channels_last: bool = False, compiled: bool = False
) -> Train:
    """Create a function that trains the network in this process, which is number `rank` of `processes`."""
    torch.set_num_threads(threads)
    size = BATCH_SIZE[model]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    net = network(model).to(memory_format=layout)
    # Compile the network before wrapping it: PyTorch does not compile a Sequential in a compiled wrapper.
    replica = torch.compile(net) if compiled else net
    if processes > 1:
        replica = nn.parallel.DistributedDataParallel(replica, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR[model])

    def train(data: Dataset, order: np.ndarray) -> tuple[float, float]:
        losses, sizes, start = [], [], time.perf_counter()
        for i in range(0, len(order), size):
            shard = np.array_split(order[i : i + size], processes)[rank]
            X = torch.from_numpy(np.divide(data.train_images[shard], 255, dtype=np.float32))
            y = torch.from_numpy(data.train_labels[shard].astype(np.int64))
            loss = F.cross_entropy(replica(X.to(memory_format=layout)), y)
            optimizer.zero_grad()
            loss.backward()  # DDP averages gradients over the processes, and so over the batch
            optimizer.step()
            losses.append(loss.detach())
            sizes.append(len(shard))
        return float(np.average(torch.stack(losses).numpy(), weights=sizes)), time.perf_counter() - start

    return train


def process(rank: int, folder: str, steps: int, subject: dict[str, Any]) -> None:
    """Measure in process number `rank` of the subject, and write the result to a file."""
    meet, model = f"file://{folder}/meet", subject["model"]
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=subject["processes"])
    measured = harness.time_steps(trainer(rank, **subject), model, BATCH_SIZE[model], steps)
    Path(folder, f"{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    os._exit(0)  # destroy_process_group and Python's exit can hang or abort in gloo's threads


def work(steps: int, **subject: Any) -> dict[str, Any]:
    """Measure in all processes of a subject. Returns the longest time, the mean loss and the total memory."""
    ranks = range(subject["processes"])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process, (folder, steps, subject), len(ranks))
        by_rank = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in ranks]
    if subject.get("compiled") and not any(Path(tempfile.gettempdir()).rglob("*.so")):
        raise RuntimeError("torch.compile did not compile the network; try a different version of PyTorch")
    together: dict[str, Callable[[list[float]], Any]] = {"step_ms": max, "loss": np.mean, "peak_mb": sum}
    return {what: join([of_rank[what] for of_rank in by_rank]) for what, join in together.items()}
