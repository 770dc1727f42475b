"""Every kind of lesson with every kind of data and every operation: see TABLE.

Results are compared with those of other code: a training with a loop of plain NumPy or Gluon; scores with those that
NumPy, or Gluon without this package, computes from a checkpoint's arrays; a resumed run and several workers with an
uninterrupted run of one process, bit for bit.
"""

import json
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from unittest.mock import patch

import interrupts
import mxnet as mx
import numpy as np
import pytest
import reference as float64
from mxnet import autograd, gluon, nd
from PIL import Image
from runs import needs_mpi

from gluon_mgpu import convert, evaluate, highlevel, scratch, train
from gluon_mgpu.data import datasets
from gluon_mgpu.support import subprocesses
from gluon_mgpu.support.errors import UsageError
from gluon_mgpu.training import checkpoint
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.models import LENET_NAMES, VELOCITY, create_model, read_arrays
from gluon_mgpu.training.seeds import seed_of_step

# Each cell says what happens: "yes"; "about", if rounding differs because a batch is split in another way, or if each
# worker draws other random numbers; for devices, the lesson that continues the run, if that is another one; the setting
# that a UsageError names, or "run" if it names the run's folder; "-" if there is no run. For pairs without a row, train
# is "impl".
TABLE = """
lesson     data       options   train  stop  devices  test  image  convert  workers
scratch    synthetic  plain     yes    yes   lenet    yes   yes    yes      yes
scratch    signed     shares    yes    yes   yes      yes   run    yes      shares
lenet      synthetic  momentum  yes    yes   yes      yes   yes    yes      yes
lenet      signed     all       yes    yes   yes      yes   run    yes      shares
arrays.py  rgb        plain     yes    yes   yes      yes   yes    yes      yes
arrays.py  pixels     shares    yes    yes   yes      yes   run    yes      shares
layers.py  synthetic  momentum  yes    yes   yes      yes   yes    yes      yes
layers.py  signed     shares    yes    yes   yes      yes   run    yes      shares
layers.py  rgb        momentum  yes    yes   yes      yes   yes    yes      yes
layers.py  pixels     plain     yes    yes   yes      yes   run    yes      yes
dropout    synthetic  momentum  yes    yes   yes      yes   yes    yes      about
"""
OPTIONS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "warmup_epochs": 0.5},  # the first of two steps has half the rate
    "all": {"momentum": 0.9, "warmup_epochs": 0.5, "weight_decay": 0.01, "shares": (3, 1)},
    "shares": {"shares": (3, 1)},
}
NETWORKS = {
    "lenet": {"impl": "highlevel"},
    "dropout": {"impl": "highlevel", "model": "with dropout"},
    "arrays.py": {"lr": 1e-4},  # its images can be as large as 255
}
REGISTER = """
from gluon_mgpu.training import registry
from mxnet.gluon import nn

def with_dropout():
    net = nn.HybridSequential()
    net.add(nn.Dense(16, activation="relu"), nn.Dropout(0.5), nn.Dense(10))
    return net

registry.register("with dropout", with_dropout)
"""
exec(REGISTER)
# One row of each kind of lesson; all are in make test-all.
IN_MAKE_TEST = {
    ("scratch", "synthetic"),
    ("lenet", "signed"),
    ("arrays.py", "pixels"),
    ("layers.py", "rgb"),
    ("dropout", "synthetic"),
}
EXAMPLES, BATCH, SEED = 34, 12, 3  # the last batch of an epoch has 10 examples
STEPS = 3  # per epoch
STOP = 4  # steps before the stop
COMMON = {"gpus": 2, "device": "cpu", "batch_size": BATCH, "epochs": 2, "lr": 0.1, "seed": SEED}
# {data: (shape, classes, smallest value, largest value, type)} of own data
OWN = {
    "rgb": ((3, 8, 8), 4, 0, 255, np.uint8),
    "pixels": ((3, 8, 8), 4, 0, 255, np.float32),
    "signed": ((1, 28, 28), 3, -1, 1, np.float32),
}


NAMES, *LINES = (line.split() for line in TABLE.strip().splitlines())


def lesson_settings(lesson):
    return {"impl": lesson, **NETWORKS.get(lesson, {})}


class Row(namedtuple("Row", NAMES)):
    """A row of TABLE. The fields after options are the cells of the operations."""

    @property
    def is_own(self):
        return self.lesson.endswith(".py")

    @property
    def marks(self):
        return [] if self[:2] in IN_MAKE_TEST else [pytest.mark.slow]

    def settings(self, folder):
        """The settings of a run. folder: contains own data and lessons."""
        settings = {**COMMON, **OPTIONS[self.options], **lesson_settings(self.lesson)}
        if self.is_own:
            settings["impl"] = str(folder / self.lesson)
        if self.data == "synthetic":
            return {**settings, "dataset": "synthetic", "limit": EXAMPLES}
        return {**settings, "dataset": "own", "data_dir": str(folder / self.data)}


ROWS = [Row(*line) for line in LINES]
LESSONS, KINDS_OF_DATA = (dict.fromkeys(column) for column in list(zip(*ROWS))[:2])
MISSING = {(lesson, data) for lesson in LESSONS if lesson != "dropout" for data in KINDS_OF_DATA}
MISSING -= {(row.lesson, row.data) for row in ROWS}
ROWS += [Row(*pair, "plain", "impl", *"------") for pair in sorted(MISSING)]


def rows(operation, *cells):
    """The rows with one of these cells for an operation, as parameters of a test."""
    found = [row for row in ROWS if getattr(row, operation) in cells]
    return [pytest.param(row, id=f"{row.lesson} {row.data}", marks=row.marks) for row in found]


def array_lesson():
    """scratch with softmax regression on images (3, 8, 8) with 4 classes."""
    text = Path(scratch.__file__).read_text()
    head, _, rest = text.partition("    W1, b1, W2")
    _, _, tail = rest.partition("num_hidden=10)")
    text = f"{head}    W, b = params\n    return nd.FullyConnected(X, W, b, num_hidden=4){tail}"
    return text.replace("SHAPES = [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]", "SHAPES = [(4, 192)]")


def gluon_lesson():
    """highlevel with a network that has batch normalization, for images of any shape."""
    head, _, rest = Path(highlevel.__file__).read_text().partition("        net.add(")
    body = 'nn.Conv2D(6, 3, use_bias=False), nn.BatchNorm(), nn.Activation("relu"), nn.GlobalMaxPool2D(), nn.Dense(10)'
    return f"{head}        net.add({body})\n    return net{rest.partition('    return net')[2]}"


def own_data(shape, classes, low, high, dtype, examples):
    """Images (n, *shape) of classes with different pictures, and their labels."""
    random, labels, (channels, height, width) = np.random.default_rng(1), np.arange(examples) % classes, shape
    pictures = random.random((classes, channels, height // 4, width // 4)).repeat(4, axis=2).repeat(4, axis=3)
    images = (0.8 * pictures[labels] + 0.2 * random.random((examples, *shape))) * (high - low) + low
    images[0].flat[:2] = low, high
    return images.astype(dtype), labels


class Runs:
    """The runs of the table's rows; each is trained once. folder: contains own data, lessons and the runs."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "arrays.py").write_text(array_lesson())
        (folder / "layers.py").write_text(gluon_lesson())
        for name, kind in OWN.items():
            (folder / name).mkdir()
            images, labels = own_data(*kind, EXAMPLES + 30)
            train, test = slice(EXAMPLES), slice(EXAMPLES, None)
            arrays = {"train_images": images[train], "train_labels": labels[train]}
            arrays |= {"test_images": images[test], "test_labels": labels[test]}
            np.savez(folder / name / "data.npz", **arrays)

    def settings(self, row):
        return row.settings(self.folder)

    def path(self, row, kind):
        return self.folder / f"{row.lesson} {row.data} {kind}"

    def whole(self, row):
        """The folder of a row's uninterrupted run."""
        folder = self.path(row, "whole")
        if not folder.exists():
            train(**self.settings(row), out=folder)
        return folder

    def strong(self, row):
        """A copy of a row's uninterrupted run with large random weights, so that its scores depend on the images."""
        folder = self.path(row, "strong")
        if not folder.exists():
            arrays, facts = checkpoint.load(self.whole(row) / "checkpoint.npz")
            random, scale = np.random.default_rng(2), 0.01 if row[:2] == ("arrays.py", "pixels") else 1
            for name, array in arrays.items():
                if array.ndim > 1 and not name.startswith(VELOCITY):
                    arrays[name] = random.normal(0, scale * (2 / array[0].size) ** 0.5, array.shape)
            folder.mkdir()
            arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
            (folder / "checkpoint.npz").write_bytes(checkpoint.packed(arrays, facts))
        return folder

    def resumed(self, row, kind, **changes):
        """The folder of a run that was stopped and resumed."""
        stopped, folder = self.path(row, "stopped"), self.path(row, kind)
        if not stopped.exists():
            with interrupts.at_step(STOP, (signal.SIGINT, 0)):
                train(**self.settings(row), out=stopped)
        shutil.copytree(stopped, folder)
        data = {"data_dir": self.settings(row)["data_dir"]} if row.data in OWN else {}
        own = {"impl": self.settings(row)["impl"]} if row.is_own else {}
        train(resume=folder, **data, **own, **changes)
        return folder

    def data(self, row):
        """(train_images, train_labels, test_images, test_labels) of a row: images as float64 that networks get."""
        if row.data == "synthetic":
            arrays = datasets.synthetic(EXAMPLES, 100, SEED)[1:5]
        else:
            with np.load(self.folder / row.data / "data.npz") as file:
                arrays = [file[name] for name in ("train_images", "train_labels", "test_images", "test_labels")]
        return [a / (255 if a.dtype == np.uint8 else 1) if a.ndim == 4 else a.astype(int) for a in arrays]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs. Own lessons are not compared with one device first: tests/check/test_programs.py is about that."""
    with patch("gluon_mgpu.training.setup._compare_with_one_device", return_value=""):
        yield Runs(tmp_path_factory.mktemp("runs"))


# Other code that trains and computes scores


class Reference:
    """Trains a row's network with plain SGD. params: {name: float64 array}, as in a checkpoint."""

    def __init__(self, row, runs):
        self.options, self.data = runs.settings(row), runs.data(row)
        mx.random.seed(SEED)
        is_gluon, model = row.lesson in ("dropout", "layers.py"), self.options.get("model", "lenet")
        config = Config(impl=self.options["impl"], model=model, hybridize=not is_gluon)
        model = create_model(config.impl, [mx.cpu()], config, self.data[0].shape[1:], classes=1)
        self.net = model.net if is_gluon else None
        self.params = read_arrays(model)
        if self.net:
            self.net.collect_params().setattr("grad_req", "add")
            self.parameters = model.parameters
        else:
            self.params = {name: array.astype(np.float64) for name, array in self.params.items()}
        self.start = {name: array.copy() for name, array in self.params.items()}
        self.velocities = {name: np.zeros_like(p) for name, p in self.params.items()}
        self.losses = []  # of all examples, in the order of the steps

    def train(self, devices, workers=1):
        """devices: maps the number of a step to the number of devices. workers: between which these are divided."""
        images, labels = self.data[:2]
        for epoch in range(self.options["epochs"]):
            order = np.random.default_rng([SEED, epoch + 1]).permutation(EXAMPLES)
            for i in range(STEPS):
                batch = order[BATCH * i : BATCH * (i + 1)]
                step = STEPS * epoch + i
                seeds = [seed_of_step(SEED, worker, step) for worker in range(workers)]
                lr = self.options["lr"] * (0.5 if step == 0 and "warmup_epochs" in self.options else 1)
                self._step(images[batch], labels[batch], lr, self._ends(len(batch), devices(step)), seeds)
        return self

    def _ends(self, n, devices):
        """Where a batch is split."""
        if self.options.get("shares") and devices == 2:
            return [round(n * 0.75)]
        return np.cumsum([n // devices + (i < n % devices) for i in range(devices)])[:-1]

    def _step(self, X, y, lr, ends, seeds):
        options = self.options
        losses, gradients = self._of_gluon(X, y, ends, seeds) if self.net else self._of_numpy(X, y)
        self.losses += [*losses]
        means = {name: gradient / len(X) for name, gradient in gradients.items()}
        for name, mean in means.items():
            p, v = self.params[name], self.velocities[name]
            v *= options.get("momentum", 0)
            v -= lr * (mean + options.get("weight_decay", 0) * p)
            p += v

    def _of_numpy(self, X, y):
        """Losses and gradients."""
        losses, gradients = float64.losses_and_gradients([*self.params.values()], X, y)
        return losses, dict(zip(self.params, gradients))

    def _of_gluon(self, X, y, ends, seeds):
        """Losses and gradients. Each shard has its own running statistics, which are averaged. Each of the first shards
        begins with one of the seeds; other shards continue with the generator's numbers."""
        before = {name: array for name, array in self.params.items() if "running" in name}
        running, losses = dict.fromkeys(before, 0), []
        self.set(self.params)
        for p in self.parameters.values():
            p.zero_grad()
        for i, (X_shard, y_shard) in enumerate(zip(np.split(X, ends), np.split(y, ends))):
            self.set(before)
            if i < len(seeds):
                mx.random.seed(seeds[i])
            with autograd.record():
                loss = gluon.loss.SoftmaxCrossEntropyLoss()(self.net(nd.array(X_shard)), nd.array(y_shard))
            loss.backward()
            losses += [*loss.asnumpy()]
            for name in running:
                running[name] += self.parameters[name].data().asnumpy() * (len(X_shard) / len(X))
        self.params.update(running)
        return losses, {name: p.grad().asnumpy() for name, p in self.parameters.items() if name not in running}

    def set(self, arrays):
        for name, array in arrays.items():
            self.parameters[name].set_data(nd.array(array))


def scores(row, runs, folder, images):
    """The scores of a run's network for images as networks get them, computed from the arrays of its checkpoint."""
    arrays = {name: array.astype(np.float64) for name, array in checkpoint.load(folder / "checkpoint.npz")[0].items()}
    if row.lesson == "arrays.py":
        return images.reshape(len(images), -1) @ arrays["p0"].T + arrays["p1"]
    reference = Reference(row, runs)
    if reference.net:
        reference.set({name: array for name, array in arrays.items() if not name.startswith(VELOCITY)})
        return reference.net(nd.array(images)).asnumpy()
    return float64.scores([arrays[name] for name in LENET_NAMES], images)


def assert_same_training(folder, reference):
    """The parameters, velocities and losses of a run differ from another training's by rounding only."""
    arrays, facts = checkpoint.load(folder / "checkpoint.npz")
    expected = dict(reference.params)
    if "momentum" in reference.options:
        expected |= {VELOCITY + n: v for n, v in reference.velocities.items() if "running" not in n}
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        change = np.linalg.norm(array - reference.start.get(name, 0))
        error = np.linalg.norm(arrays[name] - array)
        assert error <= 0.001 * change + 1e-7 * array.size**0.5, (name, error, change)
    losses = np.reshape(reference.losses, (-1, EXAMPLES)).mean(1)
    assert [epoch["train_loss"] for epoch in facts["history"]] == pytest.approx(losses, rel=0.001)


def assert_same_bits(folder, expected):
    (found, facts), (arrays, other) = (checkpoint.load(path / "checkpoint.npz") for path in (folder, expected))
    assert found.keys() == arrays.keys()
    assert [name for name in found if found[name].tobytes() != arrays[name].tobytes()] == []
    losses, others = ([[e["train_loss"], e["test_accuracy"]] for e in f["history"]] for f in (facts, other))
    assert losses == others


def assert_same_scores(found, expected):
    assert found.shape == expected.shape
    spread = (expected - expected.mean(0)).std()
    assert spread > 0.05 and np.abs(found - expected).max() <= 1e-3 * spread


# The operations


@pytest.mark.parametrize("row", rows("train", "yes"))
def test_training_is_that_of_a_plain_loop(row, runs):
    assert_same_training(runs.whole(row), Reference(row, runs).train(lambda step: 2))


@pytest.mark.parametrize("row", rows("stop", "yes"))
def test_a_stopped_and_resumed_run_has_the_bits_of_an_uninterrupted_one(row, runs):
    assert_same_bits(runs.resumed(row, "resumed"), runs.whole(row))


@pytest.mark.parametrize("row", rows("devices", "yes", *LESSONS))
def test_a_run_resumed_on_other_devices_or_with_another_lesson_is_a_plain_loop_with_these_devices(row, runs):
    devices = 1 if row.options == "plain" else 3
    lesson = lesson_settings(row.devices) if row.devices in LESSONS else {}
    folder = runs.resumed(row, "devices", gpus=devices, **lesson)
    assert_same_training(folder, Reference(row, runs).train(lambda step: 2 if step < STOP else devices))


def loaded(row, runs):
    """A row's run as `evaluate` loads it, on 2 devices."""
    own = runs.settings(row)["impl"] if row.is_own else None
    return evaluate.load(runs.strong(row), own, 2, "cpu")


@pytest.mark.parametrize("row", rows("test", "yes"))
def test_an_evaluation_has_the_scores_and_counts_of_the_checkpoints_arrays(row, runs):
    trained = loaded(row, runs)
    given, labels = evaluate.held_out(trained.run, runs.settings(row).get("data_dir"))
    *_, images, expected_labels = runs.data(row)
    expected = scores(row, runs, runs.strong(row), images)
    assert_same_scores(evaluate.scores(trained, given), expected)
    np.testing.assert_array_equal(labels, expected_labels)
    correct = (expected.argmax(1) == expected_labels).sum()
    assert f"({correct}/{len(images)})" in evaluate.report(trained, given, labels)
    correct = (scores(row, runs, runs.whole(row), images).argmax(1) == expected_labels).sum()
    assert trained.run.position.history[-1].test_accuracy == correct / len(images)


@pytest.mark.parametrize("row", rows("image", "yes"))
def test_an_image_file_gets_the_scores_of_its_pixels(row, runs, tmp_path):
    trained = loaded(row, runs)
    image = runs.data(row)[2][:1]
    pixels = np.round(image * 255).astype(np.uint8)[0]
    Image.fromarray(pixels.transpose(1, 2, 0).squeeze()).save(tmp_path / "image.png")
    read = evaluate.read_image(tmp_path / "image.png", pixels.shape)
    expected = scores(row, runs, runs.strong(row), pixels[None] / 255)[0]
    powers = np.exp(expected - expected.max())
    best = powers.argsort()[::-1][:3]
    line = ", ".join(f"{i} {powers[i] / powers.sum():.4f}" for i in best)
    assert evaluate.classify(trained, ["image.png"], [read]) == f"image.png: {line}"


@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize("row", rows("convert", "yes"))
def test_gluon_loads_a_converted_network_and_computes_the_same_scores(row, runs, tmp_path):
    settings = runs.settings(row)
    network = convert.from_run(runs.strong(row), settings["impl"] if row.is_own else None, settings.get("data_dir"))
    convert.save(network, "gluon", str(tmp_path / "net"))
    found = [scores for [scores] in convert.TARGETS["gluon"].outputs(network, str(tmp_path / "net"))]
    assert_same_scores(np.concatenate(found), scores(row, runs, runs.strong(row), runs.data(row)[2]))


WORKERS = f"""
import gluon_mgpu, json, sys
{REGISTER}
from gluon_mgpu import train
from matplotlib.figure import Figure
Figure.savefig = lambda figure, file, **options: file.write(b"")
for options in json.loads(sys.argv[1]):
    train(**options)
"""


@pytest.fixture(scope="module")
def by_workers(request, runs):
    """Trains the runs of all rows with two workers of one device each."""
    more = {"gpus": 1, "kvstore": "mpi"}
    tests = [item.callspec.params for item in request.session.items if request.fixturename in item.fixturenames]
    paths = {str(runs.path(test["row"], "workers")): runs.settings(test["row"]) for test in tests}
    options = [{**settings, **more, "out": out} for out, settings in paths.items()]
    command = [Path(sys.executable).with_name("mpiexec"), "-n", "2", sys.executable, "-c", WORKERS, json.dumps(options)]
    done = subprocess.run(command, env=subprocesses.users_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_mpi
@pytest.mark.parametrize("row", rows("workers", "yes"))
def test_two_workers_have_the_bits_of_one_process_with_two_contexts(row, runs, by_workers):
    assert_same_bits(runs.path(row, "workers"), runs.whole(row))


@needs_mpi
@pytest.mark.parametrize("row", rows("workers", "about"))
def test_two_workers_train_like_a_plain_loop(row, runs, by_workers):
    assert_same_training(runs.path(row, "workers"), Reference(row, runs).train(lambda step: 2, workers=2))


REFUSED = [
    pytest.param(row, name, id=f"{row.lesson} {row.data} {name}", marks=row.marks)
    for row in ROWS
    for name in Row._fields[3:]
    if getattr(row, name) not in ("yes", "about", "-", *LESSONS)
]


@pytest.mark.parametrize("row, operation", REFUSED)
def test_what_does_not_work_is_refused_in_one_line_that_names_the_setting(row, operation, runs):
    settings, named = runs.settings(row), getattr(row, operation)
    with pytest.raises(UsageError) as refused:
        if operation == "train":
            train(**settings)
        elif operation == "image":
            black = np.zeros(runs.data(row)[0].shape[1:], np.uint8)
            evaluate.classify(loaded(row, runs), ["image.png"], [black])
        else:  # what a worker does
            config = Config(**Config.parse({**settings, "gpus": 1, "kvstore": "mpi"}))
            create_model(config.impl, [mx.cpu()], config)
    assert "\n" not in str(refused.value)
    if named == "run":
        assert str(runs.strong(row)) in str(refused.value)
    else:
        assert refused.value.name == named
