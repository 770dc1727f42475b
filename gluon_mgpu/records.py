"""What a run leaves in its folder, and how it goes on from there.

config.json, metrics.jsonl, curves.png and checkpoint.npz: each is rewritten whole. A run is resumed from the checkpoint
alone, which holds the settings and the history too. While a run writes there, the folder is locked against others.
"""

import fcntl
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from gluon_mgpu import __version__, checkpoint
from gluon_mgpu.errors import Error, UsageError
from gluon_mgpu.settings import Settings

FORMAT = 1
FILES = ("config.json", "metrics.jsonl", "curves.png", "checkpoint.npz")
VELOCITY = "velocity/"  # before a parameter's name: what momentum remembers of it
SETTINGS = tuple(f.name for f in fields(Settings))
MAY_CHANGE = ("impl", "devices", "shares", "hybridize")  # on resume, and only the rounding with it
MOST_SHARE_DRAWING = 0.01  # of the time of training


class Epoch(NamedTuple):
    """What an epoch leaves: a line of metrics.jsonl."""

    epoch: int  # from 1
    train_seconds: float  # of training alone, without the evaluation
    samples_per_second: float
    train_loss: float  # mean over the examples, each at the step that trained on it
    test_accuracy: float  # share of the test set, 0 to 1
    learning_rate: float  # of the last step


@dataclass
class Position:
    """Where a run stands. With the seed this is all that the shuffling needs: an epoch's order comes from both."""

    history: list = field(default_factory=list)  # an Epoch for each that is done
    steps: int = 0  # of the epoch that is not done
    loss_sum: float = 0.0  # over the examples of these steps
    seconds: float = 0.0  # that these steps took

    def ended(self, examples, test_accuracy, learning_rate):
        """The epoch is done and evaluated."""
        seconds, loss, number = self.seconds, self.loss_sum / examples, len(self.history) + 1
        self.history.append(Epoch(number, seconds, examples / seconds, loss, test_accuracy, learning_rate))
        self.steps, self.loss_sum, self.seconds = 0, 0.0, 0.0


class Run:
    """The folder of one run, as a context manager that holds its lock; with neither out nor resume it keeps nothing.

    Raises UsageError where out holds a run already, resume none, or another run is writing there.
    """

    def __init__(self, out=None, resume=None, tensorboard=False):
        if out and resume and Path(out) != Path(resume):
            raise UsageError(f"--out {out} --resume {resume}: a resumed run stays in its folder; leave --out away")
        if tensorboard and not (out or resume):
            raise UsageError("--tensorboard writes into the run's folder: give --out too")
        self.Writer = _tensorboard_writer() if tensorboard else None
        self.resumed = bool(resume)
        self.asked = f"--resume {resume}" if resume else f"--out {out}"
        self.folder = Path(resume or out) if out or resume else None
        self.locked = self.writer = None
        self.training = 0.0  # seconds since the last picture
        self.drawing = 0.5  # seconds that it took; matplotlib has to load for the first

    def __enter__(self):
        if self.folder and self.folder.is_dir():
            try:
                self._lock()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_):
        if self.writer:
            self.writer.close()
        if self.locked is not None:
            os.close(self.locked)

    def _lock(self):
        """A lock on the folder itself: it leaves no file, and ends with the process, however that ends."""
        self.locked = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.asked}: another run is writing there: let it end") from None
        except OSError as error:
            raise Error(f"{self.asked}: the folder cannot be locked ({error.strerror}): give another one") from None
        if not self.resumed and (self.folder / "checkpoint.npz").exists():
            raise UsageError(f"{self.asked}: a run is there already; --resume goes on with it, or give another folder")

    def position(self, settings):
        """(settings, arrays, Position) to go on from; arrays is None where there are no parameters yet.

        Raises UsageError where the settings are not those of the run.
        """
        if not self.resumed:
            return settings, None, Position()
        arrays, self.config, position = last(self.folder)
        recorded = Settings(**{name: self.config[name] for name in SETTINGS})
        free = {"epochs", "shares"} if recorded.schedule != "cosine" else {"shares"}
        for name in SETTINGS:
            given, kept = getattr(settings, name), getattr(recorded, name)
            if given != kept and name not in free and not (name == "seed" and given is None):
                raise UsageError(f"{self.asked}: the run has {name} {kept}, not {given}, and goes on with its own")
        done = f"{len(position.history)} epochs and {position.steps} steps"
        print(f"gluon_mgpu: resuming {self.folder} after {done}", file=sys.stderr)
        if len(position.history) >= settings.epochs:
            print(f"gluon_mgpu: all {settings.epochs} epochs are done; --epochs gives it more", file=sys.stderr)
        return Settings(**{**settings.as_dict(), "seed": recorded.seed}), arrays, position

    def restore(self, replicas, arrays):
        """Give the replicas a checkpoint's arrays, which must be theirs by name and shape."""
        expected = _arrays(replicas)
        if {n: a.shape for n, a in arrays.items()} != {n: a.shape for n, a in expected.items()}:
            raise Error(f"{self.folder / 'checkpoint.npz'} holds the parameters of another network")
        velocities = {n[len(VELOCITY) :]: a for n, a in arrays.items() if n.startswith(VELOCITY)}
        replicas.load({n: a for n, a in arrays.items() if not n.startswith(VELOCITY)}, velocities)

    def begin(self, config):
        """When training begins: a run that never comes to that leaves nothing. config: what JSON can hold."""
        if not self.folder:
            return
        config = json.loads(json.dumps({**config, "version": __version__}))  # as it is read back
        if self.resumed:
            self._say_what_changed(config)
        self.config = config
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.locked is None:
                self._lock()
            for name in FILES:
                for left in self.folder.glob(f".{name}.*"):  # by a run that was killed while it wrote
                    left.unlink()
            self._write("config.json", json.dumps(self.config, indent=2) + "\n")
        except OSError as error:
            raise Error(f"{self.asked}: cannot be written ({error.strerror}): give another folder") from None

    def _say_what_changed(self, config):
        was = {name: str(self.config.get(name)) for name in MAY_CHANGE}
        now = {name: str(config.get(name)) for name in MAY_CHANGE}
        changed = [f"{name} {now[name]} where the run had {was[name]}" for name in MAY_CHANGE if now[name] != was[name]]
        if changed:
            print(f"gluon_mgpu: {', '.join(changed)}: the same to rounding, not bit for bit", file=sys.stderr)

    def epoch(self, replicas, position):
        """After an epoch."""
        if not self.folder:
            return
        self._checkpoint(replicas, position)
        self._metrics(position)
        if self.Writer:
            self._scalars(position.history[-1])
        self.training += position.history[-1].train_seconds
        if self.drawing < MOST_SHARE_DRAWING * self.training:
            self._draw(position)

    def end(self, position):
        """After the last epoch."""
        if self.folder and position.history:
            self._metrics(position)
            self._draw(position)

    def interrupted(self, replicas, position):
        """On Ctrl-C, between two steps."""
        if not self.folder:
            return
        self._checkpoint(replicas, position)
        self._metrics(position)
        done = f"{len(position.history)} epochs and {position.steps} steps"
        path = self.folder / "checkpoint.npz"
        print(f"gluon_mgpu: {path} holds the parameters after {done}; --resume {self.folder} goes on", file=sys.stderr)
        if position.history:
            self._draw(position)

    def _checkpoint(self, replicas, position):
        facts = {"format": FORMAT, "config": self.config, **vars(position)}
        facts["history"] = [epoch._asdict() for epoch in position.history]
        checkpoint.save(self.folder / "checkpoint.npz", _arrays(replicas), facts)

    def _metrics(self, position):
        self._write("metrics.jsonl", "".join(json.dumps(epoch._asdict()) + "\n" for epoch in position.history))

    def _scalars(self, epoch):
        self.writer = self.writer or self.Writer(str(self.folder / "tensorboard"))
        for name, value in epoch._asdict().items():
            if name != "epoch":
                self.writer.add_scalar(name, value, epoch.epoch)
        self.writer.flush()

    def _draw(self, position):
        start = time.perf_counter()
        checkpoint.write_whole(self.folder / "curves.png", lambda file: draw_curves(position.history, file))
        self.training, self.drawing = 0.0, time.perf_counter() - start

    def _write(self, name, text):
        checkpoint.write_whole(self.folder / name, lambda file: file.write(text.encode()))


def last(folder):
    """(arrays, config, Position) of the run in a folder: of its checkpoint, or (None, config, Position()) before the
    first one. Raises UsageError where no run is, Error for a file that is cut off or altered."""
    path, begun = Path(folder) / "checkpoint.npz", Path(folder) / "config.json"
    if path.exists():
        arrays, facts = checkpoint.load(path)
        if facts.get("format") != FORMAT:
            raise Error(f"{path} is of another version of gluon_mgpu: use that one for it")
        history = [Epoch(**epoch) for epoch in facts["history"]]
        return arrays, facts["config"], Position(history, facts["steps"], facts["loss_sum"], facts["seconds"])
    try:
        config = json.loads(begun.read_bytes())
        missing = {*SETTINGS, "impl", "devices"} - set(config)
    except FileNotFoundError:
        raise UsageError(f"{folder}: there is no run; train.py --out {folder} begins one") from None
    except (OSError, ValueError, TypeError) as error:
        raise Error(f"{begun} cannot be read ({error}): begin the run anew") from None
    if missing:
        raise Error(f"{begun} does not say {', '.join(sorted(missing))}: begin the run anew")
    return None, config, Position()


def options(folder):
    """What `train` wants to go on with the run in a folder: its settings, implementation and devices."""
    _, config, _ = last(folder)
    kept = {name: config[name] for name in (*SETTINGS, "impl", "hybridize") if name in config}
    found = [re.fullmatch(r"(cpu|gpu)\((\d+)\)", str(device)) for device in config["devices"]]
    if not found or not all(found):
        raise Error(f"{folder}: its config.json names no devices that can be: {config['devices']}; begin the run anew")
    return {**kept, "gpus": [int(device[2]) for device in found], "device": found[0][1]}


def _tensorboard_writer():
    try:
        from tensorboard.summary import Writer
    except ImportError:
        raise UsageError("--tensorboard needs the tensorboard package: pip install 'gluon_mgpu[tensorboard]'") from None
    return Writer


def _arrays(replicas):
    velocities = {VELOCITY + name: array for name, array in replicas.velocities().items()}
    return {**replicas.parameters(), **velocities}


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
