"""The notebooks' experiments as options for train.py, and the accuracies that the notebooks printed."""

from __future__ import annotations

from typing import Any, NamedTuple

SCRATCH = '"Multi-GPU Computation with Data Parallelism" (Dive into Deep Learning, 2019)'
GLUON = '"Training on multiple GPUs with gluon" (The Straight Dope)'
CONCISE = '"Multi-GPU Training in Python" (lecture L14.6, Dive into Deep Learning)'

# Options that several recipes have in common
LENET = {"impl": "scratch", "model": "lenet", "dataset": "fashion-mnist", "batch_size": 256, "lr": 0.2, "epochs": 4}
LENET_MAX = {"impl": "highlevel", "model": "lenet-max", "dataset": "mnist", "lr": 0.3, "epochs": 5}
RESNET18 = {"impl": "highlevel", "model": "resnet18", "dataset": "fashion-mnist", "epochs": 4}


class Recipe(NamedTuple):
    source: str
    options: dict[str, Any]  # for train.py
    test_accuracy: tuple[float, ...] = ()  # after each epoch, as printed in the source; empty if it prints no accuracy


RECIPES = {
    "scratch-lenet-fashion-mnist-1gpu": Recipe(SCRATCH, {**LENET, "gpus": "1"}, (0.10, 0.66, 0.75, 0.71)),
    "scratch-lenet-fashion-mnist-2gpu": Recipe(SCRATCH, {**LENET, "gpus": "2"}, (0.10, 0.61, 0.75, 0.76)),
    "gluon-lenet-mnist-1gpu": Recipe(
        GLUON, {**LENET_MAX, "gpus": "1", "batch_size": 64}, (0.9685, 0.9814, 0.9862, 0.9848, 0.9853)
    ),
    "gluon-lenet-mnist-4gpu": Recipe(
        GLUON, {**LENET_MAX, "gpus": "4", "batch_size": 256}, (0.9488, 0.9693, 0.9763, 0.9801, 0.9844)
    ),
    "gluon-resnet18-fashion-mnist-1gpu": Recipe(CONCISE, {**RESNET18, "gpus": "1", "batch_size": 256, "lr": 0.1}),
    "gluon-resnet18-fashion-mnist-2gpu": Recipe(CONCISE, {**RESNET18, "gpus": "2", "batch_size": 512, "lr": 0.2}),
}
