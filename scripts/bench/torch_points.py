"""Measures a point with PyTorch, on the same networks, data and batches.

A point with several workers is DistributedDataParallel over gloo.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bench import timing
from bench.grids import SCRIPTS, Point
from bench.timing import LR, Train
from gluon_mgpu.data.datasets import Dataset

sys.path.append(str(SCRIPTS.parent / "docs/pytorch"))
import ddp  # type: ignore[import-not-found]  # noqa: E402


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


def network(model: str) -> nn.Module:
    """Create a network with the parameters of `timing.initial`."""
    net = {"lenet": ddp.lenet, "resnet18": resnet18}[model]()
    for module in net.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True  # which is faster
    for name, p in net.named_parameters():
        if name.endswith("bias"):  # PyTorch draws biases of convolutions and dense layers at random
            nn.init.zeros_(p)
    load(net, timing.initial({name: p.detach().numpy() for name, p in net.named_parameters()}))
    return net


@torch.no_grad()
def load(net: nn.Module, arrays: dict[Any, np.ndarray]) -> None:
    """Copy arrays, {any name: NumPy array}, into the network's parameters, in the order of `net.parameters()`."""
    for p, array in zip(net.parameters(), arrays.values()):
        p.copy_(torch.from_numpy(array))


def trainer(rank: int, point: Point) -> Train:
    """Create a function that trains the network in this process, which is number `rank` of the point's workers."""
    torch.set_num_threads(point.threads)
    layout = torch.channels_last if "channels_last" in point.impl else torch.contiguous_format
    net = network(point.model).to(memory_format=layout)
    # Compile the network before wrapping it: PyTorch does not compile a Sequential in a compiled wrapper.
    replica = torch.compile(net) if "torch.compile" in point.impl else net
    if point.workers > 1:
        replica = nn.parallel.DistributedDataParallel(replica, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR[point.model])

    def train(data: Dataset, order: np.ndarray) -> tuple[float, float]:
        losses, sizes, start = [], [], time.perf_counter()
        for i in range(0, len(order), point.batch_size):
            shard = np.array_split(order[i : i + point.batch_size], point.workers)[rank]
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


def _worker(rank: int, folder: str, point: Point, steps: int, pipe: str) -> None:
    """Measure in worker number `rank`. The workers meet in `folder`."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=point.workers)
    timing.take_turns(pipe, _of_worker(rank, point, steps))
    os._exit(0)  # destroy_process_group and Python's exit can hang or abort in gloo's threads


def _of_worker(rank: int, point: Point, steps: int) -> Iterator[dict[str, Any] | None]:
    """Yield the longest time, mean loss and total memory of all workers in the first one, and None in the others."""
    together: dict[str, Callable[[list[float]], Any]] = {"step_ms": max, "loss": np.mean, "peak MB": sum}
    for measured in timing.steps_of(trainer(rank, point), point, steps):
        by_rank: list[Any] = [None] * point.workers
        dist.all_gather_object(by_rank, measured)
        if "torch.compile" in point.impl and not any(Path(tempfile.gettempdir()).rglob("*.so")):
            raise RuntimeError("torch.compile did not compile the network; try a different version of PyTorch")
        yield {what: join([of[what] for of in by_rank]) for what, join in together.items()} if rank == 0 else None


def measure(point: Point, steps: int, pipe: str) -> None:
    """Measure a point in processes of its own, at each turn."""
    if point.device:
        timing.take_turns(pipe, _calls(point, steps))
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_worker, (folder, point, steps, pipe), point.workers)


def _calls(point: Point, steps: int) -> Iterator[dict[str, float]]:
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = False, True
    is_gpu = point.device == "gpu"
    device = torch.device("cuda" if is_gpu else "cpu")
    net = network(point.model).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR[point.model])
    X = torch.rand(point.batch_size, 1, 28, 28, device=device)
    y = torch.zeros(point.batch_size, dtype=torch.long, device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        optimizer.step()

    return timing.calls_of(step, torch.cuda.synchronize if is_gpu else lambda: None, steps)
