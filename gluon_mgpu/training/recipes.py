"""The notebooks' experiments as options for train.py, and the values that the notebooks printed.

The times were measured on the authors' GPUs and are not targets. The lecture's claims are in scripts/parity/claims.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SCRATCH = '"Multi-GPU Computation with Data Parallelism" (Dive into Deep Learning, 2019)'
GLUON = '"Training on multiple GPUs with gluon" (The Straight Dope)'
CONCISE = '"Multi-GPU Training in Python" (lecture L14.6, Dive into Deep Learning)'


class Recipe(NamedTuple):
    source: str
    options: dict[str, Any]  # for train.py
    test_accuracy: tuple[float, ...] = ()  # after each epoch, as printed in the source; empty if it prints no accuracy
    train_seconds: tuple[float, ...] = ()  # per epoch, on the authors' GPUs


def _scratch(gpus: str, accuracy: tuple[float, ...], seconds: tuple[float, ...]) -> Recipe:
    options = {"impl": "scratch", "model": "lenet", "dataset": "fashion-mnist", "num_gpus": gpus}
    return Recipe(SCRATCH, {**options, "batch_size": 256, "lr": 0.2, "epochs": 4}, accuracy, seconds)


def _gluon(gpus: str, batch_size: int, accuracy: tuple[float, ...], seconds: tuple[float, ...]) -> Recipe:
    options = {"impl": "highlevel", "model": "lenet-max", "dataset": "mnist", "num_gpus": gpus}
    return Recipe(GLUON, {**options, "batch_size": batch_size, "lr": 0.3, "epochs": 5}, accuracy, seconds)


def _resnet18(gpus: str, batch_size: int, lr: float) -> Recipe:
    options = {"impl": "highlevel", "model": "resnet18", "dataset": "fashion-mnist", "num_gpus": gpus}
    return Recipe(CONCISE, {**options, "batch_size": batch_size, "lr": lr, "epochs": 4})


RECIPES = {
    "scratch-lenet-fashion-mnist-1gpu": _scratch("1", (0.10, 0.66, 0.75, 0.71), (2.7, 2.2, 2.2, 2.2)),
    "scratch-lenet-fashion-mnist-2gpu": _scratch("2", (0.10, 0.61, 0.75, 0.76), (2.5, 2.2, 2.2, 2.2)),
    "gluon-lenet-mnist-1gpu": _gluon("1", 64, (0.9685, 0.9814, 0.9862, 0.9848, 0.9853), (3.6, 3.5, 3.5, 3.4, 3.5)),
    "gluon-lenet-mnist-4gpu": _gluon("4", 256, (0.9488, 0.9693, 0.9763, 0.9801, 0.9844), (2.4, 2.3, 2.4, 2.4, 2.3)),
    "gluon-resnet18-fashion-mnist-1gpu": _resnet18("1", 256, 0.1),
    "gluon-resnet18-fashion-mnist-2gpu": _resnet18("2", 512, 0.2),
}
