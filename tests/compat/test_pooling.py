"""Pooling has the bits of stock MXNet, however a program computes it. Each side is a process that uses AVX2."""

import re
import sys

import pytest
from runs import program, python

from gluon_mgpu.compat import pooling

STOCK = "from gluon_mgpu.compat import startup; startup.use_stock_settings()\n"
PROGRAM = program("""
    import hashlib, itertools, json
    import mxnet as mx
    import numpy as np
    from mxnet import autograd, gluon, nd

    WEIGHT = np.random.default_rng(1).standard_normal((20, 3, 1, 1)).astype("float32")

    class Net(gluon.HybridBlock):
        def __init__(self, options):
            super().__init__()
            self.options, self.weight = options, self.params.get("weight", shape=WEIGHT.shape)

        def hybrid_forward(self, F, x, weight):
            y = F.Convolution(x, weight, kernel=(1, 1), num_filter=20, no_bias=True)
            return F.Pooling(F.Activation(y, act_type="relu"), **self.options)

    def results(way, options, dtype, x):
        net = Net(options)
        net.initialize(mx.init.Constant(mx.nd.array(WEIGHT)))
        net.cast(dtype)
        x = nd.array(x, dtype=dtype)
        x.attach_grad()
        if way in ("bind", "simple_bind"):
            symbol = net(mx.sym.var("x"))
            arrays = dict(x=x, **{p.name: p.data() for p in net.collect_params().values()})
            if way == "bind":
                gradients = [nd.zeros_like(arrays[name]) for name in symbol.list_arguments()]
                run = symbol.bind(mx.cpu(), arrays, gradients)
            else:
                run = symbol.simple_bind(mx.cpu(), type_dict={name: dtype for name in arrays}, x=x.shape)
                for name, array in arrays.items():
                    run.arg_dict[name][:] = array
            [y] = run.forward(is_train=True)
            run.backward(1 + y.abs())
            return symbol.list_outputs(), y, *run.grad_arrays
        net.hybridize(way == "hybridized")
        with autograd.record():
            y = net(x)
        y.backward(1 + y.abs())
        if way == "hybridized":
            assert isinstance(net._cached_op, mx.nd.CachedOp)
            net.export("FILE")
            saved = json.load(open("FILE-symbol.json"))["nodes"]
            return [node["op"] for node in saved if node["op"] != "null"], y, x.grad, net.weight.grad()
        return "", y, x.grad, net.weight.grad()

    WAYS = [(way, "float32") for way in ("imperative", "hybridized", "bind", "simple_bind")]
    WAYS += [("imperative", "float64"), ("simple_bind", "float64")]
    rng = np.random.default_rng(0)
    windows = [dict(kernel=(k, k), stride=(s, s)) for k, s in ((2, 2), (2, 3), (3, 2))]
    others = dict(pad=(1, 1)), dict(pooling_convention="full"), dict(global_pool=True)
    windows += [{**windows[0], **other} for other in others]
    for kind, window in itertools.product(("avg", "max"), windows):
        x = np.round(rng.standard_normal((2, 3, 9, 11)), 1)  # with equal numbers
        for way, dtype in WAYS:
            names, *arrays = results(way, dict(pool_type=kind, **window), dtype, x)
            bits = b"".join(array.asnumpy().tobytes() for array in arrays)
            types = {array.dtype.__name__ for array in arrays}
            print("result", kind, way, dtype, window, names, types, hashlib.sha256(bits).hexdigest())
""")


@pytest.mark.skipif(sys.platform == "darwin", reason="needs AVX2")
def test_pooling_has_the_bits_of_stock_mxnet_without_onednns_reference_code(tmp_path):
    code = PROGRAM.replace("FILE", str(tmp_path / "net"))
    stock, ours = (
        python(first + code, DNNL_MAX_CPU_ISA="AVX2", DNNL_VERBOSE="1") for first in (STOCK, "import gluon_mgpu\n")
    )
    for done in (stock, ours):
        assert done.returncode == 0, done.stderr
    results = [[line for line in done.stdout.splitlines() if line.startswith("result")] for done in (stock, ours)]
    assert len(results[0]) == 2 * 6 * 6 and results[0] == results[1]
    # of windows that do not overlap, in 9 rows without padding
    slow = r"pooling.*,simple.*alg:pooling_(avg|max).*oh4kh2sh2dh0ph0_"
    before, after = (re.findall(slow, done.stdout) for done in (stock, ours))
    assert {*before} == {"avg", "max"} and not after


NONE = "fpu sse4_1 avx"
PROCESSORS = [  # flags in /proc/cpuinfo, values of DNNL_MAX_CPU_ISA, channels at once
    (f"{NONE} avx2 avx512f avx512bw", ("", "ALL", "AVX512_CORE"), 16),
    (f"{NONE} avx2 avx512f avx512bw", ("AVX2", "avx2"), 8),
    (f"{NONE} avx2", ("", "ALL", "AVX512_CORE"), 8),
    (f"{NONE} avx2", ("AVX", "SSE41"), 1),
    (NONE, ("", "ALL"), 1),
]


@pytest.mark.parametrize("flags, limits, block", PROCESSORS)
def test_the_block_is_that_of_the_instructions_that_onednn_uses(flags, limits, block, monkeypatch):
    monkeypatch.setattr(pooling.Path, "read_text", lambda _: f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t:\n")
    for limit in limits:
        monkeypatch.setenv("DNNL_MAX_CPU_ISA", limit)
        if not limit:
            monkeypatch.delenv("DNNL_MAX_CPU_ISA")
        assert pooling.channel_block() == block
