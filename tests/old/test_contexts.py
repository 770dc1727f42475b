"""`gluon-mgpu run` without GPUs: GPU contexts become CPU contexts, and several of them do not hang."""

import pytest
from runs import PRODUCTS

# Claim: (program, what it prints)
PROGRAMS = {
    "pinned arrays keep their context and are copied to the GPUs": (
        """
        import io
        import mxnet as mx, numpy as np
        from PIL import Image
        records = mx.recordio.MXRecordIO("images.rec", "w")
        for i in range(4):
            png = io.BytesIO()
            Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(png, "png")
            records.write(mx.recordio.pack(mx.recordio.IRHeader(0, float(i), i, 0), png.getvalue()))
        records.close()
        images = mx.io.ImageRecordIter(path_imgrec="images.rec", data_shape=(3, 8, 8), batch_size=4, verbose=False)
        loader = mx.gluon.data.DataLoader(mx.nd.ones((4, 3)), 4, pin_memory=True)
        for X in (next(images).data[0], next(iter(loader))):
            net = mx.gluon.nn.Dense(2, weight_initializer="ones")
            net.initialize(ctx=mx.gpu(0))
            net.hybridize()
            [copy] = mx.gluon.utils.split_and_load(X, [mx.gpu(0)])
            print(X.context, copy.context, X.as_in_context(mx.gpu(0)).context, net(copy).sum().asscalar())
        """,
        f"cpu_pinned(0) cpu(1) cpu(1) {6 * 2 * 3 * 64}.0\ncpu_pinned(0) cpu(1) cpu(1) 24.0\n",
    ),
    "an array in host memory does not change with its copy on a GPU": (
        """
        import mxnet as mx
        from mxnet import gluon, nd
        ctx = [mx.gpu(i) for i in range(2)]
        net = gluon.nn.Dense(1, in_units=2, use_bias=False)
        net.initialize(mx.init.One(), ctx=ctx)
        best = net.weight.data(ctx[0]).as_in_context(mx.cpu())
        net.weight.set_data(nd.zeros((1, 2)))
        batch = best.as_in_context(ctx[0])
        batch += 1
        print(best.asnumpy().tolist(), net.weight.data(ctx[1]).asnumpy().tolist(), batch.asnumpy().tolist())
        """,
        "[[1.0, 1.0]] [[0.0, 0.0]] [[2.0, 2.0]]\n",
    ),
    "arrays return to the GPU on which they were saved": (
        """
        import copy, pickle
        import mxnet as mx
        sparse = mx.nd.sparse.row_sparse_array(([[1.0]], [2]), shape=(3, 1), ctx=mx.gpu(0))
        for a in (mx.nd.ones((2, 3), mx.gpu(0)), sparse):
            print(copy.deepcopy(a).context == pickle.loads(pickle.dumps(a)).context == mx.gpu(0))
        arrays = {"host": mx.nd.ones(3), "half": mx.nd.ones(3, mx.gpu(1), "float16"), "gpu": mx.nd.ones(2, mx.gpu(0))}
        mx.nd.save("dict", arrays)
        mx.nd.save("list", list(arrays.values()))
        loaded = mx.nd.load("dict")
        for name, b in zip(loaded, mx.nd.load("list")):
            a, before = loaded[name], arrays[name]
            assert a.context == b.context == before.context and (a.asnumpy() == b.asnumpy()).all()
        """,
        "True\nTrue\n",
    ),
    "updates of gpu(0) are counted as on a machine with GPUs": (
        """
        import mxnet as mx
        ctx = [mx.gpu(i) for i in range(2)]
        net = mx.gluon.nn.Dense(1, in_units=2)
        net.initialize(ctx=ctx)
        trainer = mx.gluon.Trainer(net.collect_params(), "adam", kvstore=None)
        for c in ctx:
            with mx.autograd.record():
                loss = net(mx.nd.ones((1, 2), c))
            loss.backward()
        trainer.step(1)
        print(trainer._updaters[0].optimizer._all_index_update_counts)
        """,
        "{0: {0: 1, 1: 1}, 1: {0: 1, 1: 1}}\n",
    ),
    "fewer examples than GPUs are split as in early versions of MXNet": (
        """
        import mxnet as mx
        from mxnet.gluon.utils import split_and_load
        gpus = [mx.gpu(i) for i in range(4)]
        for n in (2, 5):
            shards = split_and_load(mx.nd.ones((n, 3)), gpus, even_split=False)
            print([(x.shape[0], x.context.device_id - 1) for x in shards])
        try:
            split_and_load(mx.nd.ones((2, 3)), gpus)
        except ValueError:
            print("refused")
        """,
        "[(1, 0), (1, 1)]\n[(2, 0), (1, 1), (1, 2), (1, 3)]\nrefused\n",
    ),
    "the names of early versions exist, and a constant may be a list": (
        """
        import mxnet as mx, numpy as np
        assert (mx.gluon.autograd.record, mx.optimizer.sgd_mom_update)
        constant = mx.init.Constant([[0, 1], [1, 0]])
        a = mx.nd.zeros((2, 2))
        constant(mx.init.InitDesc("a_weight"), a)
        for value in (constant, mx.init.Constant(np.ones(2)), mx.init.Constant(2)):
            print(mx.sym.var("a", init=value).attr("__init__"), end=" ")
        print(a.asnumpy().tolist())
        """,
        '["constant", {"value": [[0, 1], [1, 0]]}] ["constant", {"value": [1.0, 1.0]}] ["constant", {"value": 2}] '
        "[[0.0, 1.0], [1.0, 0.0]]\n",
    ),
    "metrics reset and count as in early versions of MXNet": (
        """
        import mxnet as mx
        class Tasks(mx.metric.EvalMetric):  # as for early versions, which called reset also for reset_local
            def reset(self):
                if not hasattr(self, "sum_metric"):
                    self.sum_metric = self.num_inst = 0
                self.sum_metric = [0, 0]
        tasks = Tasks("tasks")
        tasks.reset_local()
        top = mx.metric.TopKAccuracy(20)  # more than there are classes
        top.update([mx.nd.array([2, 0])], [mx.nd.array([[0, 1, 2], [1, 0, 2]])])
        class Two(mx.metric.EvalMetric):  # as before MXNet 1
            def __init__(self, num=None):
                super().__init__("two", num)
            def update(self, labels, preds):
                assert self.num == 2
                for i, pred in enumerate(preds):
                    self.sum_metric[i] += pred.sum().asscalar()
                    self.num_inst[i] += pred.size
        two = Two(2)
        two.update_dict({}, {"a": mx.nd.ones(4), "b": mx.nd.zeros(2)})
        print(two.get_name_value(), Two().num)
        print(tasks.sum_metric, top.get()[1], top.top_k)
        """,
        "[('two_0', 1.0), ('two_1', 0.0)] None\n[0, 0] 1.0 20\n",
    ),
}


@pytest.mark.parametrize("claim", PROGRAMS)
def test_contexts(claim, printed):
    assert printed[claim] == PROGRAMS[claim][1]


@pytest.mark.slow
def test_sync_batch_norm_in_two_contexts_equals_batch_norm_in_one(program):
    run = program("""
        import mxnet as mx, numpy as np
        from mxnet import autograd, gluon, nd
        X = nd.random.normal(shape=(4, 3, 6, 6))

        def gradients(layer, ctx):
            net = gluon.nn.Sequential()
            for _ in range(20):
                net.add(gluon.nn.Conv2D(3, 3, padding=1), layer())
            net.initialize(mx.init.One(), ctx=ctx)
            xs = gluon.utils.split_and_load(X, ctx)
            for x in xs:
                x.attach_grad()
            with autograd.record():
                losses = [(net(x) ** 3).sum() for x in xs]
            for loss in losses:
                loss.backward()
            return np.concatenate([x.grad.asnumpy() for x in xs])

        sync = gradients(lambda: gluon.contrib.nn.SyncBatchNorm(num_devices=2), [mx.gpu(0), mx.gpu(1)])
        print(np.abs(sync - gradients(gluon.nn.BatchNorm, [mx.cpu()])).max() < 1e-3 * np.abs(sync).max() > 0)
    """)
    assert run.stdout == "True\n", run.stderr


BUSY = """
    import ctypes, threading
    import mxnet as mx
    class Context(ctypes.Structure):
        _fields_ = [("type", ctypes.c_int), ("index", ctypes.c_int)]
    def threads(index):
        found, done, none = [], threading.Event(), ctypes.c_void_p()
        def ask(*_):
            found.append(ctypes.CDLL("libgomp.so.1").omp_get_max_threads())
            done.set()
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(ask)
        where = ctypes.byref(Context(1, index))
        mx.base._LIB.MXEnginePushSync(function, none, none, where, none, 0, none, 0, none, 0, b"threads")
        done.wait()
        return found[0]
    products = [mx.nd.ones((600, 600), ctx) for ctx in (mx.cpu(), mx.gpu(0))]
    for _ in range(10):
        products = [mx.nd.dot(x, x) / 600 for x in products]
    print(*(x.mean().asscalar() for x in products), threads(0), threads(1))
    data = mx.gluon.data.ArrayDataset(mx.nd.ones((2, 2)))
    list(mx.gluon.data.DataLoader(data, 2, num_workers=1))  # forks, so MXNet starts new threads
    print(threads(0), threads(1))
"""


@pytest.mark.slow
def test_a_single_gpu_uses_all_threads_and_the_host_one_so_that_they_do_not_hang(program):
    run = program(BUSY, OMP_NUM_THREADS="2")
    assert run.stdout == "1.0 1.0 1 2\n1 2\n", run.stderr


@pytest.mark.slow
def test_two_gpus_do_not_hang_with_two_threads(program):
    assert program(PRODUCTS.replace("mx.cpu", "mx.gpu"), OMP_NUM_THREADS="2").stdout == "1.0 1.0\n"


@pytest.mark.slow
def test_gpu_i_is_cpu_context_i_plus_1_and_every_query_about_gpus_is_answered(program):
    text = """
        import os, pickle
        import mxnet as mx
        from mxnet import test_utils
        from mxnet.gluon.contrib.estimator.estimator import num_gpus
        print(mx.gpu(1), mx.Context("gpu", 0), mx.nd.ones(1, mx.gpu(1)).context)
        print(mx.kv.create("nccl").type, os.environ["MXNET_CPU_TEMP_COPY"])
        with mx.gpu(1):
            print(mx.nd.zeros(1).context)
        print(mx.context.num_gpus(), num_gpus(), mx.util.get_gpu_count(), mx.npx.num_gpus(), *test_utils.list_gpus())
        context = mx.Context.__new__(mx.Context)
        vars(context).update(device_typeid=2, device_id=1)  # on a machine with GPUs
        print(pickle.loads(pickle.dumps(context)), pickle.loads(pickle.dumps(mx.nd.ones(2, mx.gpu(1)))).context)
        mx.gpu(0).empty_cache()
        mx.gpu(2)
    """
    lines = "cpu(2) cpu(1) cpu(2)\ndevice {}\ncpu(2)\n{}\ncpu(2) cpu(2)\n"
    run = program(text, options=["--gpus", 2], MXNET_CPU_TEMP_COPY="64")
    assert run.stdout == lines.format(64, "2 2 2 2 0 1")
    assert run.returncode == 1 and "MXNetError: gpu(2)" in run.stderr.splitlines()[-1]
    run = program(text)
    assert (run.returncode, run.stdout) == (0, lines.format(4, "0 0 0 0"))
    assert run.stderr.count("mx.gpu(i) is CPU context i + 1") == 1, run.stderr


@pytest.mark.slow
def test_the_settings_reach_processes_that_the_program_starts(program):
    text = """
        import multiprocessing, subprocess, sys
        def context(i):
            import mxnet as mx
            return str(mx.gpu(i))
        if __name__ == "__main__":
            print(subprocess.check_output([sys.executable, "-c", "import mxnet as mx; print(mx.gpu(3))"]))
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(context, [2]))
    """
    assert program(text).stdout == "b'cpu(4)\\n'\n['cpu(3)']\n"
