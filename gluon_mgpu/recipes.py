"""The notebooks' experiments by name: options of train.py, where they come from, the accuracies printed there."""

from typing import NamedTuple

SCRATCH = '"Multi-GPU Computation with Data Parallelism" (Dive into Deep Learning, 2019)'
GLUON = '"Training on multiple GPUs with gluon" (The Straight Dope)'
CONCISE = '"Multi-GPU Training in Python" (lecture L14.6, Dive into Deep Learning)'


class Recipe(NamedTuple):
    source: str
    options: dict  # of train.py
    test_accuracy: tuple = ()  # after each epoch, as printed there; where the source prints none: empty


def _scratch(gpus, accuracy):
    options = {"impl": "scratch", "model": "lenet", "dataset": "fashion-mnist", "gpus": gpus}
    return Recipe(SCRATCH, {**options, "batch_size": 256, "lr": 0.2, "epochs": 4}, accuracy)


def _gluon(gpus, batch_size, accuracy):
    options = {"impl": "highlevel", "model": "lenet-max", "dataset": "mnist", "gpus": gpus}
    return Recipe(GLUON, {**options, "batch_size": batch_size, "lr": 0.3, "epochs": 5}, accuracy)


def _resnet18(gpus, batch_size, lr):
    options = {"impl": "highlevel", "model": "resnet18", "dataset": "fashion-mnist", "gpus": gpus}
    return Recipe(CONCISE, {**options, "batch_size": batch_size, "lr": lr, "epochs": 4})


RECIPES = {
    "scratch-lenet-fashion-mnist-1gpu": _scratch("1", (0.10, 0.66, 0.75, 0.71)),
    "scratch-lenet-fashion-mnist-2gpu": _scratch("2", (0.10, 0.61, 0.75, 0.76)),
    "gluon-lenet-mnist-1gpu": _gluon("1", 64, (0.9685, 0.9814, 0.9862, 0.9848, 0.9853)),
    "gluon-lenet-mnist-4gpu": _gluon("4", 256, (0.9488, 0.9693, 0.9763, 0.9801, 0.9844)),
    "gluon-resnet18-fashion-mnist-1gpu": _resnet18("1", 256, 0.1),
    "gluon-resnet18-fashion-mnist-2gpu": _resnet18("2", 512, 0.2),
}


def table():
    """Lines for a terminal: each recipe with its options, its source, and what that printed."""
    lines = []
    for name, recipe in RECIPES.items():
        options = " ".join(f"--{option.replace('_', '-')} {value}" for option, value in recipe.options.items())
        printed = " ".join(map(str, recipe.test_accuracy)) or "not printed there"
        lines += [name, f"    {options}", f"    source: {recipe.source}", f"    test accuracy there: {printed}"]
    return "\n".join(lines)
