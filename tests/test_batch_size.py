"""The lecture's experiment as a user runs it, on a small synthetic set."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from gluon_mgpu.training import batch_size, checkpoint, records

SCRIPT = Path(__file__).parents[1] / "scripts" / "batch_size.py"
SMALL = ("--dataset", "synthetic", "--limit", "2000", "--epochs", "2", "--device", "cpu")
FOLDERS = (
    "1-device-batch-256",
    "2-devices-batch-256",
    "2-devices-batch-512",
    "2-devices-batch-512-lr-scaled",
)


def command(*options):
    return [sys.executable, str(SCRIPT), *SMALL, *map(str, options)]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """(folder, what was printed) of one experiment."""
    out = tmp_path_factory.mktemp("experiment")
    done = subprocess.run(command("--out", out), capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return out, done.stdout


def metrics(out):
    """{name: array}, each (4 runs, 2 epochs)."""
    runs = [[json.loads(line) for line in (out / f / "metrics.jsonl").read_text().splitlines()] for f in FOLDERS]
    return {name: np.array([[epoch[name] for epoch in run] for run in runs]) for name in runs[0][0]}


def test_the_four_runs_are_those_of_the_lecture_from_one_seed(experiment):
    configs = [json.loads((experiment[0] / f / "config.json").read_text()) for f in FOLDERS]
    assert [(len(c["devices"]), c["batch_size"]) for c in configs] == [(1, 256), (2, 256), (2, 512), (2, 512)]
    np.testing.assert_allclose(metrics(experiment[0])["learning_rate"], np.repeat([[0.2, 0.2, 0.2, 0.4]], 2, 0).T)
    for c in configs:
        assert {"impl": "scratch", "dataset": "synthetic", "limit": 2000, "epochs": 2, "seed": 1}.items() <= c.items()


def test_the_table_has_the_median_seconds_their_ratio_to_one_device_and_every_accuracy(experiment):
    out, printed = experiment
    found = metrics(out)
    seconds = np.median(found["train_seconds"], axis=1)
    rows = printed.splitlines()[2:6]
    for row, s, accuracies in zip(rows, seconds, found["test_accuracy"]):
        assert row.split()[-4:] == [f"{s:.2f}", f"{seconds[0] / s:.2f}", *(f"{a:.2f}" for a in accuracies)]
    assert [row[:32].strip() for row in rows] == [
        "1 device, batch 256", "2 devices, batch 256", "2 devices, batch 512", "2 devices, batch 512, lr scaled",
    ]  # fmt: skip
    assert [row.split()[-5] for row in rows] == ["0.2", "0.2", "0.2", "0.4"]
    assert "one OpenMP thread" in printed.splitlines()[6]


def test_one_and_two_devices_learn_the_same_at_one_batch_size_and_not_at_another(experiment):
    found = metrics(experiment[0])
    one, two, large, scaled = found["train_loss"]
    np.testing.assert_allclose(two, one, rtol=1e-6)
    np.testing.assert_array_equal(*found["test_accuracy"][:2])
    for a, b in ((large, two), (scaled, two), (scaled, large)):
        assert np.abs(a - b).max() > 1e-5 * one.max()


def test_the_picture_has_every_run_in_both_panels_and_a_slow_one_further_right_in_the_second(experiment, tmp_path):
    def epoch(number, seconds, accuracy):
        return records.Epoch(number, seconds, 1, 1, accuracy, 0.2)

    config = {"model": "lenet", "dataset": "synthetic", "impl": "scratch", "seed": 1}
    results = [
        batch_size.Result(run, config, [epoch(e, seconds, i / 10 + e / 10) for e in (1, 2, 3)])
        for i, (run, seconds) in enumerate(zip(batch_size.RUNS, (20, 10, 8, 8)))
    ]
    batch_size.draw(results, tmp_path / "drawn.png")
    pixels = matplotlib.image.imread(tmp_path / "drawn.png")[..., :3]
    height, width, _ = pixels.shape
    panels = (pixels[: int(0.75 * height), : width // 2], pixels[: int(0.75 * height), width // 2 :])  # not the legend
    ends = []
    for color in ((0.7, 0.7, 0.7), (1, 127 / 255, 14 / 255), (31 / 255, 119 / 255, 180 / 255)):
        columns = [np.nonzero((np.abs(panel - np.array(color)).max(axis=-1) < 0.01).any(axis=0))[0] for panel in panels]
        assert min(map(len, columns)) > 100
        ends.append([found.max() for found in columns])
    (one_by_epoch, one_by_time), *large = ends
    for by_epoch, by_time in large:
        assert abs(by_epoch - one_by_epoch) < 10 and by_time < one_by_time - 100

    out, printed = experiment
    assert printed.splitlines()[-1].startswith(f"{out}/batch-size.png ")
    assert matplotlib.image.imread(out / "batch-size.png").shape == (height, width, 4)


def test_an_experiment_that_is_there_is_shown_again_and_not_trained_again(experiment):
    out, printed = experiment
    before = {p: p.read_bytes() for p in out.rglob("metrics.jsonl")}
    again = subprocess.run(command("--out", out), capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (0, printed), again.stderr
    assert {p: p.read_bytes() for p in out.rglob("metrics.jsonl")} == before and len(before) == 4


def test_another_experiment_in_the_folder_is_refused_with_the_runs_own_words(experiment):
    again = subprocess.run(command("--out", experiment[0], "--lr", 0.3), capture_output=True, text=True)
    assert again.returncode == 2 and "the run has lr 0.2, not 0.3" in again.stderr


def test_the_runs_of_another_implementation_are_not_shown_as_this_ones(experiment):
    again = subprocess.run(command("--out", experiment[0], "--impl", "highlevel"), capture_output=True, text=True)
    assert again.returncode == 2 and again.stdout == ""
    said = f"has {FOLDERS[0]} of another experiment; give another --out than {experiment[0]}\n"
    assert again.stderr.endswith(said), again.stderr


def test_a_line_that_a_killed_run_did_not_write_is_written_and_shown(experiment, tmp_path):
    out = shutil.copytree(experiment[0], tmp_path / "copy")
    metrics = out / FOLDERS[3] / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole.splitlines(keepends=True)[0])
    again = subprocess.run(command("--out", out), capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout.splitlines()[:-1] == experiment[1].splitlines()[:-1], again.stderr
    assert metrics.read_text() == whole


@pytest.mark.parametrize(
    "options, status, says",
    [
        (("--lr", "0"), 2, "error: --lr 0"),
        (("--epochs", "0"), 2, "error: --epochs 0: "),
        (("--dataset", "mnist", "--data-dir", "nowhere"), 1, "error: no mnist in nowhere"),
        (("--device", "gpu"), 2, "error: 2 devices: --device gpu: "),
        (("--lr", "1e37"), 1, "error: 1 device, batch 256: .* not (a number|numbers).*; a smaller --lr may help$"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_fails_says_in_one_line_what_it_was(options, status, says, tmp_path):
    done = subprocess.run(command("--out", tmp_path / "new", *options), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "")
    assert re.match(says, done.stderr) and done.stderr.count("\n") == 1, done.stderr
    assert not list(tmp_path.rglob("*.png"))


def test_ctrl_c_ends_the_run_that_is_going_on_which_had_one_thread_and_leaves_whole_files_only(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # conftest.py set it
    process = subprocess.Popen(
        command("--limit", 60000, "--epochs", 9, "--out", tmp_path), stderr=subprocess.PIPE, text=True
    )
    try:
        begun = tmp_path / FOLDERS[0] / "config.json"
        while not begun.exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        time.sleep(0.7)  # into the epoch
        child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().strip()
        assert "OMP_NUM_THREADS=1" in Path(f"/proc/{child}/environ").read_text().split("\0")
        began = time.monotonic()
        process.send_signal(signal.SIGINT)  # to it alone, as `kill -INT` does
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (130, "gluon_mgpu: the same command goes on from here\n\ninterrupted\n")
        # A user waits for this. It takes about a second; the bound only tells it from an epoch.
        assert time.monotonic() - began < 10
    finally:
        process.send_signal(signal.SIGINT)  # where an assertion failed
        process.wait()
    assert not Path(f"/proc/{child}").exists()
    assert [p.name for p in tmp_path.iterdir()] == [FOLDERS[0]] and not list(tmp_path.rglob(".*"))
    checkpoint.load(tmp_path / FOLDERS[0] / "checkpoint.npz")


STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, sys
print("running on: [gpu(0), gpu(1)]")
options = dict(option[2:].split("=") for option in sys.argv[4:] if "=" in option)
if "out" in options:
    out = pathlib.Path(options["out"])
    out.mkdir(parents=True)
    threads = os.environ.get("OMP_NUM_THREADS")
    devices = [f"gpu({{i}})" for i in range(int(options["gpus"]))]
    config = {{"model": "lenet", "devices": devices, "threads": threads, **options}}
    (out / "config.json").write_text(json.dumps(config))
    epoch = {{"epoch": 1, "train_seconds": 1, "samples_per_second": 1, "train_loss": 2, "test_accuracy": 0.5}}
    (out / "metrics.jsonl").write_text(json.dumps({{**epoch, "learning_rate": 0.2}}))
"""


def test_on_gpus_no_environment_is_changed_and_the_table_does_not_speak_of_threads(tmp_path, monkeypatch):
    stand_in = tmp_path / "python"  # for a machine with GPUs
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    results = batch_size.run(tmp_path / "out", dataset="synthetic", limit=10, epochs=1)
    assert [(r.config["threads"], r.config["device"]) for r in results] == [("7", "gpu")] * 4
    assert "OpenMP" not in batch_size.table(results)
    assert os.environ["OMP_NUM_THREADS"] == "7"
