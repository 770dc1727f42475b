"""What MXNet finds on NumPy and nobody else: each claim is checked in a process of its own."""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from gluon_mgpu.runtime import numpy_names


def python(code, *arguments, **environment):
    """What code prints in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


READ = """
    import json, numpy as np
    own, read = np.__getattr__, set()
    def watched(name):
        try:
            return own(name)
        except AttributeError:
            if not name.startswith("__"):
                read.add(name)
                return lambda: None
            raise
    np.__getattr__ = watched
    import mxnet
    print(json.dumps(sorted(read)))
"""
LENT = """
    import json, sys, types, numpy as np
    before, lent = set(vars(np)), set()
    class Spy:  # asked for each of MXNet's modules
        def find_spec(self, name, path=None, target=None):
            if name.startswith("mxnet."):
                lent.update(n for n in set(vars(np)) - before if not isinstance(getattr(np, n), types.ModuleType))
    sys.meta_path.insert(0, Spy())
    from gluon_mgpu.runtime import numpy_names
    numpy_names.lend()
    import mxnet
    print(json.dumps(sorted(lent)))
"""


def test_the_names_lent_are_those_that_mxnet_reads_at_import_and_this_numpy_lacks():
    read = json.loads(python(READ))
    assert json.loads(python(LENT)) == read
    if np.__version__ >= "2":
        assert {"PZERO", "round_"} <= set(read)


# What a program sees that knows nothing of MXNet: names, warnings, promotion, errors, settings, random numbers.
NUMPY_ONLY = """
    import sys, warnings
    import numpy as np

    for name in sys.argv[1:]:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                print(name, hasattr(np, name), repr(getattr(np, name))[:20], name in vars(np), name in dir(np))
            except AttributeError as error:
                print(name, error)
        print([str(w.message) for w in warned])
    print(sorted(np.__all__) == sorted(set(np.__all__)), len(np.__all__), np.__getattr__.__module__)
    for value in (3.0, 3, True, np.float64(3), np.int64(300), np.bool_(True)):
        print((np.ones(2, np.float32) * value).dtype, (np.uint8(2) + np.asarray(value)).dtype, repr(value))
    for do in (lambda: np.array(np.ones(2), copy=False), lambda: np.array([1, 2], copy=False), lambda: np.uint8(300),
               lambda: np.asarray([1.5, "a"]), lambda: np.array([[1], [1, 2]])):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                print(repr(do()))
            except Exception as error:
                print(type(error), error)
        print([str(w.message) for w in warned])
    print(np.random.RandomState(1).rand(3), np.random.default_rng(1).random(3), np.geterr())
    print(sorted(np.get_printoptions().items(), key=str), np.linalg.solve(np.eye(2) * 3, np.arange(2.0)))
    print([f for f in warnings.filters if "numpy" in str(f)])
"""


def test_a_numpy_only_program_prints_the_same_beside_mxnet_as_alone():
    beside = """
    import gluon_mgpu
    gluon_mgpu.configure(2)
    from mxnet import gluon, nd
    nd.ones(3).asnumpy()
    """
    names = [*numpy_names.WHILE_IMPORTED, *numpy_names.WHEN_CALLED, "float_", "int", "cumproduct", "trapezoid", "bool_"]
    assert python(textwrap.dedent(beside) + textwrap.dedent(NUMPY_ONLY), *names) == python(NUMPY_ONLY, *names)


def test_numpy_holds_what_it_held_once_mxnet_is_imported():
    code = """
        import types, numpy as np, gluon_mgpu
        before = dict(vars(np))
        gluon_mgpu.configure(2)
        import mxnet
        after = vars(np)
        print([k for k in before if after.get(k) is not before[k]])
        new = set(after) - set(before)
        print([k for k in new if not isinstance(after[k], types.ModuleType)])  # NumPy loads np.random, ... late
    """
    assert python(code) == "[]\n[]\n"


def test_a_name_that_somebody_else_put_on_numpy_is_not_replaced_nor_taken_away():
    code = """
        import numpy as np, gluon_mgpu
        vars(np).update(PZERO=7.0, bool=bool)
        gluon_mgpu.configure(2)
        import mxnet
        print(mxnet.np.PZERO, np.PZERO, np.bool, mxnet.np.bool)
    """
    assert python(code) == "7.0 7.0 <class 'bool'> <class 'bool'>\n"


def test_where_mxnet_fails_to_import_its_error_comes_through_and_numpy_is_as_before(tmp_path):
    (tmp_path / "mxnet.py").write_text("import numpy\nnumpy.bool\nraise ImportError('libmxnet.so: no such file')\n")
    code = """
        import numpy as np, gluon_mgpu
        before = set(vars(np))
        gluon_mgpu.configure(2)
        for _ in range(2):
            try:
                import mxnet
            except ImportError as error:
                print(error, set(vars(np)) - before)
    """
    assert python(code, PYTHONPATH=str(tmp_path)) == "libmxnet.so: no such file set()\n" * 2


def test_what_mxnet_made_of_old_names_computes_what_the_old_names_did():
    code = """
        import gluon_mgpu
        gluon_mgpu.configure(2)
        from mxnet import np
        a = np.array([[3, 2, 2], [0, 1, 5]])
        print(np.in1d(a, np.array([1, 2])).tolist())
        print(np.trapz(a).tolist())
        print(np.trapz(a, dx=2.0, axis=0).tolist())
        print(np.msort(a).tolist())
        print(bool(np.alltrue(a)), bool(np.alltrue(a + 1)))
        print(np.sometrue(a, axis=1).tolist())
        print(np.product(a, axis=1).tolist())
        print(np.round_(a / 4).tolist())
        print(np.PZERO, np.NZERO, np.PINF, np.NINF, np.NaN, np.NAN)
        try:
            np.mirr([1.0], 1, 1)
        except RuntimeError as error:
            print("numpy_financial" in str(error))
    """
    assert python(code).splitlines() == [
        "[False, True, True, False, True, False]",
        "[4.5, 3.5]",
        "[3.0, 3.0, 7.0]",
        "[[0.0, 1.0, 2.0], [3.0, 2.0, 5.0]]",
        "False True",
        "[True, True]",
        "[12.0, 0.0]",
        "[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]",
        "0.0 -0.0 inf -inf nan nan",
        "True",
    ]


def test_numpys_own_functions_still_reach_mxnets_arrays():
    code = """
        import numpy, gluon_mgpu
        gluon_mgpu.configure(2)
        from mxnet import np
        a = np.array([[3, 2, 2], [0, 1, 5]])
        for function, own in ((numpy.any, np.any), (numpy.prod, np.prod), (numpy.around, np.around)):
            result = function(a)
            print(type(result) is np.ndarray, result.tolist() == own(a).tolist())
    """
    assert python(code) == "True True\n" * 3


@pytest.mark.parametrize(
    "use, printed",
    [
        ("print(mx.np.pad(mx.np.array([1, 2]), (1, 1), mode='constant').tolist())", "[0.0, 1.0, 2.0, 0.0]"),
        (
            "s = mx.sym.np.pad(mx.sym.var('x').as_np_ndarray(), (1, 1), mode='constant'); print(s.list_arguments())",
            "['x']",
        ),
        (
            "from mxnet.gluon.contrib.estimator import CheckpointHandler\n"
            "print(CheckpointHandler('.', monitor=mx.metric.Loss('l'), mode='min', save_best=True).best)",
            "inf",
        ),
    ],
)
def test_what_mxnet_reads_when_it_is_called_is_there(use, printed):
    assert python("import gluon_mgpu\ngluon_mgpu.configure(2)\nimport mxnet as mx\n" + use) == f"{printed}\n"
