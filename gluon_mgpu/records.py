"""What `--out DIR` keeps of a run: config.json, metrics.jsonl, curves.png and checkpoint.npz, each rewritten whole."""

import json
import sys
from pathlib import Path

from gluon_mgpu import __version__, checkpoint
from gluon_mgpu.errors import Error, UsageError


class Run:
    """A folder for one run. Raises UsageError where it holds a run already, Error where it cannot be written."""

    def __init__(self, folder):
        self.folder = Path(folder)
        if (self.folder / "checkpoint.npz").exists():
            raise UsageError(f"--out {folder}: a run is there already; give another folder, or remove that one")

    def begin(self, config):
        """When training begins: a run that never comes to that leaves nothing. config: what JSON can hold."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write("config.json", json.dumps({**config, "version": __version__}, indent=2) + "\n")
        except OSError as error:
            raise Error(f"--out {self.folder}: cannot be written ({error.strerror}): give another folder") from None

    def epoch(self, history, parameters, seed):
        """After an epoch. history: list of `loop.Epoch`; parameters: {name: NumPy array}."""
        self._write("metrics.jsonl", "".join(json.dumps(epoch._asdict()) + "\n" for epoch in history))
        self._checkpoint(parameters, seed=seed, epochs=len(history), steps=0)
        checkpoint.write_whole(self.folder / "curves.png", lambda file: draw_curves(history, file))

    def interrupted(self, history, parameters, seed, steps):
        """On Ctrl-C. steps: how many of the unfinished epoch the parameters have seen."""
        self._checkpoint(parameters, seed=seed, epochs=len(history), steps=steps)
        done = f"{len(history)} epochs and {steps} steps"
        print(f"gluon_mgpu: {self.folder / 'checkpoint.npz'} holds the parameters after {done}", file=sys.stderr)

    def _checkpoint(self, parameters, **facts):
        checkpoint.save(self.folder / "checkpoint.npz", parameters, facts)

    def _write(self, name, text):
        checkpoint.write_whole(self.folder / name, lambda file: file.write(text.encode()))


def draw_curves(history, file):
    """Loss and accuracy by epoch, as a PNG picture."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = (("training loss", [e.train_loss for e in history]), ("test accuracy", [e.test_accuracy for e in history]))
    for axes, (title, values) in zip(figure.subplots(1, 2), panels):
        axes.plot([e.epoch for e in history], values, marker="o")
        axes.set(ylabel=title, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    figure.savefig(file, format="png", dpi=120)
