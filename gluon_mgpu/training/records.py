"""What a run leaves in its folder, and how it goes on from there.

config.json, metrics.jsonl, curves.png and checkpoint.npz: each is rewritten whole. A run is resumed from the checkpoint
alone, which holds the settings and the history too. While a run writes there, the folder is locked against others.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from gluon_mgpu import IMPLS, __version__
from gluon_mgpu.distributed import process as place
from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import checkpoint
from gluon_mgpu.training.settings import MODELS, Settings

if TYPE_CHECKING:
    import numpy as np
    from tensorboard.summary import Writer

    from gluon_mgpu.training import loop

FORMAT = 1
FILES = ("config.json", "metrics.jsonl", "curves.png", "checkpoint.npz")
VELOCITY = "velocity/"  # before a parameter's name: what momentum remembers of it
SETTINGS = tuple(f.name for f in fields(Settings))
MAY_CHANGE = ("impl", "kvstore", "compress", "workers", "devices", "threads", "shares", "hybridize")  # on resume
MOST_SHARE_DRAWING = 0.005  # of the time of training


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

    history: list[Epoch] = field(default_factory=list)  # of those that are done
    steps: int = 0  # of the epoch that is not done
    loss_sum: float = 0.0  # over the examples of these steps
    seconds: float = 0.0  # that these steps took

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "history": [epoch._asdict() for epoch in self.history]}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Position:
        """From what `as_json` gave, or a checkpoint's facts."""
        history = [Epoch(**epoch) for epoch in facts["history"]]
        return cls(history, facts["steps"], facts["loss_sum"], facts["seconds"])

    def __str__(self) -> str:
        done = [(len(self.history), "epoch"), (self.steps, "step")]
        return " and ".join(f"{n} {what}{'s'[: n != 1]}" for n, what in done if n) or "no step"

    def ended(self, examples: int, test_accuracy: float, learning_rate: float) -> None:
        """The epoch is done and evaluated."""
        seconds, loss, number = self.seconds, self.loss_sum / examples, len(self.history) + 1
        self.history.append(Epoch(number, seconds, examples / seconds, loss, test_accuracy, learning_rate))
        self.steps, self.loss_sum, self.seconds = 0, 0.0, 0.0


class Run:
    """The folder of one run, as a context manager that holds its lock; with neither out nor resume it keeps nothing.

    Raises UsageError where out holds a run already, resume none, or another run is writing there.
    """

    def __init__(
        self, out: str | Path | None = None, resume: str | Path | None = None, tensorboard: bool = False
    ) -> None:
        for option, folder in (("--out", out), ("--resume", resume)):
            if folder is not None and not str(folder):
                raise UsageError(f"{option} '': give a folder, such as runs/first")
        if out and resume and Path(out) != Path(resume):
            raise UsageError(f"--out {out} --resume {resume}: a resumed run stays in its folder; leave --out away")
        if tensorboard and not (out or resume):
            raise UsageError("--tensorboard writes into the run's folder: give --out too")
        self.Writer = _tensorboard_writer() if tensorboard else None
        self.resumed = bool(resume)
        self.asked = f"--resume {resume}" if resume else f"--out {out}"
        self.keeps = bool(out or resume)
        self.folder = Path(resume or out or os.devnull)
        self.locked: int | None = None
        self.writer: Writer | None = None
        self.begun = False
        self.training = 0.0  # seconds since the last picture
        self.drawing = 0.05  # seconds that it took

    def __enter__(self) -> Run:
        if self.folder.is_dir():
            try:
                self._lock()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if self.writer:
            self.writer.close()
        if kind and issubclass(kind, Error):
            self.failed()
        if self.locked is not None:
            os.close(self.locked)

    def failed(self) -> None:
        """Leave the folder as it was, where nothing came of the run, so that it can be used again."""
        if self.begun and not self.resumed and not self._holds("checkpoint.npz"):
            (self.folder / "config.json").unlink(missing_ok=True)

    def _holds(self, *names: str) -> bool:
        return any((self.folder / name).exists() for name in names)

    def _lock(self) -> None:
        """A lock on the folder itself: it leaves no file, and ends with the process, however that ends."""
        try:
            self.locked = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.asked}: another run is writing there: let it end") from None
        except OSError as error:
            raise Error(f"{self.asked}: the folder cannot be locked ({error.strerror}): give another one") from None
        if not self.resumed and self._holds(*FILES):
            raise UsageError(f"{self.asked}: a run is there already; --resume goes on with it, or give another folder")
        for name in FILES:
            checkpoint.remove_half_written(self.folder / name)  # by a run that was killed

    def position(self, settings: Settings) -> tuple[Settings, dict[str, np.ndarray] | None, Position]:
        """(settings, arrays, Position) to go on from; arrays is None where there are no parameters yet.

        Raises UsageError where the settings are not those of the run.
        """
        if not self.resumed:
            return settings, None, Position()
        arrays, self.config, recorded, position = last(self.folder)
        free = {"epochs", "shares"} if recorded.schedule != "cosine" else {"shares"}
        for name in SETTINGS:
            given, kept = getattr(settings, name), getattr(recorded, name)
            if name == "epochs" and given != kept and name not in free:
                raise UsageError(f"{self.asked}: its cosine schedule ends with epoch {kept}, which cannot change")
            if given != kept and name not in free and not (name == "seed" and given is None):
                option = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{self.asked}: the run has {name} {kept}, not {given}: give its own, or leave {option} away"
                )
        if settings.epochs < len(position.history):
            raise UsageError(f"{self.asked}: epochs {settings.epochs}: {len(position.history)} are done already")
        done = len(position.history) == settings.epochs
        other = settings.epochs != recorded.epochs and not done
        epochs = f": epochs {settings.epochs} where the run had {recorded.epochs}" if other else ""
        place.say(f"resuming {self.folder} after {position}{epochs}")
        if done:
            place.say(f"all epochs are done{'; --epochs gives it more' * ('epochs' in free)}")
        if (self.folder / "tensorboard").exists() and not self.Writer:
            try:
                self.Writer = _tensorboard_writer()
            except UsageError as error:
                place.say(f"{self.folder / 'tensorboard'} is not written to: {error}")
        return replace(settings, seed=recorded.seed), arrays, position

    def restore(self, replicas: loop.Replicas, arrays: dict[str, np.ndarray]) -> None:
        """Give the replicas a checkpoint's arrays, which must be theirs by name and shape."""
        expected = own(replicas)
        if {n: a.shape for n, a in arrays.items()} != {n: a.shape for n, a in expected.items()}:
            raise Error(f"{self.folder / 'checkpoint.npz'} holds the parameters of another network")
        give(replicas, arrays)

    def begin(self, config: dict[str, Any], replicas: loop.Replicas, position: Position) -> None:
        """When training begins: a run that never comes to that leaves nothing. config: what JSON can hold."""
        if not self.keeps:
            return
        config = json.loads(json.dumps({**config, "version": __version__}))  # as it is read back
        if self.resumed:
            self._say_what_changed(config, replicas)
        self.config = config
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Error(f"{self.asked}: cannot be written ({error.strerror}): give another folder") from None
        if self.locked is None:
            self._lock()
        draw_curves([], io.BytesIO())  # loads matplotlib now, rather than within the first epochs
        self.begun = True
        self._write("config.json", json.dumps(self.config, indent=2) + "\n")
        if self.resumed:
            self._checkpoint(replicas, position)  # so that it is resumed with what was changed

    def _say_what_changed(self, config: dict[str, Any], replicas: loop.Replicas) -> None:
        was, both = self.config, self.config.keys() & config.keys()
        changed = [name for name in MAY_CHANGE if name in both and config[name] != was[name]]
        if changed:
            shown = [["even" if c[name] is None else c[name] for c in (config, was)] for name in changed]
            said = ", ".join(f"{name} {now} where the run had {then}" for name, (now, then) in zip(changed, shown))
            bits = "the same to rounding, not bit for bit"
            if replicas.statistics and {"devices", "shares", "workers"} & set(changed):
                bits = "not the same result, since batch normalization is of each device's shard"
            place.say(f"{said}: {bits}")

    def epoch(self, replicas: loop.Replicas, position: Position) -> None:
        """After an epoch."""
        if not self.keeps:
            return
        self._checkpoint(replicas, position)
        self._metrics(position)
        if self.Writer:
            self._scalars(position)
        self.training += position.history[-1].train_seconds
        if self.drawing < MOST_SHARE_DRAWING * self.training:
            self._draw(position)

    def end(self, position: Position) -> None:
        """After the last epoch."""
        if self.keeps and (self.training or self.resumed):  # else the last picture has it all
            self._metrics(position)
            self._draw(position)

    def interrupted(self, replicas: loop.Replicas, position: Position, steps_an_epoch: int) -> None:
        """On Ctrl-C, between two steps."""
        if not self.keeps:
            return
        self._checkpoint(replicas, position)
        self._metrics(position)
        path, again = self.folder / "checkpoint.npz", f"--resume {self.folder} goes on"
        within = f"{position.steps} of {steps_an_epoch} steps of epoch {len(position.history) + 1}"
        place.say(f"{path} holds the parameters after {within if position.steps else position}; {again}")
        if position.history:
            self._draw(position)

    def _checkpoint(self, replicas: loop.Replicas, position: Position) -> None:
        facts = {"format": FORMAT, "config": self.config, **position.as_json()}
        checkpoint.save(self.folder / "checkpoint.npz", own(replicas), facts)

    def _metrics(self, position: Position) -> None:
        self._write("metrics.jsonl", "".join(json.dumps(epoch._asdict()) + "\n" for epoch in position.history))

    def _scalars(self, position: Position) -> None:
        if self.writer:
            epochs = position.history[-1:]
        else:  # with what an earlier part of the run may not have written
            assert self.Writer
            epochs = position.history
            self.writer = self.Writer(str(self.folder / "tensorboard"))
        for epoch in epochs:
            for name, value in epoch._asdict().items():
                if name != "epoch":
                    self.writer.add_scalar(name, value, epoch.epoch)
        self.writer.flush()

    def _draw(self, position: Position) -> None:
        start = time.perf_counter()
        checkpoint.write_whole(self.folder / "curves.png", lambda file: draw_curves(position.history, file))
        self.training, self.drawing = 0.0, time.perf_counter() - start

    def _write(self, name: str, text: str) -> None:
        checkpoint.write_whole(self.folder / name, lambda file: file.write(text.encode()))


def last(folder: str | Path) -> tuple[dict[str, np.ndarray] | None, dict[str, Any], Settings, Position]:
    """(arrays, config, Settings, Position) of the run in a folder, of its checkpoint; before the first one arrays is
    None. Raises UsageError where no run is, Error for a file that is cut off, altered, or not of this version."""
    path = Path(folder) / "checkpoint.npz"
    if Path(folder).is_file():
        raise UsageError(f"{folder} is a file: give the folder of a run, such as {Path(folder).parent}")
    arrays, position = None, Position()
    if path.exists():
        arrays, facts = checkpoint.load(path)
        if facts.get("format") != FORMAT:
            raise Error(f"{path} is of another version of gluon_mgpu: use that one for it")
        config, position = facts["config"], Position.from_json(facts)
    else:
        path = Path(folder) / "config.json"
        try:
            config = json.loads(path.read_bytes())
        except FileNotFoundError:
            runs = sorted(config.parent for config in Path(folder).glob("*/config.json"))
            if runs:
                raise UsageError(f"{folder} is no run itself: give one in it, such as {runs[0]}") from None
            raise UsageError(f"{folder}: there is no run; train.py --out {folder} begins one") from None
        except (OSError, ValueError) as error:
            raise Error(f"{path} cannot be read ({error}): begin the run anew in another folder") from None
    try:
        settings = Settings(**{name: config[name] for name in SETTINGS})
        if config["impl"] not in IMPLS or not _devices(config):
            raise ValueError(f"impl {config['impl']} on {config['devices']}")
    except (KeyError, TypeError, ValueError, UsageError) as error:
        own = isinstance(error, UsageError) and config["model"] not in MODELS
        mend = "give the network with highlevel.add_model, from Python" if own else "begin it anew in another folder"
        raise Error(f"{path} describes no run that can be ({error}): {mend}") from None
    return arrays, config, settings, position


def _devices(config: dict[str, Any]) -> list[tuple[str, int]]:
    """[("cpu", 0), ("cpu", 1)] from config.json's devices; ValueError for what are none."""
    found = []
    for device in config["devices"]:
        match = re.fullmatch(r"(cpu|gpu)\((\d+)\)", device)
        if not match:
            raise ValueError(f"devices {config['devices']}")
        found.append((match[1], int(match[2])))
    return found


def options(folder: str | Path) -> dict[str, Any]:
    """What `train` wants to go on with the run in a folder: its settings, implementation and devices."""
    _, config, settings, _ = last(folder)
    devices = _devices(config)
    kept = {"hybridize": config["hybridize"]} if "hybridize" in config else {}
    where = {"gpus": [index for _, index in devices], "device": devices[0][0]}
    return {**asdict(settings), "impl": config["impl"], **kept, **where}


def _tensorboard_writer() -> type[Writer]:
    try:
        from tensorboard.summary import Writer
    except ImportError:
        raise UsageError("--tensorboard needs the tensorboard package: pip install tensorboard") from None
    return Writer


def own(replicas: loop.Replicas) -> dict[str, np.ndarray]:
    """{name: NumPy array}: all that a checkpoint holds of the replicas."""
    velocities = {VELOCITY + name: array for name, array in replicas.velocities().items()}
    return {**replicas.parameters(), **velocities}


def give(replicas: loop.Replicas, arrays: dict[str, np.ndarray]) -> None:
    """Have the replicas go on from what `own` gave."""
    velocities = {n[len(VELOCITY) :]: a for n, a in arrays.items() if n.startswith(VELOCITY)}
    replicas.load({n: a for n, a in arrays.items() if not n.startswith(VELOCITY)}, velocities)


def draw_curves(history: Sequence[Epoch], file: BinaryIO | str | Path) -> None:
    """Loss and accuracy by epoch, as a PNG picture."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 3.2))
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.15, top=0.95, wspace=0.25)
    panels = (("training loss", [e.train_loss for e in history]), ("test accuracy", [e.test_accuracy for e in history]))
    for axes, (title, values) in zip(figure.subplots(1, 2), panels):
        axes.plot([e.epoch for e in history], values, marker="o")
        axes.set(ylabel=title, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
    figure.savefig(file, format="png", dpi=120)
