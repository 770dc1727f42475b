"""The folder of a run that trains: checkpoint.npz, which holds the run, and for readers config.json, metrics.jsonl and
curves.png. Only this module writes to it. Every update rewrites the whole file.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from gluon_mgpu.support import files
from gluon_mgpu.support.errors import Error, UsageError, setting
from gluon_mgpu.training import checkpoint
from gluon_mgpu.training.record import CHECKPOINT, Epoch, Run, read
from gluon_mgpu.training.workers import Group

CONFIG, METRICS, CURVES = "config.json", "metrics.jsonl", "curves.png"
FILES = (CONFIG, METRICS, CURVES, CHECKPOINT)
SECONDS_PER_DRAWING = 60  # minimum number of seconds between updates of curves.png during a run


class Folder:
    """A folder that stays open and locked until `close`. Files are written relative to the open folder, and only while
    its path still names it, so that no other run of that name is overwritten."""

    def __init__(self, path: str | Path, option: str) -> None:
        """Lock the folder, if it exists. option: the setting that names it: "resume" for the folder of a run, or "out".

        Raises UsageError if another process is writing to the folder, or if a new run would overwrite a run.
        """
        self.path, self.option = Path(path), option
        self._descriptor: int | None = None
        self._drawn = 0.0  # time.monotonic() when curves.png was last drawn
        if os.path.isdir(path):  # Path.is_dir fails for a name that is too long
            self._open()

    def create(self) -> None:
        """Create the folder, if it does not exist. Raises Error if it cannot be written to: now, not after the first
        epoch."""
        try:
            import matplotlib.figure  # noqa: F401  # which curves.png needs after the first epoch
        except ValueError:
            raise UsageError("MPLBACKEND", os.environ.get("MPLBACKEND"), "not a backend of Matplotlib") from None
        try:
            if self._descriptor is None:
                self.path.mkdir(parents=True, exist_ok=True)
                self._open()
            self._check_path()
            tempfile.TemporaryFile(dir=self.path).close()
        except OSError as error:
            option = setting(self.option, self.path)
            raise Error(f"{option}: cannot write to the folder ({error.strerror}); use another folder") from None

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def write(self, run: Run) -> None:
        """Write the run, config.json and metrics.jsonl. Raises Error if that fails, or if the folder's path now names
        another one; no file is then changed."""
        content = checkpoint.packed(run.arrays, run.as_json())
        self._write(CHECKPOINT, lambda file: file.write(content))
        self._write_text(run)
        if run.position.history and time.monotonic() - self._drawn > SECONDS_PER_DRAWING:
            self._draw(run.position.history)

    def end(self, run: Run) -> None:
        """Write the final metrics and curves."""
        self._write_text(run)
        if run.position.history:
            self._draw(run.position.history)

    def _open(self) -> None:
        """Lock the folder, and remove temporary files left by killed processes."""
        self._descriptor = files.lock(self.path, self.option)
        try:
            for name in FILES[::-1] if self.option == "out" else ():
                if os.path.lexists(self.path / name):
                    resume = f"continue it with {setting('resume', self.path)}, or "
                    holds = "a run; " + resume if name == CHECKPOINT else f"{name}, but no checkpoint; remove it, or "
                    raise UsageError("out", self.path, f"the folder holds {holds}use another folder")
            for name in os.listdir(self._descriptor):
                if re.fullmatch(rf"\.({'|'.join(map(re.escape, FILES))})\..*{re.escape(files.PART)}", name):
                    with suppress(OSError):  # if the folder is not writable, the next attempt to write raises an error
                        os.unlink(name, dir_fd=self._descriptor)
        except BaseException:
            self.close()
            raise

    def _write_text(self, run: Run) -> None:
        config = json.dumps(run.described(), indent=2) + "\n"
        metrics = "".join(json.dumps(epoch._asdict()) + "\n" for epoch in run.position.history)
        self._write(CONFIG, lambda file: file.write(config.encode()))
        self._write(METRICS, lambda file: file.write(metrics.encode()))

    def _write(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        try:
            files.write_in(self._check_path(), name, write)
        except OSError as error:
            raise files.cannot_write(self.path / name, error) from None

    def _check_path(self) -> int:
        """Raise Error if the path does not name the open folder. Returns its descriptor."""
        assert self._descriptor is not None
        try:
            is_same = os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except OSError:
            is_same = False
        if not is_same:
            advice = "the run's folder was moved, deleted or replaced, so training stopped"
            raise Error(f"{self.path}: {advice}; if it was moved, continue with its new path")
        return self._descriptor

    def _draw(self, history: list[Epoch]) -> None:
        """Plot loss and accuracy against epochs."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(8, 3.2), layout="constrained")
        losses, accuracies = [e.train_loss for e in history], [e.test_accuracy for e in history]
        panels = (("training loss", losses), ("test accuracy", accuracies))
        for axes, (title, values) in zip(figure.subplots(1, 2), panels):
            axes.plot([e.epoch for e in history], values, marker="o")
            axes.set(ylabel=title, xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axes.grid(alpha=0.3)
        self._write(CURVES, lambda file: figure.savefig(file, format="png", dpi=120))
        self._drawn = time.monotonic()


@contextmanager
def opened(given: dict[str, Any], group: Group) -> Iterator[tuple[Folder | None, Run | None]]:
    """Open and lock the run's folder inside the `with` block. Yields the folder and the run to resume, each None if
    there is none.

    given: the settings that the user passed, of which `resume` and `out` are used. Only worker 0 gets the folder and
    the run's arrays; the other workers get the rest of the run. Raises UsageError if `resume` names no run, or if `out`
    already holds one; Error if the checkpoint is damaged.
    """
    folder = run = None
    try:
        if group.rank == 0 and given.get("resume") is not None:
            folder = Folder(given["resume"], "resume")
            run = read(given["resume"])
        elif group.rank == 0 and given.get("out") is not None:
            folder = Folder(given["out"], "out")
        of_worker_0 = group.broadcast(run and run.as_json())
        if group.rank > 0 and of_worker_0 is not None:
            run = Run.from_json(of_worker_0, {})
        yield folder, run
    finally:
        if folder:
            folder.close()
