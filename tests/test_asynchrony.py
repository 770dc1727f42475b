"""The lesson on asynchrony: results match NumPy's, calls do not wait, and devices do not wait for each other.

What depends on the number of contexts runs in a process of its own."""

import re

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from runs import HORIZON, output, overlap

from gluon_mgpu import asynchrony

# A custom operator that ends when it is told to, so that nothing depends on the speed of the machine.
HELD_BACK = f"""
import os, threading
import gluon_mgpu
gluon_mgpu.configure(2)
import mxnet as mx
from mxnet import nd
from gluon_mgpu import asynchrony
let_go, in_time, seconds = threading.Event(), [], {HORIZON}
class HeldBack(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        in_time.append(let_go.wait(seconds))
        self.assign(out_data[0], req[0], in_data[0])
@mx.operator.register("held_back")
class HeldBackProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return HeldBack()
x = nd.ones((8, 8), mx.cpu(1))
held = nd.Custom(x, op_type="held_back")
products = asynchrony.run(held, 5) + asynchrony.copy_to_cpu([held], non_blocking=True)
let_go.set()
nd.waitall()
let_go.clear()
seconds = 1
asynchrony.copy_to_cpu([nd.Custom(x, op_type="held_back")])
let_go.set()
print(*in_time, flush=True)
os._exit(0)  # MXNet would wait for the operator's thread, and that for Python
"""


def test_calls_return_before_their_operand_is_there_except_a_blocking_copy():
    assert output(HELD_BACK).splitlines()[-1] == "True False"


def test_products_are_numpys_on_the_device_of_their_matrix():
    x = nd.random.uniform(shape=(70, 70), ctx=mx.cpu(1))
    exact = np.matmul(x.asnumpy().astype(np.float64), x.asnumpy().astype(np.float64))
    products = asynchrony.run(x, 3)
    assert len(asynchrony.run(x)) == 50 and [p.context for p in products] == [mx.cpu(1)] * 3
    for product in products:
        np.testing.assert_allclose(product.asnumpy(), exact, rtol=70 * np.finfo(np.float32).eps)  # 70 additions


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_are_new_arrays_in_host_memory(non_blocking):
    arrays = [nd.random.uniform(shape=(30, 20), ctx=mx.cpu(i)) for i in range(2)]
    values = [a.asnumpy() for a in arrays]
    copies = asynchrony.copy_to_cpu(arrays, non_blocking)
    for a in arrays:
        a[:] = 0
    for copy, expected in zip(copies, values):
        assert copy.context == mx.cpu()
        np.testing.assert_array_equal(copy.asnumpy(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("wait", [False, True])
def test_products_of_two_devices_overlap_unless_python_waits_for_each_device(wait):
    setup = f"""
        from gluon_mgpu import asynchrony
        matrices = asynchrony.matrices(ctx, 400)
        def step():
            held = []
            for x in matrices:
                held.append(asynchrony.run(x, 10))
                if {wait}:
                    mx.nd.waitall()
    """
    assert (overlap(setup, ("dot",)) > 0) is not wait


def test_a_benchmark_prints_its_name_and_the_seconds_of_its_block(capsys):
    with asynchrony.BenchMark("all devices") as all_devices:
        nd.waitall()
    assert re.fullmatch(r"all devices \d+\.\d+(e-\d+)?\n", capsys.readouterr().out) and all_devices.seconds > 0
