"""Several workers train as one process does."""

import json
import os
import signal
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
import runs

from gluon_mgpu import UsageError, checkpoint, highlevel, records, scratch
from gluon_mgpu.distributed import place, workers

MODULES = {"scratch": scratch, "highlevel": highlevel}
STEPS, BATCH = 50, 32
LIMIT = (STEPS - 1) * BATCH + 1  # the last batch has 1 example, and a worker none
OPTIONS = {"dataset": "synthetic", "limit": LIMIT, "epochs": 1, "seed": 3}
ARGS = ["--batch-size", BATCH, "--lr", 0.2, *(part for name, value in OPTIONS.items() for part in (f"--{name}", value))]


def parameters(folder):
    return checkpoint.load(Path(folder) / "checkpoint.npz")[0]


def apart(found, expected, impl):
    """How far two runs ended from each other, in parts of how far training moved the second: 1 example of 1,569 is some
    1e-3, rounding some 1e-6."""
    mx.random.seed(OPTIONS["seed"])
    start = MODULES[impl].Replicas([mx.cpu()]).parameters()
    assert found.keys() == expected.keys()
    a, b, c = (np.concatenate([arrays[name].ravel() for name in expected]) for arrays in (found, expected, start))
    return np.linalg.norm(a - b) / np.linalg.norm(b - c)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folders of runs in this process, by implementation and number of contexts."""
    made = {}
    for impl, module in MODULES.items():
        for contexts in (1, 2):
            made[impl, contexts] = tmp_path_factory.mktemp("alone") / "run"
            module.train(contexts, BATCH, 0.2, device="cpu", out=str(made[impl, contexts]), **OPTIONS)
    return made


@pytest.fixture(scope="module", params=runs.ENGINES)
def engine(request):
    return request.param


@pytest.fixture(scope="module", params=MODULES)
def impl(request):
    return request.param


@pytest.fixture(scope="module")
def two(engine, impl, tmp_path_factory):
    """(folder, standard output, standard error) of a run on 2 workers of 1 context."""
    folder = tmp_path_factory.mktemp("two") / "run"
    status, out, err = runs.run(engine, 2, "--impl", impl, "--device", "cpu", "--out", folder, *ARGS)
    assert status == 0, err
    return folder, out, err


def test_two_workers_of_one_context_end_with_the_parameters_of_one_process(two, impl, alone):
    for contexts in (1, 2):
        assert apart(parameters(two[0]), parameters(alone[impl, contexts]), impl) < 1e-4


def test_loss_and_accuracy_are_of_all_examples_of_all_workers(two, impl, alone):
    found, expected = (
        [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        for folder in (two[0], alone[impl, 1])
    )
    assert [e["test_accuracy"] for e in found] == [e["test_accuracy"] for e in expected]
    assert [e["train_loss"] for e in found] == pytest.approx([e["train_loss"] for e in expected], rel=1e-5)


def test_worker_0_alone_prints_and_the_others_say_nothing(two):
    _, out, err = two
    said = [line.split("<stdout>:")[-1] for line in out.splitlines()]
    assert [line.split(",")[0] for line in said] == ["running on: [cpu(0)] as worker 0 of 2", "epoch 1"]
    assert not runs.lines(err)


def test_two_workers_of_two_contexts_end_with_the_parameters_of_one_process(tmp_path, alone):
    args = ["--impl", "highlevel", "--gpus", 2, "--device", "cpu", "--out", tmp_path / "run", *ARGS]
    status, _, err = runs.run("dist_sync", 2, *args, servers=2)
    assert status == 0, err
    assert apart(parameters(tmp_path / "run"), parameters(alone["highlevel", 1]), "highlevel") < 1e-4


def test_a_run_of_two_workers_is_resumed_by_one_process_as_if_it_had_been_one(two, impl, tmp_path):
    folder = runs.copy(two[0], tmp_path / "resumed")
    module = MODULES[impl]
    more = {**OPTIONS, "epochs": 2}
    module.train(1, BATCH, 0.2, device="cpu", resume=str(folder), **more)
    module.train(1, BATCH, 0.2, device="cpu", out=str(tmp_path / "whole"), **more)
    assert apart(parameters(folder), parameters(tmp_path / "whole"), impl) < 1e-4


def test_a_run_of_one_process_is_resumed_by_three_workers(alone, tmp_path):
    folder = runs.copy(alone["scratch", 1], tmp_path / "resumed")
    status, _, err = runs.run("dist_sync", 3, "--resume", folder, "--epochs", 2)
    assert status == 0, err
    assert "workers 3 where the run had 1" in err
    scratch.train(1, BATCH, 0.2, device="cpu", out=str(tmp_path / "whole"), **{**OPTIONS, "epochs": 2})
    assert apart(parameters(folder), parameters(tmp_path / "whole"), "scratch") < 1e-4


def test_ctrl_c_at_one_worker_stops_all_at_the_same_step_with_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    args = ["--device", "cpu", "--out", folder, "--dataset", "synthetic", "--limit", 20000, "--seed", 3, "--epochs", 9]
    with runs.start(runs.command("dist_sync", 2, *args)) as process:
        try:
            process.stdout.readline()  # running on:
            time.sleep(0.5)
            os.kill(runs.processes(str(folder))["worker 1"], signal.SIGINT)
            _, err = process.communicate(timeout=runs.HORIZON)
        finally:
            runs.end(process)
    assert process.returncode == 130, err
    _, _, settings, position = records.last(folder)
    whole = len(position.history) * -(-20000 // settings.batch_size) + position.steps
    assert 0 < whole < 9 * 79
    assert [line for line in runs.lines(err) if "ended with status 130" not in line] == []  # that is launch.py's own


def test_workers_with_another_batch_size_are_refused_with_both_values():
    one_each = [
        "sh",
        "-c",
        " ".join([*runs.TRAIN, "--kvstore dist_sync --dataset synthetic --limit 64 --batch-size"])
        + " $((32 + 16 * ${DMLC_TASK_ID:-0}))",
    ]
    status, out, err = runs.run("dist_sync", 2, program=one_each)
    assert status == 2 and not out
    assert "worker 1 has batch_size 48 where worker 0 has 32" in err


class Answers:
    """Stands for the watch: what the other workers give."""

    def __init__(self, *others):
        self.others, self.ask_to_stop = others, None

    def gather(self, value):
        return [value, *self.others]


def test_workers_with_other_data_are_refused_with_both_checksums():
    made = workers.Workers(None, Answers({"version": workers.__version__, "data with checksum": "0b"}), 0, 2)
    with pytest.raises(UsageError, match="worker 1 has data with checksum 0b where worker 0 has 0a"):
        made.agree({"data with checksum": "0a"})


@pytest.mark.parametrize("devices", [(1, 1), (2, 1), (1, 3, 2), (1,) * 7])
def test_every_example_of_a_batch_is_one_workers(devices):
    for n in (1, 2, 5, 6, 7, 33, 256):
        parts = []
        for rank in range(len(devices)):
            made = workers.Workers(None, Answers(), rank, len(devices))
            made.devices = devices
            parts.append(np.arange(n)[made.part(n)])
        assert np.concatenate(parts).tolist() == list(range(n))


@pytest.mark.parametrize(
    "environment, said",
    [
        (
            {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
            "this is worker 1 of 2, started for horovod: give --kvstore horovod",
        ),
        ({"HOROVOD_RANK": "2", "HOROVOD_SIZE": "2"}, "HOROVOD_RANK is '2': give a number, 0 to 1"),
        ({"DMLC_ROLE": "boss"}, "DMLC_ROLE=boss: give worker, server or scheduler"),
        ({"DMLC_ROLE": "worker"}, "DMLC_PS_ROOT_URI is not set"),
        ({"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "h", "DMLC_NUM_WORKER": "x"}, "DMLC_NUM_WORKER is 'x'"),
    ],
)
def test_a_process_started_for_workers_does_not_train_alone(monkeypatch, environment, said):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said):
        place.asked("local")


@pytest.mark.parametrize("kvstore", ["horovod", "dist_sync"])
def test_a_process_started_alone_does_not_take_part_in_a_run_of_workers(kvstore):
    with pytest.raises(UsageError, match=f"--kvstore {kvstore}: start"):
        place.asked(kvstore)
