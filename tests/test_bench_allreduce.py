import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from math import prod
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from bench import allreduce, machine

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training.settings import Settings

SHAPES = [(20, 1, 3, 3), (7,), (1,), (3, 5), (1001,), (40, 333)]  # no context count above 1 divides all


def on_contexts(values):
    """values: NumPy arrays (contexts, *shape), one a parameter; returns lists of NDArrays, one a context."""
    return [[mx.nd.array(x, mx.cpu(i)) for i, x in enumerate(data)] for data in values]


def each_way(values):
    """(way, arrays, the function that sums them), each on arrays of its own."""
    for way in allreduce.ways(on_contexts(values)):
        arrays = on_contexts(values)
        yield way, arrays, allreduce.ways(arrays)[way]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("shapes", [SHAPES, [(10007,)]], ids=["many", "flat"])
def test_every_way_leaves_numpys_sum_on_every_context(k, shapes):
    rng = np.random.default_rng(k)
    values = [rng.normal(size=(k, *shape)).astype(np.float32) for shape in shapes]
    tried = set()
    for way, arrays, sum_all in each_way(values):
        contexts = [[x.context for x in data] for data in arrays]
        identities = [[id(x) for x in data] for data in arrays]
        sum_all()
        assert (
            [[x.context for x in data] for data in arrays] == contexts == [[mx.cpu(i) for i in range(k)]] * len(shapes)
        )
        assert [[id(x) for x in data] for data in arrays] == identities, way
        for data, value in zip(arrays, values):
            for x in data:
                assert x.shape == value.shape[1:], way
                np.testing.assert_allclose(x.asnumpy(), value.astype(np.float64).sum(0), rtol=0, atol=5e-6, err_msg=way)
                assert (x.asnumpy() == data[0].asnumpy()).all(), f"{way}: {x.context} differs in rounding"
        tried.add(way)
    assert tried == allreduce.WAYS.keys() - ({"turns"} if len(shapes) == 1 else set())


@pytest.mark.parametrize("k", [2, 3, 5])
def test_every_way_sums_integers_exactly_again_and_again(k):
    rng = np.random.default_rng(0)
    values = [rng.integers(-1000, 1000, (k, *shape)).astype(np.float32) for shape in SHAPES]
    for way, arrays, sum_all in each_way(values):
        for _ in range(3):  # the sum of sums waits for the sums
            sum_all()
        for data, value in zip(arrays, values):
            for x in data:
                assert (x.asnumpy() == value.astype(np.int64).sum(0) * k * k).all(), way


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_the_bytes_of_our_own_ways_are_those_of_the_operators_that_they_call(k, monkeypatch):
    counted, summed_on = [], []
    copyto, iadd, add_n = mx.nd.NDArray.copyto, mx.nd.NDArray.__iadd__, mx.nd.add_n

    def counting_copyto(self, other):
        counted.append(2 * self.size)
        return copyto(self, other)

    def counting_iadd(self, other):
        counted.append(self.size + other.size + self.size)
        return iadd(self, other)

    def counting_add_n(*arrays, **out):
        total = add_n(*arrays, **out)
        counted.append(sum(x.size for x in arrays) + total.size)
        summed_on.append(total.context)
        return total

    arrays = on_contexts([np.ones((k, *shape)) for shape in SHAPES])
    functions = allreduce.ways(arrays)
    monkeypatch.setattr(mx.nd.NDArray, "copyto", counting_copyto)
    monkeypatch.setattr(mx.nd.NDArray, "__iadd__", counting_iadd)
    monkeypatch.setattr(mx.nd, "add_n", counting_add_n)
    ours = [way for way in functions if not way.startswith("KVStore")]
    assert len(ours) == 7
    for way in ours:
        counted.clear(), summed_on.clear()
        functions[way]()
        assert sum(counted) == allreduce.moved(way, k) * sum(map(prod, SHAPES)), way
        wanted = {mx.cpu(0)} if "add_n" in way else {mx.cpu(i) for i in range(k)}
        assert not summed_on or set(summed_on) == wanted, way


def test_the_bytes_of_the_stores_are_those_of_the_operators_in_the_engines_profile(tmp_path):
    code = """
        import json, sys
        import gluon_mgpu; gluon_mgpu.configure(3)
        import mxnet as mx
        from bench import allreduce
        for k in 2, 3:  # on c cores the profiler knows cpu(0) to cpu(c + 1), and another ends the process
            for way in "KVStore local", "KVStore device":
                arrays = [[mx.nd.ones((10,), mx.cpu(i)) for i in range(k)] for _ in range(4)]
                sum_all = allreduce.ways(arrays)[way]
                sum_all(), mx.nd.waitall()
                mx.profiler.set_config(profile_imperative=True, aggregate_stats=True, filename=sys.argv[1])
                mx.profiler.set_state("run"); sum_all(); mx.nd.waitall(); mx.profiler.set_state("stop")
                operators = json.loads(mx.profiler.dumps(reset=True, format="json"))["Time"]["operator"]
                counts = {name: spent["Count"] for name, spent in operators.items()}
                print(json.dumps([k, way, counts, allreduce.moved(way, k)]))
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(machine.SETTINGS)}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "t.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == 4, done.stderr
    for k, way, counts, moved in said:
        bytes_of = {"CopyCPU2CPU": 2, "KVStoreReduce": k + 1, "ElementwiseSum": k + 1}
        assert sum(bytes_of[name] * count for name, count in counts.items()) == 4 * moved, (way, counts)


def test_the_stores_are_asked_as_gluons_trainer_asks():
    asked = []

    def pushpull(key, value, out=None, priority=0):
        asked.append((key, [x.shape for x in value], [x.context for x in value], out, priority))

    ctx = [mx.cpu(0), mx.cpu(1)]
    replicas = highlevel.Replicas(ctx, Settings())
    replicas.train_batch(mx.nd.zeros((4, 1, 28, 28)), mx.nd.zeros(4), 0.1)
    replicas.trainer._kvstore.pushpull = pushpull
    replicas.trainer.allreduce_grads()
    by_trainer = asked[:]
    asked.clear()
    arrays = [[mx.nd.zeros(shape, c) for c in ctx] for shape in allreduce.gradient_shapes("lenet")]
    sum_all = allreduce.ways(arrays)["KVStore device"]
    store = next(x.cell_contents for x in sum_all.__closure__ if isinstance(x.cell_contents, mx.kvstore.KVStore))
    store.pushpull = pushpull
    sum_all()
    assert asked == by_trainer and len(asked) == 8


def test_a_way_that_leaves_one_context_without_the_sum_is_refused():
    arrays = on_contexts([np.ones((3, 8)), np.ones((3, 5))])

    def forgetful():
        for data in arrays:
            scratch.allreduce(data)
        arrays[1][2][4:] = 3

    with pytest.raises(Error, match=r"forgetful: cpu\(2\) does not hold the sum over 3 contexts"):
        allreduce.check("forgetful", forgetful, arrays)


def test_a_worker_that_fails_is_an_error_of_one_line_with_its_reason():
    with pytest.raises(Error, match=r"^allreduce on 2 contexts failed: KeyError: 'vgg'$"):
        allreduce.run(contexts=(2,), rounds=1, sizes=(), models=("vgg",))


def test_a_measurement_has_every_way_at_every_point_and_survives_json():
    result = allreduce.run(contexts=(1, 3), rounds=2, sizes=(4,), models=("lenet",))
    assert json.loads(json.dumps(result)) == result
    lenet = 4 * sum(p.size for p in scratch.init_params())
    for worker, k in zip(result["workers"], (1, 3)):
        assert worker["contexts"] == k
        assert (worker["settings"]["OMP_NUM_THREADS"] == "1") == (k > 1 or len(os.sched_getaffinity(0)) == 1)
        facts = [(p["name"], p["model"], p["arrays"], p["bytes"]) for p in worker["points"]]
        networks = [("LeNet", "lenet", 8, lenet), ("LeNet, flat", "lenet", 1, lenet)]
        assert facts == [("4 B", None, 1, 4), *networks]
        assert set(worker["copy_gb_s"]) == {"1", str(len(os.sched_getaffinity(0)))}
        assert all(len(rates) == 2 and min(rates) > 0 for rates in worker["copy_gb_s"].values())
        for p in worker["points"]:
            assert p["ms"].keys() == allreduce.WAYS.keys() - ({"turns"} if p["arrays"] == 1 else set())
            assert all(len(ms) == 2 and min(ms) > 0 for ms in p["ms"].values())
    lines = allreduce.table(result).splitlines()
    assert all(machine.line() in line or len(line) <= 120 for line in lines)
    picture = io.BytesIO()
    allreduce.draw(result, picture)
    assert picture.getvalue().startswith(b"\x89PNG")


def made_up(array_by_array=(), flat=()):
    """A result of 2 contexts, in which all ways take 8 ms but those given as {way: ms of each round}."""

    def point(name, model, arrays, size, own):
        ms = {way: [8.0, 8.0, 8.0] for way in allreduce.WAYS if arrays > 1 or way != "turns"}
        return {"name": name, "model": model, "arrays": arrays, "bytes": size, "ms": {**ms, **dict(own)}}

    networks = [
        point("LeNet", "lenet", 8, 500000, array_by_array),
        point("LeNet, flat", "lenet", 1, 500000, flat),
    ]
    single = point("1 MiB", None, 1, 1 << 20, {"star": [2.0, 1.0, 4.0]})
    copy = {"1": [10.0, 11.0, 12.0], "2": [15.0, 16.0, 30.0]}
    worker = {"contexts": 2, "settings": {}, "copy_gb_s": copy, "points": [single, *networks]}
    return {"rounds": 3, "workers": [worker]}


def test_the_table_gives_rates_computed_by_hand():
    lines = allreduce.table(made_up()).splitlines()
    assert any("1 thread 11.0 GB/s (10.0-12.0); 2 threads 16.0 GB/s (15.0-30.0)" in line for line in lines)
    stars = [line.split() for line in lines if line.startswith("star")]
    assert stars[0] == ["star", "2.00", "(1.00-4.00)"]
    # 1 MiB in 2 ms: 0.524 GB/s of array, and a copy, an addition and a copy: 7 times that
    # LeNet: 0.5 MB in 8 ms: 0.0625 GB/s
    assert stars[2] == ["star", "0.52/3.67", "0.06/0.44", "0.06/0.44"]
    local = [line.split() for line in lines if line.startswith("KVStore local")]
    assert local[2] == ["KVStore", "local", "0.13/1.44", "0.06/0.69", "0.06/0.69"]  # 11 times the array


def test_the_last_line_names_the_best_way_and_what_cannot_be_told_from_it():
    result = made_up(
        {"tree": [4.0, 4.0, 4.0], "direct add_n": [9.0, 9.0, 9.0]},
        # 4, 4 and 1.8 times as fast as the star: 4 in median
        {"tree": [3.9, 4.0, 4.1], "add_n": [2.0, 2.0, 4.5], "direct add_n": [1.0, 1.0, 1.0]},
    )
    text = " ".join(line.strip() for line in allreduce.table(result).splitlines()[-2:])
    assert text == (
        "best for LeNet: add_n, flat, 2.00 (2.00-4.50) ms, 4.00 times as fast as the star; within its spread: tree; "
        "tree, flat; faster, on CPU contexts only: direct add_n, flat 1.00 (1.00-1.00)"
    )


def test_ctrl_c_ends_the_measuring_at_once_with_its_worker():
    code = "from bench import allreduce; allreduce.run(contexts=(2,))"
    measuring = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True)
    children = Path(f"/proc/{measuring.pid}/task/{measuring.pid}/children")
    for _ in range(200):
        if children.read_text():
            break
        time.sleep(0.05)
    (worker,) = children.read_text().split()
    time.sleep(1)
    measuring.send_signal(signal.SIGINT)  # to it alone: a terminal would send it to the worker too
    _, said = measuring.communicate(timeout=10)
    assert measuring.returncode and said.endswith(b"KeyboardInterrupt\n")
    assert not Path(f"/proc/{worker}").exists()
