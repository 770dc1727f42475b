"""Several workers train as one process does."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
import runs

from gluon_mgpu import Error, UsageError, highlevel, scratch
from gluon_mgpu.distributed import launch, workers
from gluon_mgpu.distributed import process as place
from gluon_mgpu.training import checkpoint, records

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
    a, b, c = (np.concatenate([arrays[name].ravel() for name in start]) for arrays in (found, expected, start))
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
    one_context = apart(parameters(two[0]), parameters(alone[impl, 1]), impl)
    print(f"{impl}: 2 workers and 1 process of 1 context: {one_context:.1e}")
    assert one_context < 1e-4
    assert apart(parameters(two[0]), parameters(alone[impl, 2]), impl) == 0  # bit for bit


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


def test_two_workers_of_two_contexts_with_all_that_a_step_can_do_are_one_process_too(engine, impl, tmp_path):
    beyond = {"momentum": 0.9, "clip_norm": 0.1, "accumulate": 3, "weight_decay": 0.001}
    more = [part for name, value in beyond.items() for part in (f"--{name.replace('_', '-')}", value)]
    args = ["--impl", impl, "--gpus", 2, "--device", "cpu", "--out", tmp_path / "run", *ARGS, *more]
    status, _, err = runs.run(engine, 2, *args, servers=2)
    assert status == 0, err
    MODULES[impl].train(2, BATCH, 0.2, device="cpu", out=str(tmp_path / "alone"), **OPTIONS, **beyond)
    assert apart(parameters(tmp_path / "run"), parameters(tmp_path / "alone"), impl) < 1e-4


def test_a_recipes_own_network_trains_on_two_workers_as_on_two_contexts(engine, tmp_path):
    args = ["--impl", "highlevel", "--model", "lenet-max", "--device", "cpu", "--out", tmp_path / "run", *ARGS]
    status, _, err = runs.run(engine, 2, *args)
    assert status == 0, err
    highlevel.train(2, BATCH, 0.2, model="lenet-max", device="cpu", out=str(tmp_path / "alone"), **OPTIONS)
    assert apart(parameters(tmp_path / "run"), parameters(tmp_path / "alone"), "highlevel") == 0


def test_workers_of_one_and_of_two_contexts_are_one_process_too(tmp_path):
    train = " ".join(map(str, [*runs.TRAIN, "--kvstore dist_sync --device cpu --out", tmp_path / "run", *ARGS]))
    program = ["sh", "-c", f"exec {train} --gpus $((1 + ${{DMLC_TASK_ID:-0}}))"]
    status, _, err = runs.run("dist_sync", 2, program=program)
    assert status == 0, err
    scratch.train(3, BATCH, 0.2, device="cpu", out=str(tmp_path / "alone"), **OPTIONS)
    assert apart(parameters(tmp_path / "run"), parameters(tmp_path / "alone"), "scratch") < 1e-4


def test_resnet18_on_two_workers_is_resnet18_on_two_contexts_with_its_running_statistics(engine, tmp_path):
    options = {"model": "resnet18", "dataset": "synthetic", "limit": 21, "epochs": 1, "seed": 3}
    args = [part for name, value in options.items() for part in (f"--{name}", value)]
    args += ["--impl", "highlevel", "--batch-size", 4, "--lr", 0.01, "--device", "cpu", "--out", tmp_path / "run"]
    status, _, err = runs.run(engine, 2, *args)
    assert status == 0, err
    highlevel.train(2, 4, 0.01, device="cpu", out=str(tmp_path / "alone"), **options)
    found, expected = parameters(tmp_path / "run"), parameters(tmp_path / "alone")
    statistics = [name for name in expected if "running" in name]
    assert len(statistics) == 34 and found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-5, err_msg=name)


EXCHANGE = """
import json, sys
from gluon_mgpu.distributed import process as place, serve, workers
here = place.place()
if here.role != "worker":
    serve.serve(here)
    sys.exit()
kvstore, compress = sys.argv[1:]
with workers.join(kvstore, compress) as group:
    import numpy as np
    from mxnet import nd
    start = group.broadcast({"a": np.array([0.25, -3, 1e-3], np.float32) * (1 - group.rank)})["a"]
    got = [start.tolist()]
    for _ in range(4):
        gradient = nd.array([0.3, -0.7, 1.1, 1 / 3]) * (group.rank + 1)
        group.allreduce(gradient, 0)
        got.append(gradient.asnumpy().tolist())
    if group.rank == 0:
        print("got", json.dumps(got))
"""


def exchanged(kvstore, compress, folder):
    program = folder / "exchange.py"
    program.write_text(EXCHANGE)
    status, out, err = runs.run(kvstore, 2, program=[sys.executable, str(program), kvstore, compress])
    assert status == 0, err
    return json.loads(out.split("got ")[1])


ENDS = """
import os, sys, time
from gluon_mgpu.distributed import process as place, serve, workers
from gluon_mgpu.runtime.errors import Interrupted, UsageError
here = place.place()
if here.role != "worker":
    serve.serve(here)
    sys.exit()
try:
    with workers.join(sys.argv[1]) as group:
        BODY
except (Interrupted, UsageError) as error:
    os._exit(getattr(error, "exit_status", 130))
"""


def ended(kvstore, body, folder):
    """(standard output, standard error) of a run whose workers do so, and all fail."""
    program = folder / "ends.py"
    program.write_text(ENDS.replace("BODY", body))
    status, out, err = runs.run(kvstore, 2, program=[sys.executable, str(program), kvstore])
    assert status, err
    return out, err


def test_why_worker_0_ends_is_told_to_the_others_before_it_does(engine, tmp_path):
    body = "time.sleep(60 * group.rank); raise UsageError('its folder is taken')"
    assert "error: worker 1: worker 0: its folder is taken" in runs.lines(ended(engine, body, tmp_path)[1])


@pytest.mark.parametrize("told", [True, False])
def test_worker_0_takes_back_what_it_has_begun_where_another_one_fails_and_not_where_it_is_lost(told, engine, tmp_path):
    body = f"""
        group.on_failure(lambda: print("taken back", flush=True))
        group.gather(None)
        if group.rank:
            {"raise UsageError('no')" if told else "os._exit(1)"}
        time.sleep(60)"""
    assert ("taken back" in ended(engine, body, tmp_path)[0]) == told


def test_no_worker_ends_on_ctrl_c_before_worker_0_has_left_the_checkpoint_also_one_asked_again_late(engine, tmp_path):
    body = """
        import signal, threading
        group.store.close = lambda: None  # in which MXNet's waits for the others anyway
        if group.rank:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            time.sleep(8)  # longer than a launcher waits for the others, once one has failed
            print('written', flush=True)
        raise Interrupted"""
    assert "written" in ended(engine, body, tmp_path)[0]


PICKLED = """
import pickle, sys
from pathlib import Path
from gluon_mgpu.distributed import process as place, serve, workers

class Opened:
    def __reduce__(self):
        return Path.touch, (Path(sys.argv[1]),)

here = place.place()
if here.role != "worker":
    serve.serve(here)
    sys.exit()
with workers.join("dist_sync") as group:
    from mxnet import nd
    group.store.kv._send_command_to_servers(0, pickle.dumps(Opened(), 0).decode())
    ones = nd.ones(3)
    group.allreduce(ones, 0)
    print(ones.asnumpy().tolist())
"""


def test_a_server_does_not_unpickle_what_a_worker_sends_it(tmp_path):
    program, opened = tmp_path / "send.py", tmp_path / "opened"
    program.write_text(PICKLED)
    status, out, err = runs.run("dist_sync", 1, program=[sys.executable, str(program), str(opened)])
    assert (status, out) == (0, "[1.0, 1.0, 1.0]\n"), err
    assert "server 0: a worker's command is ignored" in err and not opened.exists()


START = np.array([0.25, -3, 1e-3], np.float32)
GRADIENTS = [np.array([0.3, -0.7, 1.1, 1 / 3], np.float32) * k for k in (1, 2)]


def test_two_bits_send_the_threshold_or_nothing_and_keep_the_rest(tmp_path):
    start, *sums = exchanged("dist_sync", "2bit:0.5", tmp_path)
    np.testing.assert_array_equal(np.float32(start), START)
    left = [np.zeros(4, np.float32) for _ in GRADIENTS]
    for found in sums:
        sent = []
        for gradient, rest in zip(GRADIENTS, left):
            rest += gradient
            sent.append(np.where(rest >= 0.5, 0.5, np.where(rest <= -0.5, -0.5, 0)).astype(np.float32))
            rest -= sent[-1]
        np.testing.assert_array_equal(np.float32(found), sum(sent))


@pytest.mark.skipif(not runs.HOROVOD, reason=runs.NO_HOROVOD)
def test_fp16_sends_16_bit_numbers_of_gradients_alone(tmp_path):
    start, *sums = exchanged("horovod", "fp16", tmp_path)
    np.testing.assert_array_equal(np.float32(start), START)
    expected = sum(gradient.astype(np.float16) for gradient in GRADIENTS)
    for found in sums:
        np.testing.assert_array_equal(np.float32(found), expected.astype(np.float32))


def test_a_run_of_two_workers_is_resumed_by_one_process_as_if_it_had_been_one(two, impl, tmp_path):
    folder = runs.copy(two[0], tmp_path / "resumed")
    module = MODULES[impl]
    more = {**OPTIONS, "epochs": 2}
    module.train(1, BATCH, 0.2, device="cpu", resume=str(folder), **more)
    module.train(1, BATCH, 0.2, device="cpu", out=str(tmp_path / "whole"), **more)
    assert apart(parameters(folder), parameters(tmp_path / "whole"), impl) < 1e-4


def test_workers_that_resume_a_run_that_is_done_end_at_once_also_where_one_of_them_wants_a_profile(alone, tmp_path):
    folder = runs.copy(alone["scratch", 1], tmp_path / "resumed")
    status, out, err = runs.run("dist_sync", 2, "--resume", folder)
    assert (status, out) == (0, "") and "all epochs are done" in err
    train = " ".join(map(str, [*runs.TRAIN, "--kvstore dist_sync --resume", folder]))
    profile = f'[ "$DMLC_ROLE" = worker ] && [ $DMLC_TASK_ID = 0 ] && exec {train} --profile {tmp_path / "p.json"}'
    status, out, err = runs.run("dist_sync", 2, program=["sh", "-c", f"{profile}; exec {train}"])
    assert status == 2 and "steps" in runs.lines(err)[0] and "TypeError" not in err, err


def test_a_run_of_one_process_is_resumed_by_three_workers(alone, tmp_path):
    folder = runs.copy(alone["scratch", 1], tmp_path / "resumed")
    status, _, err = runs.run("dist_sync", 3, "--resume", folder, "--epochs", 2)
    assert status == 0, err
    assert "workers 3 where the run had 1" in err
    scratch.train(1, BATCH, 0.2, device="cpu", out=str(tmp_path / "whole"), **{**OPTIONS, "epochs": 2})
    assert apart(parameters(folder), parameters(tmp_path / "whole"), "scratch") < 1e-4


def test_a_run_of_unequal_devices_is_resumed_by_two_workers_of_even_ones(tmp_path):
    folder = tmp_path / "run"
    scratch.train(2, BATCH, 0.2, device="cpu", out=str(folder), shares=(70, 30), **OPTIONS)
    status, _, err = runs.run("dist_sync", 2, "--resume", folder, "--epochs", 2)
    assert status == 0 and "shares even where the run had [70, 30]" in err, err
    scratch.train(1, BATCH, 0.2, device="cpu", out=str(tmp_path / "whole"), **{**OPTIONS, "epochs": 2})
    assert apart(parameters(folder), parameters(tmp_path / "whole"), "scratch") < 1e-4


@pytest.mark.parametrize("seconds", [0.2, 1.1])
def test_ctrl_c_at_one_worker_stops_all_at_the_same_step_and_the_run_goes_on_from_there(engine, seconds, tmp_path):
    folder, options = tmp_path / "run", {"dataset": "synthetic", "limit": 8000, "seed": 3}
    args = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = runs.command(engine, 2, "--device", "cpu", "--out", folder, "--epochs", 99, *args)
    with runs.start(command) as process:
        try:
            process.stdout.readline()  # running on:
            time.sleep(seconds)
            os.kill(runs.processes(str(folder))["worker 1"], signal.SIGINT)
            _, err = process.communicate(timeout=runs.HORIZON)
        finally:
            runs.end(process)
    assert process.returncode == (130 if engine == "dist_sync" else 1), err  # horovodrun has its own
    _, _, settings, position = records.last(folder)
    done = len(position.history) * -(-8000 // settings.batch_size) + position.steps
    assert 0 < done < 99 * 32
    assert [line for line in runs.lines(err) if "ended with status 130" not in line] == []  # that is launch.py's own
    options["epochs"] = len(position.history) + 1
    scratch.train(2, 256, 0.2, device="cpu", resume=str(folder), **options)
    scratch.train(2, 256, 0.2, device="cpu", out=str(tmp_path / "whole"), **options)
    assert apart(parameters(folder), parameters(tmp_path / "whole"), "scratch") == 0


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
        self.others, self.ask_to_stop, self.may_step = others, None, None

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


@pytest.mark.parametrize(
    "compress, kvstore, said",
    [
        ("fp16", "dist_sync", "fp16 is horovod's"),
        ("2bit:0.5", "local", "2bit:THRESHOLD is dist_sync's"),
        ("2bit:0", "dist_sync", "give a threshold above 0"),
        ("2bit", "dist_sync", "give a threshold above 0"),
    ],
)
def test_a_compression_that_the_kvstore_does_not_offer_is_refused(compress, kvstore, said):
    with pytest.raises(UsageError, match=said):
        place.check_compress(compress, place.LOCAL._replace(kvstore=kvstore))


def test_2_bits_are_refused_for_a_net_with_running_statistics():
    args = ("--impl", "highlevel", "--model", "resnet18", "--dataset", "synthetic", "--limit", 8, "--batch-size", 4)
    status, out, err = runs.run("dist_sync", 2, "--device", "cpu", "--compress", "2bit:1", *args)
    assert status == 2 and "epoch" not in out
    assert "its running statistics would be sent in 2 bits too" in err and "Traceback" not in err


@pytest.mark.parametrize("why", ["ImportError('no mxnet in it')", "OSError('undefined symbol: MXGetVersion')"])
def test_a_horovod_that_cannot_be_loaded_is_one_line_that_says_how_to_get_it(why, monkeypatch, tmp_path):
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "1")
    for name in ("horovod", "horovod.mxnet"):  # gone again afterwards, whether or not they were there
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "horovod" / "mxnet").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "mxnet" / "__init__.py").write_text(f"raise {why}")
    monkeypatch.syspath_prepend(tmp_path)
    said = rf"Horovod is not installed for this MXNet \({why.split(chr(39))[1]}\): `make horovod` builds it"
    with pytest.raises(Error, match=said):
        with workers.join("horovod"):
            pass


def test_a_scheduler_that_cannot_listen_says_so_before_training(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, said in (
            ("127.0.0.1", f"127.0.0.1, port {port} cannot be listened on"),
            ("no.host.invalid", "does not"),
        ):
            environment = {
                **os.environ,
                **{"DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": str(port)},
                **{"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"},
            }
            line = [*runs.TRAIN, "--kvstore", "dist_sync"]
            ended = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=runs.HORIZON)
            assert ended.returncode == 1 and ended.stderr.count("\n") == 1
            assert ended.stderr.startswith("error: the scheduler: ") and said in ended.stderr


@pytest.fixture
def by_hand():
    """start(root, *args): a scheduler, a server and a worker, each started as on a machine of its own."""
    processes = []

    def start(root, *args):
        everyones = {"DMLC_PS_ROOT_URI": root, "DMLC_PS_ROOT_PORT": str(launch._free_port()), "DMLC_TASK_ID": "0"}
        everyones.update({"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"})
        line = [*runs.TRAIN, "--kvstore", "dist_sync", "--device", "cpu", "--dataset", "synthetic", *map(str, args)]
        for role in ("scheduler", "server", "worker"):
            processes.append(runs.start(line, environment={**everyones, "DMLC_ROLE": role}))
        return processes

    yield start
    for process in processes:
        runs.end(process)


def test_the_schedulers_name_serves_as_its_address(by_hand):
    started = by_hand("localhost", "--limit", 64)
    said = [process.communicate(timeout=runs.HORIZON)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said


def test_ctrl_c_at_a_scheduler_that_waits_for_others_ends_it(by_hand):
    scheduler, server, worker = by_hand("127.0.0.1")
    worker.kill()
    assert "waiting for worker 0" in server.stderr.readline()
    scheduler.send_signal(signal.SIGINT)
    assert scheduler.wait(10) == 130 and server.wait(10) == 1
    assert "the scheduler was lost" in server.stderr.read()


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1, 2)], ids=["scheduler", "server", "all"])
def test_sigterm_at_any_process_of_a_run_leaves_a_checkpoint(asked, by_hand, tmp_path):
    started = by_hand("127.0.0.1", "--limit", 8000, "--epochs", 99, "--out", tmp_path / "run")
    started[2].stdout.readline()  # running on:
    for number in asked:
        started[number].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=runs.HORIZON)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 130], said
    assert records.last(tmp_path / "run")[0]


@pytest.mark.parametrize("kvstore", ["horovod", "dist_sync"])
def test_a_process_started_alone_does_not_take_part_in_a_run_of_workers(kvstore):
    with pytest.raises(UsageError, match=f"--kvstore {kvstore}: start"):
        place.asked(kvstore)
