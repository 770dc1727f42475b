"""`gluon-mgpu run` lets NumPy treat arrays as old versions did; and convert MXNet's arrays."""


def test_an_array_with_one_element_is_a_number(forked):
    run = forked("""
        import math, pickle, warnings, mxnet as mx, numpy as np
        warnings.simplefilter("ignore")  # some versions of NumPy warn
        mean, rows, losses = mx.nd.array([1.5, 2.5]).mean().asnumpy(), mx.nd.ones((4, 1)).asnumpy(), np.zeros(2)
        losses[1] = mean
        print("%.2f %d %f" % (mean, mean, rows[0]), float(mean), int(np.array([[3]])), math.sqrt(mean * 2), losses)
        print(complex(np.array([2.0])), float(np.float32(2)), int(np.array(3)), repr(mean), type(mean).__name__)
        for wrong in (np.ones(2), np.array([])):
            for kind in (float, int, complex):
                try:
                    print(kind(wrong))
                except TypeError:
                    pass
        np.ndarray.name = 1
    """)
    assert run.stdout == ("2.00 2 1.000000 2.0 3 2.0 [0. 2.]\n(2+0j) 2.0 3 array([2.], dtype=float32) ndarray\n"), (
        run.stderr
    )
    assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("TypeError: ")


def test_rows_of_different_lengths_become_an_array_of_objects(forked):
    run = forked("""
        import warnings, numpy as np
        warnings.simplefilter("ignore")  # NumPy before 1.24 warns
        rows = [[1, 2], [3]]
        for a in (np.array(rows), np.asarray(rows), np.array(rows, None)):
            print(a.dtype, a.shape, a[0])
        np.save("rows.npy", [np.zeros(2), np.ones(3)])
        print(np.load("rows.npy", allow_pickle=True)[1])
        a = np.ones(2)
        print(np.array([1, 2], copy=False), np.array(a, copy=False) is a, np.array(a, copy=True) is a, a.dtype)
        np.array(rows, float)
    """)
    assert run.stdout == "object (2,) [1, 2]\n" * 3 + "[1. 1. 1.]\n[1 2] True False float64\n", run.stderr
    assert run.returncode == 1 and "ValueError" in run.stderr.splitlines()[-1]


def test_an_mxnet_array_names_a_dtype_and_a_constant_may_be_a_list(forked):
    run = forked("""
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
    """)
    assert run.stdout == (
        'float16 float16\n["constant", {"value": [[0, 1], [1, 0]]}] ["constant", {"value": [1.0, 1.0]}] '
        '["constant", {"value": [1.0, 1.0]}] ["constant", {"value": 2}] [[0.0, 1.0], [1.0, 0.0]]\n'
    ), run.stderr


def test_numpy_and_matplotlib_convert_mxnets_arrays(program):
    text = """
        import mxnet as mx, numpy as np
        from matplotlib import pyplot as plt
        old, new = mx.nd.arange(4).reshape((2, 2)), mx.np.arange(4).reshape(2, 2)
        for a in (old, new):
            for converted in (np.asarray(a), np.array([a, a])[1], np.array(a, copy=False), np.array(a, np.float32)):
                assert converted.dtype == np.float32 and converted.tolist() == [[0, 1], [2, 3]]
            assert np.asarray(a, int).dtype == int
            plt.contour(a)
            plt.imshow(a)
        assert type(np.float32(2) * old) is mx.nd.NDArray and type(np.sin(new)) is mx.np.ndarray
    """
    assert program(text, MPLBACKEND="Agg").stderr == ""
