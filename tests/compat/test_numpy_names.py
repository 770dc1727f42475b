"""NumPy names that MXNet finds but other code does not. Checks run in separate processes."""

import pytest
from runs import output, program

from gluon_mgpu.compat import numpy_names

CONFIGURE = "import gluon_mgpu; gluon_mgpu.configure(2)\n"

# What a program that knows nothing of MXNet sees: names, warnings, type promotion, errors, settings.
NUMPY_ONLY = program("""
    import sys, warnings
    import numpy as np
    def show(do):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                print(repr(do())[:40])
            except Exception as error:
                print(type(error), error)
        print([str(w.message) for w in warned])
    for name in sys.argv[1:]:
        show(lambda: (name, hasattr(np, name), name in vars(np), name in dir(np), getattr(np, name)))
    for value in (3.0, 3, True, np.float64(3), np.int64(300), np.bool_(True)):
        show(lambda: ((np.ones(2, np.float32) * value).dtype, (np.uint8(2) + np.asarray(value)).dtype, value))
    for do in (lambda: np.array(np.ones(2), copy=False), lambda: np.uint8(300), lambda: np.array([[1], [1, 2]])):
        show(do)
    print(sorted(np.__all__), np.__getattr__.__module__, np.random.RandomState(1).rand(3), np.geterr())
    print(sorted(np.get_printoptions().items(), key=str), [f for f in warnings.filters if "numpy" in str(f)])
""")


def test_a_numpy_only_program_prints_the_same_beside_mxnet_as_alone():
    beside = CONFIGURE + "from mxnet import gluon, nd\nnd.ones(3).asnumpy()\n"
    names = [*numpy_names.WHILE_IMPORTED, *numpy_names.WHEN_CALLED, "float_", "int", "cumproduct", "trapezoid", "bool_"]
    assert output(beside + NUMPY_ONLY, *names) == output(NUMPY_ONLY, *names)


@pytest.mark.slow
def test_a_name_that_other_code_put_on_numpy_is_neither_replaced_nor_removed():
    code = "import numpy as np, numpy.ma; vars(np).update(PZERO=7.0, bool=bool)\n" + CONFIGURE
    code += "import mxnet; print(mxnet.np.PZERO, np.PZERO, np.bool, mxnet.np.bool)"
    assert output(code) == "7.0 7.0 <class 'bool'> <class 'bool'>\n"


def test_if_mxnet_cannot_be_imported_its_error_comes_through_and_numpy_is_as_before(tmp_path):
    (tmp_path / "mxnet.py").write_text("import numpy\nnumpy.bool\nraise ImportError('libmxnet.so: no such file')\n")
    code = CONFIGURE + program("""
        import numpy as np
        before = set(vars(np))
        for _ in range(2):
            try:
                import mxnet
            except ImportError as error:
                print(error, set(vars(np)) - before)
    """)
    assert output(code, PYTHONPATH=str(tmp_path)) == "libmxnet.so: no such file set()\n" * 2


@pytest.mark.slow
def test_mxnets_functions_with_old_names_compute_what_numpys_did():
    code = CONFIGURE + program("""
        import mxnet, numpy
        from mxnet import np
        from mxnet.gluon.contrib.estimator import CheckpointHandler
        a, new = np.array([[3, 2, 2], [0, 1, 5]]), numpy.array([[3, 2, 2], [0, 1, 5]])
        equal = numpy.testing.assert_array_equal
        equal(np.in1d(a, np.array([1, 2])).asnumpy(), numpy.isin(new, [1, 2]).ravel())
        equal([np.trapz(a).asnumpy(), np.trapz(a, dx=2.0, axis=1).asnumpy()], [[4.5, 3.5], [9, 7]])
        equal(np.msort(a).asnumpy(), numpy.sort(new, axis=0))
        equal([bool(np.alltrue(a)), *np.sometrue(a, axis=1).tolist()], [False, True, True])
        equal(np.product(a, axis=1).asnumpy(), numpy.prod(new, axis=1))
        equal(np.round_(a / 4).asnumpy(), numpy.around(new / 4))
        equal([np.PZERO, np.NZERO, np.PINF, np.NINF, np.NaN], [0, 0, numpy.inf, -numpy.inf, numpy.nan])
        equal(np.pad(np.array([1, 2]), (1, 1), mode="constant").asnumpy(), [0, 1, 2, 0])
        equal(CheckpointHandler(".", monitor=mxnet.metric.Loss("l"), mode="min", save_best=True).best, numpy.inf)
        for function in (numpy.any, numpy.prod, numpy.around):  # NumPy's own functions still reach MXNet's arrays
            assert type(function(a)) is np.ndarray
        print("done")
    """)
    assert output(code) == "done\n"
