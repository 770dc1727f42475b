"""The lecture's experiment as a user runs it, on a small synthetic data set."""

import csv
import json
import shutil
import sys

import numpy as np
import pytest
import runs
from batch_size import experiment as lecture
from batch_size.cli import batch_size as command
from runs import ROOT, finished

from gluon_mgpu import implementations
from gluon_mgpu.training import records

SMALL = ("--dataset", "synthetic", "--limit", "1200", "--epochs", "2", "--device", "cpu")
FOLDERS = (
    *("1-device-batch-256", "2-devices-batch-256"),
    *("1-device-batch-512", "2-devices-batch-512", "2-devices-batch-512-lr-scaled"),
)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """(folder, what was printed) of one experiment."""
    out = tmp_path_factory.mktemp("experiment")
    done = finished(sys.executable, "scripts/batch_size.py", *SMALL, "--out", out, cwd=ROOT, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    return out, done.stdout


def metrics(out):
    """{name: array}, each (5 runs, 2 epochs)."""
    runs = [[json.loads(line) for line in (out / f / "metrics.jsonl").read_text().splitlines()] for f in FOLDERS]
    return {name: np.array([[epoch[name] for epoch in run] for run in runs]) for name in runs[0][0]}


def test_the_runs_are_those_of_the_lecture_with_one_seed(experiment):
    configs = [json.loads((experiment[0] / f / "config.json").read_text()) for f in FOLDERS]
    found = [(len(c["devices"]), c["batch_size"]) for c in configs]
    assert found == [(1, 256), (2, 256), (1, 512), (2, 512), (2, 512)]
    assert [(c["threads"], c["seed"], c["limit"]) for c in configs] == [(1, 1, 1200)] * 5
    np.testing.assert_allclose(metrics(experiment[0])["learning_rate"], np.repeat([[0.2, 0.2, 0.2, 0.2, 0.4]], 2, 0).T)


def test_one_and_two_devices_learn_the_same_from_equal_batches_only(experiment):
    one, two, one_large, large, scaled = metrics(experiment[0])["train_loss"]
    for a, b in ((large, two), (scaled, two), (scaled, large)):
        for same in (one - two, one_large - large):
            assert np.abs(same).max() < np.abs(a - b).max() / 100


def test_finished_runs_are_shown_again_and_not_trained_again(experiment, capfd):
    out, text = experiment
    before = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    assert runs.call(capfd, command, *SMALL, "--out", out) == (0, text, "")
    assert {path: path.stat().st_mtime_ns for path in before} == before and len(before) == 5


@pytest.mark.parametrize("options", [("--lr", 0.3), ("--impl", "highlevel"), ("--epochs", 1)])
def test_runs_of_another_experiment_are_refused(options, experiment, capfd):
    runs.error(capfd, command, *SMALL, "--out", experiment[0], *options)


def test_more_epochs_continue_the_runs(experiment, tmp_path):
    folder = shutil.copytree(experiment[0] / FOLDERS[0], tmp_path / "run")
    options = {"impl": "scratch", "num_gpus": 1, "dataset": "synthetic", "limit": 1200, "device": "cpu", "seed": 1}
    first, epochs = records.last(folder)[-1].history, []
    more = lecture.finish("a run", folder, {**options, "epochs": 3}, epochs.append)
    assert len(more) == 3 and more[:2] == first and sum(epochs) == 3


def test_a_sweep_trains_every_batch_size_with_every_learning_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(lecture, "SIZES", (32, 64))
    monkeypatch.setattr(lecture, "FACTORS", (1, 3))

    def train(name, folder, options, *_):  # in this process, which is faster
        return implementations.train(out=folder, **options)

    monkeypatch.setattr(lecture, "finish", train)
    results = lecture.sweep(tmp_path, dataset="synthetic", limit=300, epochs=1, device="cpu")
    pairs = [(32, 0.2), (32, 0.6), (64, 0.2), (64, 0.6)]
    assert [(r.config["batch_size"], r.config["lr"]) for r in results] == pairs
    assert [len(r.config["devices"]) for r in results] == [2] * 4
    found = [r.epochs[-1].test_accuracy for r in results]
    lines = lecture.sweep_table(results).splitlines()[2:]
    for row, size, steps, of_size in zip(lines, (32, 64), (10, 5), (found[:2], found[2:])):
        best = "0.6" if of_size[1] > of_size[0] else "0.2"
        assert row.split() == [str(size), str(steps), *(f"{accuracy:.3f}" for accuracy in of_size), best]
    rows = csv.DictReader((tmp_path / "batch-size-sweep.csv").open())
    written = [((int(row["batch_size"]), float(row["lr"])), int(row["step"])) for row in rows]
    assert written == list(zip(pairs, (10, 10, 5, 5)))
    assert (tmp_path / "batch-size-sweep.png").read_bytes().startswith(b"\x89PNG")
