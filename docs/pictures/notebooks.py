"""Draws notebooks.png: the accuracies that two notebooks printed, among the kept runs of the same experiments."""

import json
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))
from parity.recipes import RECIPES  # noqa: E402

KEPT = json.loads((SCRIPTS / "parity/spread.json").read_text())["test_accuracy"]
PANELS = {
    "scratch-lenet-fashion-mnist-2gpu": "from scratch, Fashion-MNIST, 2 devices",
    "gluon-lenet-mnist-4gpu": "with Gluon, MNIST, 4 devices",
}

with rc_context({"font.size": 11}):
    figure = Figure(figsize=(5.2, 4.8), layout="constrained")
    for axes, (recipe, title) in zip(figure.subplots(2), PANELS.items()):
        printed, kept = RECIPES[recipe].test_accuracy, KEPT[recipe]
        epochs = range(1, len(printed) + 1)
        for i, accuracies in enumerate(kept.values()):
            label = f"{len(kept)} runs here, on CPU" if i == 0 else None
            axes.plot(epochs, accuracies, color="tab:blue", linewidth=1, alpha=0.5, label=label)
        axes.plot(epochs, printed, "ko", markersize=8, label="the notebook, on GPUs", zorder=3)
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set(ylabel="test accuracy", xticks=epochs)
        axes.grid(alpha=0.3)
    axes.set_xlabel("epoch")
    axes.legend(loc="lower right")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=115)
