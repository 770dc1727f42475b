"""Several workers train as a single process does, agree on what to do, and end together; `make horovod`."""

import json
import os
import re
import shutil
import signal
import socket
import sys
import time
import zipfile
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
import runs
from runs import finished, write_program

from gluon_mgpu import IMPLS, UsageError, implementations
from gluon_mgpu.distributed import launch, process, workers
from gluon_mgpu.distributed.process import Process
from gluon_mgpu.training import records, timeline

STEPS, BATCH = 25, 32
LIMIT = (STEPS - 1) * BATCH + 1  # the last batch has 1 example, so one worker has none
OPTIONS = {"dataset": "synthetic", "limit": LIMIT, "epochs": 1, "seed": 4}
AS_WRITTEN = {"scratch": {}, "highlevel": {"tune": (1, 0)}}  # how several workers compute the networks
RTOL = 1e-3  # limit for `apart`: a missing example gives > 2e-2, rounding 1e-6 (3e-4 if an activation crosses 0)


def flags(options):
    return [part for name, value in options.items() for part in (f"--{name}", value)]


ARGS = ["--device", "cpu", "--batch-size", BATCH, "--lr", 0.2, *flags(OPTIONS)]


def train(folder, kvstore, count, *args, **options):
    """Run train.py with `count` workers, which write to the folder. Returns standard output and standard error."""
    status, out, err = runs.run(kvstore, count, "--out", folder, *args, **options)
    assert status == 0, err
    return out, err


def apart(folder, expected_folder):
    """The distance between the parameters of two runs, relative to the distance that training moved them."""
    found = records.last(folder)[0]
    expected, config, settings, _ = records.last(expected_folder)
    mx.random.seed(settings.seed)
    start = implementations.replicas(config["impl"], [mx.cpu()]).parameters()
    assert found.keys() == expected.keys()
    a, b, c = (np.concatenate([arrays[name].ravel() for name in start]) for arrays in (found, expected, start))
    return np.linalg.norm(a - b) / np.linalg.norm(b - c)


def train_alone(impl, contexts, folder, **options):
    defaults = {"device": "cpu", "out": str(folder), **OPTIONS, **AS_WRITTEN[impl]}
    implementations.train(impl, contexts, BATCH, 0.2, **{**defaults, **options})
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folders of runs in this process, by implementation and number of contexts."""
    cases = [(impl, contexts) for impl in IMPLS for contexts in (1, 2)]
    return {case: train_alone(*case, tmp_path_factory.mktemp("alone") / "run") for case in cases}


@pytest.fixture(scope="module", params=runs.ENGINES)
def engine(request):
    return request.param


@pytest.fixture(scope="module", params=IMPLS)
def impl(request):
    return request.param


@pytest.fixture(scope="module")
def two(engine, impl, tmp_path_factory):
    """(folder, standard output, standard error) of a run with 2 workers of 1 context each."""
    folder = tmp_path_factory.mktemp("two") / "run"
    return folder, *train(folder, engine, 2, "--impl", impl, *ARGS)


def test_two_workers_of_one_context_end_with_the_parameters_of_one_process(two, impl, alone):
    assert apart(two[0], alone[impl, 1]) < RTOL
    assert apart(two[0], alone[impl, 2]) == 0  # bit for bit


def test_only_worker_0_prints_and_writes_the_loss_and_accuracy_of_all_examples(two, impl, alone):
    folder, out, err = two
    said = [line.split("<stdout>:")[-1].split(",")[0] for line in out.splitlines()]
    assert said == ["running on: [cpu(0)] as worker 0 of 2", "epoch 1"] and not runs.errors(err)
    found, expected = (json.loads((run / "metrics.jsonl").read_text()) for run in (folder, alone[impl, 1]))
    assert found["test_accuracy"] == expected["test_accuracy"]
    assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)


# Both engines and both implementations, in two cases.
TWO_CASES = pytest.mark.parametrize(
    "engine, impl",
    [("dist_sync", "scratch"), pytest.param("horovod", "highlevel", marks=runs.needs_horovod)],
    indirect=True,
)
CONTEXTS = {"dist_sync": "$((1 + ${DMLC_TASK_ID:-0}))", "horovod": "2"}  # workers with 1 and 2 contexts; with 2 and 2


@runs.needs_horovod
def test_three_workers_of_horovod_end_with_the_same_bits_each_time(tmp_path):
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        train(folder, "horovod", 3, "--impl", "scratch", *ARGS)
    assert apart(*folders) == 0


@TWO_CASES
def test_workers_of_several_contexts_with_every_extra_are_one_process(engine, impl, tmp_path):
    extras = ["--momentum", 0.9, "--clip-norm", 0.1, "--accumulate", 3, "--weight-decay", 0.001]
    args = ["--kvstore", engine, "--impl", impl, "--out", tmp_path / "run", *ARGS, *extras]
    program = " ".join(map(str, ["exec", *runs.TRAIN, *args, "--gpus", CONTEXTS[engine]]))
    train(tmp_path / "run", engine, 2, program=["sh", "-c", program], servers=2)
    options = {"momentum": 0.9, "max_grad_norm": 0.1, "grad_accum_steps": 3, "weight_decay": 0.001}
    expected = train_alone(impl, 3, tmp_path / "alone", **options)
    assert apart(tmp_path / "run", expected) < RTOL


@pytest.mark.slow
def test_resnet18_on_two_workers_has_the_running_statistics_of_two_contexts(engine, tmp_path):
    options = {"model": "resnet18", "dataset": "synthetic", "limit": 9, "epochs": 1, "seed": 3}
    args = ["--impl", "highlevel", "--batch-size", 4, "--lr", 0.01, "--device", "cpu"]
    train(tmp_path / "run", engine, 2, *args, *flags(options))
    implementations.train("highlevel", 2, 4, 0.01, device="cpu", out=str(tmp_path / "alone"), **options)
    found, expected = (records.last(tmp_path / name)[0] for name in ("run", "alone"))
    assert sum("running" in name for name in expected) == 34 and found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-5, err_msg=name)


@TWO_CASES
def test_late_layers_are_summed_over_workers_while_early_layers_compute_their_gradients(engine, impl, tmp_path):
    file, steps = tmp_path / "profile.json", timeline.WARM_UP + timeline.STEPS + timeline.AROUND
    args = ["--impl", impl, "--batch-size", 256, "--limit", 256 * steps, "--profile", file]
    train(tmp_path / "run", engine, 2, *ARGS, *args)
    trace = json.loads(file.read_text())
    lanes = timeline.lanes(trace)
    sums = [begin for _, begin, _ in lanes["workers"]]
    gradients = [begin for phase, begin, _ in lanes["cpu(0)"] if phase == "backward"]
    shown = [(e["ts"], e["ts"] + e["dur"]) for e in trace["traceEvents"] if e.get("cat") == "step"]
    assert len(shown) == timeline.STEPS
    within = [[[b for b in begins if start <= b < end] for begins in (sums, gradients)] for start, end in shown]
    # in all steps, unless other programs delay the engine's threads
    assert any(min(sums) < max(gradients) for sums, gradients in within)


@TWO_CASES
def test_a_run_of_two_workers_is_resumed_by_one_process(two, impl, tmp_path):
    folder = shutil.copytree(two[0], tmp_path / "resumed")
    train_alone(impl, 1, folder, out=None, resume=str(folder), epochs=2)
    expected = train_alone(impl, 1, tmp_path / "whole", epochs=2)
    assert apart(folder, expected) < RTOL


def test_a_tuned_run_with_shares_is_resumed_with_its_plan_if_only_worker_0_has_its_folder(tmp_path):
    folder = train_alone("highlevel", 2, tmp_path / "tuned", tune=(16, 0), shares=(70, 30))
    change_folder = f'if [ "$DMLC_TASK_ID" = 0 ]; then cd "{tmp_path}"; else cd /; fi'
    options = "--kvstore dist_sync --resume tuned --gpus 1 --epochs 2 --device cpu"
    program = " ".join([change_folder, "; exec", *runs.TRAIN, options])
    _, err = train(folder, "dist_sync", 2, program=["sh", "-c", program])
    assert "workers" in err and "shares" in err, err  # what has changed
    assert records.recorded_options(folder)["tune"] == (16, 0)
    expected = train_alone("highlevel", 2, tmp_path / "whole", epochs=2, tune=(16, 0))
    assert apart(folder, expected) < RTOL


def test_a_worker_without_the_runs_folder_trains_worker_0s_lesson(tmp_path):
    folder = train_alone("highlevel", 2, tmp_path / "begun", model="lenet-max")  # scratch does not have this network
    options = "--kvstore dist_sync --resume begun --no-tune --epochs 2 --device cpu"
    program = f'[ "$DMLC_TASK_ID" = 0 ] && cd "{tmp_path}" || cd /; exec {" ".join(runs.TRAIN)} {options}'
    train(folder, "dist_sync", 2, program=["sh", "-c", program])
    assert len(records.last(folder)[3].history) == 2


def test_a_run_that_loses_a_worker_is_restarted_and_ends_with_the_bits_of_one_process(tmp_path):
    folder = tmp_path / "run"
    launcher = [*runs.LAUNCH, "--restarts", "3", "--", *runs.TRAIN]
    options = [*ARGS, "--epochs", 3, "--out", folder]
    with runs.start([*launcher, "--kvstore", "dist_sync", *map(str, options)]) as process:
        for written in (folder, folder / "metrics.jsonl"):  # before and after the first checkpoint
            runs.wait(written.exists)
            os.kill(runs.processes(str(folder))["worker 0"], signal.SIGKILL)
        _, err = process.communicate(timeout=runs.HORIZON)
    assert process.returncode == 0 and "SIGKILL" in err, err
    expected = train_alone("scratch", 2, tmp_path / "alone", epochs=3)
    assert apart(folder, expected) == 0


def test_ctrl_c_at_one_worker_stops_all_at_the_same_step_and_the_run_can_be_resumed(engine, tmp_path):
    folder, options = tmp_path / "run", {"dataset": "synthetic", "limit": 1600, "seed": 3}
    args = ["--device", "cpu", "--out", folder, "--epochs", 99, "--batch-size", BATCH, *flags(options)]
    with runs.start(runs.command(engine, 2, *args)) as run:
        run.stdout.readline()  # running on:
        time.sleep(0.5)
        os.kill(runs.processes(str(folder))["worker 1"], signal.SIGINT)
        _, err = run.communicate(timeout=runs.HORIZON)
    assert run.returncode == (130 if engine == "dist_sync" else 1), err  # horovodrun has its own status
    assert len(runs.errors(err)) <= 1, err  # launch.py reports a worker's status 130
    history = records.last(folder)[3].history
    assert len(history) < 99
    again = train_alone("scratch", 2, folder, out=None, resume=str(folder), **options, epochs=len(history) + 1)
    whole = train_alone("scratch", 2, tmp_path / "whole", **options, epochs=len(history) + 1)
    assert apart(again, whole) == 0


@pytest.fixture
def by_hand():
    """start(root, *args): a scheduler, a server and a worker, as if each were started on its own machine."""
    started = []

    def start(root, *args):
        shared = {"DMLC_PS_ROOT_URI": root, "DMLC_PS_ROOT_PORT": str(launch.free_port()), "DMLC_TASK_ID": "0"}
        shared.update({"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"})
        line = [*runs.TRAIN, "--kvstore", "dist_sync", "--device", "cpu", "--dataset", "synthetic", *map(str, args)]
        for role in ("scheduler", "server", "worker"):
            started.append(runs.start(line, {**shared, "DMLC_ROLE": role}))
        return started

    yield start
    for one in started:
        one.kill()


@pytest.mark.parametrize("asked", [(0,), (1, 1), (0, 1, 2) * 2], ids=["scheduler", "server twice", "all twice"])
def test_sigterm_at_any_process_of_a_run_leaves_a_checkpoint(asked, by_hand, tmp_path):
    started = by_hand("localhost", "--limit", 1000, "--epochs", 999, "--out", tmp_path / "run")
    started[2].stdout.readline()  # running on:
    for number in asked:  # an immediate second signal is a duplicate
        started[number].send_signal(signal.SIGTERM)
        time.sleep(0.05)
    said = [one.communicate(timeout=runs.HORIZON)[1] for one in started]
    assert [one.returncode for one in started] == [0, 0, 130], said
    assert records.last(tmp_path / "run")[0]


def test_ctrl_c_ends_a_scheduler_that_waits_for_other_processes(by_hand):
    scheduler, server, worker = by_hand("127.0.0.1")
    worker.kill()
    assert any("waiting for worker 0" in line for line in server.stderr)
    scheduler.send_signal(signal.SIGINT)
    assert scheduler.wait(10) == 130 and server.wait(10) == 1
    assert "scheduler" in server.stderr.read()


# Small programs in place of train.py

PROGRAM = """
import json, os, signal, sys, threading, time
from gluon_mgpu.distributed import process, serve, workers
from gluon_mgpu.runtime import log
from gluon_mgpu.runtime.errors import Error, Interrupted, UsageError
here = process.current()
if here.role != "worker":
    serve.serve(here)
    sys.exit()
try:
    with workers.join(here.kvstore, COMPRESS) as group:
        from mxnet import nd
        import numpy as np
        BODY
except (Interrupted, Error) as error:
    if isinstance(error, Error):
        log.error(f"{here}: {error}")
    os._exit(getattr(error, "exit_status", 130))
"""


def run_program(folder, kvstore, body, count=2, compress=None, **options):
    """(status, standard output, standard error) of workers that run `body` with their Workers, `group`."""
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("BODY", body).replace("COMPRESS", repr(compress)))
    return runs.run(kvstore, count, program=[sys.executable, str(program)], **options)


FAILS, IS_LOST = "raise UsageError(None, None, 'no room')", "os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("what", [FAILS, IS_LOST])
@pytest.mark.parametrize("rank", [0, 1])
def test_if_a_worker_fails_or_is_lost_one_line_names_it(engine, rank, what, tmp_path):
    body = f"""
        group.all_gather(None)
        if group.rank == {rank}:
            {what}
        time.sleep(60)"""
    status, _, err = run_program(tmp_path, engine, body, count=3)
    assert status == (2 if (engine, what) == ("dist_sync", FAILS) else 1)  # horovodrun has its own status
    # horovodrun may stop worker 1 before worker 1 reports that worker 0 is lost.
    (line,) = runs.errors(err) or [f"worker {number}" for number in re.findall(r"Process name: (\d+)", err)]
    assert f"worker {rank}" in line


@pytest.mark.parametrize(
    "engine", ["dist_sync", pytest.param("horovod", marks=[runs.needs_horovod, pytest.mark.slow])], indirect=True
)
def test_no_worker_ends_on_ctrl_c_before_worker_0_has_written_the_checkpoint(engine, tmp_path):
    body = """
        if group.rank:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()  # late, as from a cluster
        else:
            # longer than the launcher waits for other processes after one has failed
            time.sleep(6 if here.kvstore == "horovod" else 2.5)
            print('written', flush=True)
        raise Interrupted"""
    assert "written" in run_program(tmp_path, engine, body, launcher=runs.sooner())[1]


def test_a_second_ctrl_c_ends_a_run_whose_worker_0_waits_for_another_worker(tmp_path):
    body = """
        if group.rank:
            time.sleep(60)
            print('late', flush=True)
        for seconds in (0.5, 1):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        raise Interrupted"""
    status, out, err = run_program(tmp_path, "dist_sync", body)
    assert status and "late" not in out and "lost" not in err, err  # as if it had hung


def test_a_server_does_not_unpickle_what_a_worker_sends(tmp_path):
    opened = tmp_path / "opened"
    body = f"""
        import pickle
        class Opened:
            def __reduce__(self):
                return open, ({str(opened)!r}, "w")
        group.store.kv._send_command_to_servers(0, pickle.dumps(Opened(), 0).decode())
        ones = nd.ones(3)
        group.allreduce(ones, 0)
        print(ones.asnumpy().tolist())"""
    status, out, err = run_program(tmp_path, "dist_sync", body, count=1)
    assert (status, out) == (0, "[1.0, 1.0, 1.0]\n"), err
    assert "server 0" in err and not opened.exists()


START = np.array([0.25, -3, 1e-3], np.float32)
GRADIENTS = [np.array([0.3, -0.7, 1.1, 1 / 3], np.float32) * k for k in (1, 2)]


def exchanged(kvstore, compress, folder):
    """What worker 0 gets: the broadcast START, then the sum of GRADIENTS, 4 times."""
    body = f"""
        got = [group.broadcast({{"a": np.array({START.tolist()}, np.float32) * (1 - group.rank)}})["a"].tolist()]
        for _ in range(4):
            gradient = nd.array({GRADIENTS[0].tolist()}) * (group.rank + 1)
            group.allreduce(gradient, 0)
            got.append(gradient.asnumpy().tolist())
        if group.rank == 0:
            print("got", json.dumps(got))"""
    status, out, err = run_program(folder, kvstore, body, compress=compress)
    assert status == 0, err
    start, *sums = json.loads(out.split("got", 1)[1])
    np.testing.assert_array_equal(np.float32(start), START)  # parameters are not compressed
    return np.float32(sums)


def test_2bit_sends_the_threshold_or_nothing_and_keeps_the_rest(tmp_path):
    left = [np.zeros(4, np.float32) for _ in GRADIENTS]
    for found in exchanged("dist_sync", "2bit:0.5", tmp_path):
        sent = []
        for gradient, rest in zip(GRADIENTS, left):
            rest += gradient
            sent.append(np.where(rest >= 0.5, 0.5, np.where(rest <= -0.5, -0.5, 0)).astype(np.float32))
            rest -= sent[-1]
        np.testing.assert_array_equal(found, sum(sent))


@runs.needs_horovod
def test_fp16_sends_gradients_as_16_bit_numbers(tmp_path):
    expected = sum(gradient.astype(np.float16) for gradient in GRADIENTS)
    for found in exchanged("horovod", "fp16", tmp_path):
        np.testing.assert_array_equal(found, expected.astype(np.float32))


def group(rank, count, *others):
    """A worker whose all_gather returns its own value, then `others`."""
    client = SimpleNamespace(all_gather=lambda value: [value, *others])
    return workers.Workers(None, client, rank, count)


def test_workers_that_differ_are_refused_with_both_values():
    same = group(0, 2, {"version": workers.__version__, "data": "0a"})
    same.agree({"data": "0a"})
    with pytest.raises(UsageError, match="0b.*0a"):
        group(0, 2, {"version": workers.__version__, "data": "0b"}).agree({"data": "0a"})


@pytest.mark.parametrize("devices", [(1, 1), (2, 1), (1, 3, 2), (1,) * 7])
def test_every_example_of_a_batch_belongs_to_one_worker(devices):
    for n in (1, 2, 5, 6, 7, 33, 256):
        parts = []
        for rank in range(len(devices)):
            made = group(rank, len(devices))
            made.devices = list(devices)
            parts.append(np.arange(n)[made.part(n)])
        assert np.concatenate(parts).tolist() == list(range(n))


WORKER = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "h", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"}
ENVIRONMENTS = [  # kvstore, environment, the invalid variable or setting
    ("local", {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, "kvstore"),  # valid, but training alone would be wrong
    ("horovod", {}, "kvstore"),  # started alone
    ("dist_sync", {}, "kvstore"),
    ("local", {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "2"}, "HOROVOD_RANK"),
    ("dist_sync", {"DMLC_ROLE": "boss"}, "DMLC_ROLE"),
    ("dist_sync", {"DMLC_ROLE": "worker"}, "DMLC_PS_ROOT_URI"),
    ("dist_sync", {**WORKER, "DMLC_NUM_WORKER": "x"}, "DMLC_NUM_WORKER"),
    ("dist_sync", {**WORKER, "DMLC_TASK_ID": "1"}, "DMLC_TASK_ID"),
]


@pytest.mark.parametrize("kvstore, environment, named", ENVIRONMENTS)
def test_an_environment_that_does_not_fit_is_refused_with_the_variable(kvstore, environment, named, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        process.require(kvstore)
    assert caught.value.name == named


@pytest.mark.parametrize("compress, kvstore", [("fp16", "dist_sync"), ("2bit:0.5", "local"), ("2bit", "dist_sync")])
def test_a_compression_that_the_kvstore_does_not_support_is_refused(compress, kvstore):
    with pytest.raises(UsageError) as caught:
        process.check_compress(compress, Process(kvstore))
    assert (caught.value.name, caught.value.value) == ("compress", compress)


def test_2bit_is_refused_for_a_network_with_running_statistics():
    args = ("--impl", "highlevel", "--model", "resnet18", "--dataset", "synthetic", "--limit", 8, "--batch-size", 4)
    status, out, err = runs.run("dist_sync", 2, "--device", "cpu", "--compress", "2bit:1", *args)
    assert status == 2 and "epoch" not in out
    assert len(runs.errors(err)) == 1 and "running statistics" in err


@pytest.mark.parametrize("host", ["127.0.0.1", "no.host.invalid"])
def test_a_scheduler_that_cannot_listen_is_one_error(host, by_hand, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(launch, "free_port", lambda: taken.getsockname()[1])
        scheduler = by_hand(host)[0]
        _, err = scheduler.communicate(timeout=runs.HORIZON)
    assert scheduler.returncode == 1 and err.count("\n") == 1
    assert err.startswith("error: the scheduler: ") and host in err


PYTHON = f"cp{sys.version_info[0]}{sys.version_info[1]}"
WHEEL = f"gluon_mgpu/wheels/mxnet-1.9.1/horovod-0.28.1+gluon.mgpu.2-{PYTHON}-{PYTHON}-linux_x86_64.whl"
# What the script does up to the wheel, if Horovod is not installed yet.
BUILD = """
import build_horovod
from gluon_mgpu.runtime.errors import Error
try:
    print(build_horovod.wheel())
except Error as error:
    print(error)
"""


def run_script(program, **environment):
    environment = {"PYTHONPATH": str(runs.ROOT / "scripts"), **environment}
    return finished(sys.executable, "-c", program, env=environment, check=True).stdout.strip()


def built(folder, *programs):
    """What build_horovod.wheel() returns or says, with an empty cache, these programs, and no network."""
    for name in programs:
        write_program(folder / "bin" / name, "")
    cache = str(folder / "cache")
    return run_script(BUILD, XDG_CACHE_HOME=cache, PATH=str(folder / "bin"), PIP_NO_INDEX="1", HOME=cache)


@pytest.mark.parametrize("programs, packages", [("", "g++ make"), ("make", "g++"), ("g++", "make"), ("c++", "make")])
def test_missing_tools_are_one_line_with_their_packages_before_anything_is_fetched(tmp_path, programs, packages):
    said = built(tmp_path, *programs.split())
    assert said.count("\n") == 0 and f"apt-get install {packages})" in said
    assert not (tmp_path / "cache").exists()


def test_a_kept_wheel_is_used_unless_it_is_truncated_or_altered(tmp_path):
    kept = tmp_path / "cache" / WHEEL
    kept.parent.mkdir(parents=True)
    with zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("horovod/__init__.py", "\n".join(map(str, range(1000))))
    assert built(tmp_path) == str(kept)  # not rebuilt: there is no compiler
    whole = kept.read_bytes()
    for damaged in (whole[:-1], whole[:100], whole[:400] + b"????" + whole[404:]):
        kept.write_bytes(damaged)
        assert "g++" in built(tmp_path)


def test_a_build_that_fails_leaves_no_wheel_and_names_the_error_and_the_log(tmp_path):
    said = built(tmp_path, "g++", "make")
    (log,) = (tmp_path / "cache" / WHEEL).parent.iterdir()
    assert "ERROR: " in said and str(log) in said and said.count("\n") == 0
    assert "ERROR: " in log.read_text()


@runs.needs_horovod
def test_two_processes_of_horovodrun_sum_their_arrays():
    said = run_script("import build_horovod; print(build_horovod.check())", **os.environ)
    assert said == "Horovod 0.28.1 with MXNet 1.9.1: two processes summed an array with gloo"


@pytest.mark.parametrize("count", (1, 2, 3, 4, 5))
def test_workers_on_one_machine_are_pinned_to_different_cores_if_there_are_enough(count, monkeypatch):
    cores, found = {0, 2, 3, 5}, [{} for _ in range(count)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    for rank, threads in enumerate(found):
        monkeypatch.setattr(os, "sched_setaffinity", threads.__setitem__)
        workers.pin_to_cores(rank, lambda own: [own] * count)
    pinned = 1 < count <= len(cores)
    for threads in found:
        assert threads.keys() == ({int(thread) for thread in os.listdir("/proc/self/task")} if pinned else set())
    of_workers = [set().union(*threads.values()) for threads in found]
    assert not pinned or (set().union(*of_workers) == cores and sum(map(len, of_workers)) == len(cores))
