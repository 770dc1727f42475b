"""Products and copies are right, calls do not wait for them, devices do not wait for each other, and the figures are
what they are said to be. What depends on the number of contexts is checked in a process of its own."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from bench import asynchrony
from mxnet import nd

from gluon_mgpu.runtime.errors import Error, UsageError

# A process that has run a custom operator can hang where it forks, as Python 3.9's subprocess does: MXNet then waits
# for the operator's thread, and that for Python. So these programs are processes of their own, and end at once.
HELD_BACK = """
import os, threading
import gluon_mgpu
gluon_mgpu.configure(2)
import mxnet as mx
from mxnet import nd
from bench import asynchrony

let_go, was_let_go = threading.Event(), []


class HeldBack(mx.operator.CustomOp):
    \"\"\"Its result is its input, but not before let_go is set, or some seconds have passed.\"\"\"

    def forward(self, is_train, req, in_data, out_data, aux):
        was_let_go.append(let_go.wait(SECONDS))
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("held_back")
class HeldBackProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return HeldBack()


PROGRAM
os._exit(0)
"""


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def held_back(program, seconds=10, **environment):
    """What a program prints that has the operator held_back."""
    code = HELD_BACK.replace("SECONDS", str(seconds)).replace("PROGRAM", textwrap.dedent(program))
    return python(code, **environment)


def of_its_own(n=20, **changed):
    """The engine's settings of a worker on 2 contexts."""
    return {**asynchrony.settings(2, n), **changed}


def test_products_are_numpys():
    x = nd.random.uniform(shape=(70, 70), ctx=mx.cpu(1))
    expected = np.matmul(x.asnumpy().astype(np.float64), x.asnumpy().astype(np.float64))
    products = asynchrony.multiply(x, 3)
    assert [p.context for p in products] == [mx.cpu(1)] * 3
    for product in products:
        np.testing.assert_allclose(product.asnumpy(), expected, rtol=1e-5)


def test_each_matrix_is_multiplied_on_its_own_device():
    matrices = [nd.full((4, 4), i + 1, mx.cpu(i)) for i in range(2)]
    products = asynchrony.multiply_at_once(matrices, 2)
    assert [p.context for p in products] == [mx.cpu(0)] * 2 + [mx.cpu(1)] * 2
    assert [p.asnumpy()[0, 0] for p in products] == [4, 4, 16, 16]


def test_copies_are_other_arrays_of_the_same_values_in_the_context_asked_for():
    arrays = [nd.random.uniform(shape=(30, 20), ctx=mx.cpu(i)) for i in range(2)]
    values = [a.asnumpy() for a in arrays]
    copies, read = asynchrony.copies(arrays, mx.cpu(3)), asynchrony.asnumpy(arrays)
    for a in arrays:
        a[:] = 0
    nd.waitall()
    for copy, array, expected in zip(copies, read, values):
        assert copy.context == mx.cpu(3)
        np.testing.assert_array_equal(copy.asnumpy(), expected)
        np.testing.assert_array_equal(array, expected)


def test_calls_return_before_their_operand_is_there_and_the_clock_runs_until_they_are_done():
    printed = held_back("""
        def work():
            products = asynchrony.multiply(nd.Custom(nd.ones((8, 8)), op_type="held_back"), 5)
            threading.Timer(0.3, let_go.set).start()
            return products

        products, returned, done = asynchrony.timed(work)
        right = all((product.asnumpy() == 8).all() for product in products)
        print(right, *was_let_go, done - returned, flush=True)
    """)
    assert printed[:2] == ["True", "True"]  # let go, and not after the 10 s that calls which wait would take
    assert float(printed[2]) > 0.25


# The products of cpu(1) are waited for while those of cpu(0) cannot begin.
INDEPENDENT = """
    matrices = [nd.ones((8, 8), mx.cpu(i)) for i in range(2)]
    nd.waitall()
    matrices[0] = nd.Custom(matrices[0], op_type="held_back")
    products = asynchrony.multiply_at_once(matrices, 100)
    for product in products[100:]:
        product.wait_to_read()
    let_go.set()
    nd.waitall()
    print(*was_let_go, flush=True)
"""


def test_no_device_waits_for_another_whatever_the_number_of_products():
    assert held_back(INDEPENDENT, **of_its_own(100)) == ["True"]


def test_without_a_temporary_space_for_each_product_devices_do_wait():
    assert held_back(INDEPENDENT, seconds=1, **of_its_own(MXNET_CPU_TEMP_COPY="64")) == ["False"]


# Microseconds in which both contexts were at a product, and the contexts that made copies, by the engine's own profile.
PROFILED = """
    import json, gluon_mgpu
    gluon_mgpu.configure(2)
    import mxnet as mx
    from mxnet import nd, profiler
    from bench import asynchrony
    matrices = [nd.ones((400, 400), mx.cpu(i)) for i in range(2)]
    profiler.set_config(profile_imperative=True, filename=FILE)
    profiler.set_state("run")
    WORK
    nd.waitall()
    profiler.set_state("stop")
    profiler.dump()
    events = json.load(open(FILE))["traceEvents"]
    device = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    spans, copying, began = {"cpu/0": [], "cpu/1": []}, set(), {}
    for e in events:
        if e.get("name") == "dot" and e["ph"] == "B":
            began[e["pid"]] = e["ts"]
        elif e.get("name") == "dot" and e["ph"] == "E":
            spans[device[e["pid"]]].append((began.pop(e["pid"]), e["ts"]))
        elif e.get("name") == "CopyCPU2CPU":
            copying.add(device[e["pid"]])
    print(*map(len, spans.values()))
    print(sum(max(0, min(b, d) - max(a, c)) for a, b in spans["cpu/0"] for c, d in spans["cpu/1"]))
    print(*copying & set(spans))
"""


def profiled(work, folder):
    code = PROFILED.replace("FILE", repr(str(folder / "profile.json"))).replace("WORK", work)
    first, second, overlap, *copying = python(code, **of_its_own())
    return (int(first), int(second)), int(overlap), copying


def test_products_of_two_contexts_overlap_at_once_and_not_one_after_another(tmp_path):
    counts, overlap, _ = profiled("asynchrony.timed(asynchrony.multiply_at_once, matrices, 20)", tmp_path)
    assert counts == (20, 20) and overlap > 0
    counts, overlap, _ = profiled("[asynchrony.timed(asynchrony.multiply, x, 20) for x in matrices]", tmp_path)
    assert counts == (20, 20) and overlap == 0


def test_a_copy_between_cpu_contexts_is_the_work_of_the_one_it_comes_from(tmp_path):
    """What the table says of CPU contexts."""
    work = "asynchrony.timed(asynchrony.copies, asynchrony.multiply(matrices[1], 3), mx.cpu(0))"
    assert profiled(work, tmp_path)[2] == ["cpu/1"]


def test_every_round_counts_each_product_as_often_as_the_rows_say(monkeypatch):
    """Two devices: one alone, both in turn, both at once; then products alone and with copies and with asnumpy."""
    made = []
    multiply = asynchrony.multiply
    monkeypatch.setattr(asynchrony, "multiply", lambda x, n: made.append((x.context.device_id, n)) or multiply(x, n))
    matrices = [nd.ones((4, 4), mx.cpu(i)) for i in range(2)]
    asynchrony.measure_async(matrices, 7, mx.cpu(2))
    assert made == [(0, 7), (0, 7), (1, 7), (0, 7), (1, 7)]
    made.clear()
    asynchrony.measure_copy(matrices, 7, mx.cpu(2))
    assert made == [(0, 7), (1, 7)] * 3


@pytest.mark.parametrize("what", asynchrony.ROWS)
@pytest.mark.parametrize("gpus", ["1", "0,2"])
def test_a_worker_measures_every_row_in_every_round(what, gpus):
    result = asynchrony.run(what, gpus, "cpu", size=16, products=3, rounds=3)
    assert result["devices"] == {"1": ["cpu(0)"], "0,2": ["cpu(0)", "cpu(2)"]}[gpus]
    assert result["host"] == {"1": "cpu(1)", "0,2": "cpu(3)"}[gpus]
    assert (result["size"], result["products"], result["gpus"]) == (16, 3, 0)
    assert result["machine"]["settings"]["OMP_NUM_THREADS"] == "1"
    names = [row.name for row in asynchrony.ROWS[what]]
    assert list(result["rows"]) == (names[:2] if (what, gpus) == ("async", "1") else names)
    for row in result["rows"].values():
        assert len(row["seconds"]) == 3 and all(s > 0 for s in row["seconds"])
    if what == "copy":
        products, copied, both = (result["rows"][name]["seconds"] for name in names[:3])
        assert both == pytest.approx(np.add(products, copied))
    shown = asynchrony.table(json.loads(json.dumps(result)))
    assert len(shown.splitlines()) == 3 + (what == "copy") + len(result["rows"]) and "recorded" not in shown
    picture = io.BytesIO()
    asynchrony.draw(result, picture)
    assert picture.getvalue().startswith(b"\x89PNG")


def made_up(what, seconds, **changed):
    rows = {row.name: {"seconds": s} for row, s in zip(asynchrony.ROWS[what], seconds)}
    facts = {"gpus": 0, "devices": ["cpu(0)", "cpu(1)"], "names": ["x", "x"], "host": "cpu(2)"}
    return {"what": what, **facts, "size": 1000, "products": 10, "machine": {"cores": 2}, "rows": rows, **changed}


def rows_of(result):
    """{row's name: what the table shows of it}"""
    lines = asynchrony.table(result).splitlines()
    return {name: line[44:].split() for name in result["rows"] for line in lines if line.startswith(f"{name} ")}


def test_a_ratio_is_of_one_round_and_the_median_of_those_is_shown():
    rows = rows_of(made_up("async", [[0.5, 0.1, 1], [2, 1, 5], [6, 2, 9], [2, 3, 2]]))
    # One device: 10 products of 2 GFLOP in the median's 2 s. Ratios: 0.5/2, 0.1/1, 1/5 -> 0.2; 6/2, 2/1, 9/5 -> 2;
    # 2/2, 3/1, 2/5 -> 1. Both devices: 20 products in 6 s and in 2 s.
    assert list(rows.values()) == [
        ["0.5000", "(0.1000-1.0000)", "50.000", "0.20"],
        ["2.0000", "(1.0000-5.0000)", "200.000", "10.0", "GFLOP/s", "1.00"],
        ["6.0000", "(2.0000-9.0000)", "300.000", "6.7", "GFLOP/s", "2.00"],
        ["2.0000", "(2.0000-3.0000)", "100.000", "20.0", "GFLOP/s", "1.00"],
    ]


def test_copies_are_counted_in_bytes_and_compared_with_the_products():
    rows = rows_of(made_up("copy", [[2, 2, 2], [0.02, 0.04, 0.02], [4, 4, 4], [3, 3, 3], [2, 2, 2], [1, 1, 1]]))
    # 2 devices copy 10 arrays of 4 MB each in 0.02 s: 1 ms an array, 4 GB/s.
    assert rows["copies to the host, once all are done"] == [
        *("0.0200", "(0.0200-0.0400)", "1.000", "4.0", "GB/s", "0.01")
    ]
    assert [row[-1] for row in rows.values()] == ["1.00", "0.01", "2.00", "1.50", "1.00", "0.50"]


def test_what_the_notebook_printed_stands_beside_its_own_matrices_only():
    seconds = [[1, 1, 1]] * 6
    notebooks = {"size": 4000, "products": 50}
    # 0.240, 2.000 and 0.497 against 0.493; 2.445, their sum 2.938, and 0.737 against 0.493; none for asnumpy
    assert [row[-2:] for row in rows_of(made_up("async", seconds, **notebooks)).values()] == [
        *(["0.240", "0.49"], ["0.493", "1.00"], ["2.000", "4.06"], ["0.497", "1.01"])
    ]
    copy = list(rows_of(made_up("copy", seconds, **notebooks)).values())
    assert [row[-2:] for row in copy[:4]] == [
        *(["0.493", "1.00"], ["2.445", "4.96"], ["2.938", "5.96"], ["0.737", "1.49"])
    ]
    assert [len(row) for row in copy] == [8, 8, 8, 8, 6, 6]
    for other in ({"size": 4000, "products": 49}, {"size": 3999, "products": 50}):
        assert "recorded" not in asynchrony.table(made_up("async", seconds, **other))


def test_the_table_says_where_it_was_measured():
    cpu = asynchrony.table(made_up("copy", [[1, 1, 1]] * 6, machine={"cores": 1})).splitlines()
    assert cpu[0].startswith(
        "10 products of 1000 x 1000 float32 matrices on each device, copied to cpu(2), medians of 3"
    )
    assert cpu[1] == "on cpu(0), cpu(1), one OpenMP thread each; 1 core: 1 product at a time"
    assert cpu[2].startswith("Host memory to host memory")
    devices = {"gpus": 4, "devices": ["gpu(0)", "gpu(3)"], "names": ["Tesla V100", "Tesla K80"]}
    gpu = asynchrony.table(made_up("copy", [[1, 1, 1]] * 6, **devices)).splitlines()
    assert gpu[1] == "on gpu(0), gpu(3): Tesla V100, Tesla K80; GPUs that MXNet sees: 4"
    assert not any("Host memory" in line for line in gpu)


def test_the_picture_has_a_bar_a_row_and_one_for_what_was_recorded(monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    seconds = [[0.1, 0.2, 0.4], [1, 2, 3], [2, 4, 6], [1, 1, 1]]
    asynchrony.draw(made_up("async", seconds), None)
    asynchrony.draw(made_up("async", seconds, size=4000, products=50), None)
    widths = [sorted(bar.get_width() for bar in figure.axes[0].patches) for figure in drawn]
    assert widths == [[0.2, 1, 2, 4], sorted([0.2, 1, 2, 4, 0.240, 0.493, 2.000, 0.497])]


def test_a_worker_gets_no_setting_of_the_users_and_a_temporary_space_for_each_product(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("MXNET_ENGINE_TYPE", "NaiveEngine")
    monkeypatch.setenv("MXNET_CPU_TEMP_COPY", "4")
    started = []

    class Worker:
        def __init__(self, command, env, **streams):
            started.append(env)
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Worker)
    with pytest.raises(KeyboardInterrupt):
        asynchrony.run("async", "0,1,5", products=50)
    (env,) = started
    assert {n: v for n, v in env.items() if n.startswith(("OMP_", "MXNET_"))} == {
        "OMP_NUM_THREADS": "1",
        "MXNET_CPU_TEMP_COPY": "150",
    }
    assert env["PATH"] == os.environ["PATH"]


def test_a_worker_that_fails_says_why_in_one_line():
    with pytest.raises(UsageError, match="--device gpu: .*--device cpu"):
        asynchrony.run("async", 1, "gpu")
    with pytest.raises(Error, match="^async failed: MXNetError: .*larger than 2.31 elements") as caught:
        asynchrony.run("async", 1, "cpu", 10**9, 1)
    assert "\n" not in str(caught.value)


def children(pid):
    """Processes that this one started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, rest = stat.read_text().rpartition(")")
        except OSError:  # it has just ended
            continue
        state, parent = rest.split()[:2]
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_ctrl_c_and_sigterm_end_the_worker_too(which):
    options = ["--gpus", "2", "--device", "cpu", "--size", "1000", "--products", "1000"]
    command = [sys.executable, "-m", "gluon_mgpu", "bench", "copy", *options]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(200):
            workers = children(parent.pid)
            if workers and (Path(f"/proc/{workers[0]}/maps").read_text().count("libmxnet")):
                break
            time.sleep(0.1)
        (worker,) = workers
        parent.send_signal(which)  # to it alone
        assert parent.communicate(timeout=20)[1].splitlines()[-1] == "interrupted"
        assert parent.returncode == 130
    finally:
        parent.kill()
    assert not Path(f"/proc/{worker}").exists()
