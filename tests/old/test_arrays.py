"""`gluon-mgpu run` lets NumPy and MXNet treat arrays as old versions did; and converts MXNet's arrays."""

import pytest

# Claim: (program, what it prints)
PROGRAMS = {
    "an array with one element is a number": (
        """
        import json, math, warnings, mxnet as mx, numpy as np
        warnings.simplefilter("ignore")  # some versions of NumPy warn
        mean, rows, losses = mx.nd.array([1.5, 2.5]).mean().asnumpy(), mx.nd.ones((4, 1)).asnumpy(), np.zeros(2)
        losses[1] = mean
        assert json.loads(json.dumps([0.0 + np.float32(0.5)])) == [0.5]
        print("%.2f %d %f" % (mean, mean, rows[0]), float(mean), int(np.array([[3]])), math.sqrt(mean * 2), losses)
        print(complex(np.array([2.0])), float(np.float32(2)), int(np.array(3)), repr(mean), type(mean).__name__)
        for wrong in (np.ones(2), np.array([])):
            for kind in (float, int, complex):
                try:
                    print(kind(wrong))
                except TypeError:
                    pass
        try:
            np.ndarray.name = 1
        except TypeError:
            print("refused")
        """,
        "2.00 2 1.000000 2.0 3 2.0 [0. 2.]\n(2+0j) 2.0 3 array([2.], dtype=float32) ndarray\nrefused\n",
    ),
    "rows of different lengths become an array of objects": (
        """
        import numpy as np
        rows = [[1, 2], [3]]
        for a in (np.array(rows), np.asarray(rows), np.array(rows, None)):
            print(a.dtype, a.shape, a[0])
        np.save("rows.npy", [np.zeros(2), np.ones(3)])
        print(np.load("rows.npy", allow_pickle=True)[1])
        a = np.ones(2)
        print(np.array([1, 2], copy=False), np.array(a, copy=False) is a, np.array(a, copy=True) is a, a.dtype)
        try:
            np.array(rows, float)
        except ValueError:
            print("refused")
        """,
        "object (2,) [1, 2]\n" * 3 + "[1. 1. 1.]\n[1 2] True False float64\nrefused\n",
    ),
    "an MXNet array names a dtype, and a constant may be a list": (
        """
        import mxnet as mx, numpy as np
        assert (mx.gluon.autograd.record, mx.optimizer.sgd_mom_update)  # the names in early versions
        half = mx.nd.zeros(2, dtype="float16")
        print(np.dtype(half), mx.nd.ones(2).astype(half, copy=False).dtype.__name__)
        constant = mx.init.Constant([[0, 1], [1, 0]])
        a = mx.nd.zeros((2, 2))
        constant(mx.init.InitDesc("a_weight"), a)
        for value in (constant, mx.init.Constant(np.ones(2)), mx.init.Constant(mx.nd.ones(2)), mx.init.Constant(2)):
            print(mx.sym.var("a", init=value).attr("__init__"), end=" ")
        print(a.asnumpy().tolist())
        """,
        'float16 float16\n["constant", {"value": [[0, 1], [1, 0]]}] ["constant", {"value": [1.0, 1.0]}] '
        '["constant", {"value": [1.0, 1.0]}] ["constant", {"value": 2}] [[0.0, 1.0], [1.0, 0.0]]\n',
    ),
    "NumPy and Matplotlib convert MXNet's arrays": (
        """
        import matplotlib, mxnet as mx, numpy as np
        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
        old, new = mx.nd.arange(4).reshape((2, 2)), mx.np.arange(4).reshape(2, 2)
        for a in (old, new):
            for converted in (np.asarray(a), np.array([a, a])[1], np.array(a, copy=False), np.array(a, np.float32)):
                assert converted.dtype == np.float32 and converted.tolist() == [[0, 1], [2, 3]]
            assert np.asarray(a, int).dtype == int
            plt.contour(a)
            plt.imshow(a)
        assert type(np.float32(2) * old) is mx.nd.NDArray and type(np.sin(new)) is mx.np.ndarray
        """,
        "",
    ),
    "records keep labels and images": (
        """
        import mxnet as mx, numpy as np
        packed = mx.recordio.pack(mx.recordio.IRHeader(0, [4.0, 5.0], 1, 0), b"data")
        header, data = mx.recordio.unpack(packed)
        one, _ = mx.recordio.unpack(mx.recordio.pack(mx.recordio.IRHeader(0, 3.0, 1, 0), b"data"))
        print(header.label, header.flag, data, one.label)
        class OpenCV:
            IMWRITE_PNG_COMPRESSION = 16
            imencode = staticmethod(lambda kind, image, options: (True, image.ravel()))
        mx.recordio.cv2 = OpenCV
        packed = mx.recordio.pack_img(mx.recordio.IRHeader(0, 3.0, 1, 0), np.arange(4, dtype=np.uint8), 9, ".png")
        print(list(mx.recordio.unpack(packed)[1]))
        """,
        "[4. 5.] 2 b'data' 3.0\n[0, 1, 2, 3]\n",
    ),
    "metrics reset and count as in early versions of MXNet, and add up in float64": (
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
        loss = mx.metric.Loss()
        for value in (2.0**24, 1, 1):
            loss.update(None, [mx.nd.array([value])])
        sums = loss.get()[1] * 3 - 2**24, loss.get_global()[1] * 3 - 2**24
        print(tasks.sum_metric, top.get()[1], top.top_k, *map(int, sums))
        """,
        "[('two_0', 1.0), ('two_1', 0.0)] None\n[0, 0] 1.0 20 2 2\n",
    ),
}


@pytest.mark.parametrize("claim", PROGRAMS)
def test_arrays(claim, printed):
    assert printed[claim] == PROGRAMS[claim][1]
