"""The lecture's experiment as a user runs it, on a small synthetic data set."""

import contextlib
import io
import json

import numpy as np
import pytest
import runs
from batch_size.cli import batch_size as command

pytestmark = pytest.mark.slow
SMALL = ("--dataset", "synthetic", "--limit", "600", "--epochs", "2", "--device", "cpu")
FOLDERS = (
    *("1-device-batch-256", "2-devices-batch-256"),
    *("1-device-batch-512", "2-devices-batch-512", "2-devices-batch-512-lr-scaled"),
)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """(folder, what was printed) of one experiment."""
    out, printed = tmp_path_factory.mktemp("experiment"), io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        command.main([*SMALL, "--out", str(out)])
    assert ended.value.code == 0
    return out, printed.getvalue()


def test_the_runs_are_those_of_the_lecture_and_learn_the_same_from_equal_batches_only(experiment):
    configs = [json.loads((experiment[0] / f / "config.json").read_text()) for f in FOLDERS]
    sizes = [(len(c["devices"]), c["batch_size"]) for c in configs]
    assert sizes == [(1, 256), (2, 256), (1, 512), (2, 512), (2, 512)]
    assert [(c["threads"], c["seed"], c["limit"]) for c in configs] == [(1, 1, 600)] * 5
    metrics = [[json.loads(line) for line in (experiment[0] / f / "metrics.jsonl").open()] for f in FOLDERS]
    rates, losses = (np.array([[e[name] for e in run] for run in metrics]) for name in ("learning_rate", "train_loss"))
    np.testing.assert_allclose(rates, np.repeat([[0.2, 0.2, 0.2, 0.2, 0.4]], 2, 0).T)
    one, two, one_large, large, scaled = losses
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
