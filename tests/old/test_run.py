"""`gluon-mgpu run` runs programs as `python` does, and adds what old MXNet programs need: names, contexts, downloads.

MNIST and Fashion-MNIST come from verified files. Each test runs a program.
"""

import json
import sys
import textwrap

import numpy as np
import pytest
import tiny
from runs import finished
from runs import gluon_mgpu as command

from gluon_mgpu.data import datasets
from gluon_mgpu.old import downloads, names, prepare

AS_PYTHON = {
    "exit status": """
        import os, sys, __main__
        print(sys.argv, __name__, __file__, sys.path[0], sys.stdin.read().upper())
        print({'mxnet', 'numpy'} & sys.modules.keys(), os.environ.get('OMP_NUM_THREADS'))
        sys.exit(7)
        """,
    "traceback": "def f():\n    raise KeyError('x')\nf()",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGINT": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "processes": """
        import multiprocessing, urllib.request, requests
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(double, [1, 2]))
        """,
}


@pytest.mark.parametrize("text", AS_PYTHON.values(), ids=AS_PYTHON)
def test_a_program_behaves_as_under_python(program, text):
    run, expected = (program(text, "--debug", "a b", by_python=by_python, input="in") for by_python in (False, True))
    assert (run.returncode, run.stdout, run.stderr) == (expected.returncode, expected.stdout, expected.stderr)


def test_a_module_runs_as_with_python_m():
    run = command("run", "-m", "json.tool", "--compact", input='{"a": 1}')
    assert (run.returncode, json.loads(run.stdout)) == (0, {"a": 1})


OLD_NAMES = """
    import collections, fractions, inspect, locale, time, unittest
    import numpy as np
    print(locale.format("%d", 3), np.float32 in np.sctypes["float"])
    print(np.warnings.filters is not None)
    print(isinstance({}, collections.Mapping), fractions.gcd(4, 6), time.clock() >= 0)
    print(inspect.getargspec(lambda a, b=1: 0).args, unittest.TestCase.assertEquals)
    print(np.zeros(2, np.float).dtype, np.int(3.5), np.array([1, 0]).astype(np.bool), np.object is object, np.asscalar(
        np.float32(2)), np.in1d([1, 2], [2]), np.product([2, 3]), np.Inf)
    a = np.array([[1, 2], [3, 5]], ">i2")
    print(a.tostring(), a.ptp(), a.ptp(0), a.newbyteorder()[0, 0], np.lib.pad(a[0], 1, "constant"), np.math.sqrt(4))
    print(np.fromstring(a.tostring(), ">i2"), np.fromstring(b"ab", np.uint8, 1), np.fromstring("1 2", sep=" "))
"""


def test_names_that_python_and_numpy_removed_are_there_for_the_program(program):
    run = program(OLD_NAMES)
    assert run.returncode == 0, run.stderr
    assert "float64 3 [ True False] True 2.0" in run.stdout
    assert run.stdout.splitlines()[-2:] == [
        r"b'\x00\x01\x00\x02\x00\x03\x00\x05' 4 [2 3] 256 [0 1 2 0] 2.0",
        "[1 2 3 5] [97] [1. 2.]",
    ]


def test_a_missing_package_is_one_line_that_says_what_to_install(program, tmp_path):
    start = "import sys\nsys.path[:] = [folder for folder in sys.path if 'site-packages' not in folder]\n"
    run = program(f"{start}import d2l.mxnet")
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1 and "pip install" in run.stderr
    run = program(f"{start}try:\n    import gluonbook\nexcept ImportError:\n    print('none')\nraise KeyError('x')")
    assert run.stdout == "none\n" and run.stderr.splitlines()[-1] == "KeyError: 'x'"
    (tmp_path / "d2l.py").write_text("name = 'installed'")
    assert program("import d2l; print(d2l.name)").stdout == "installed\n"


@pytest.mark.parametrize("name", ["gluonbook", "d2lzh", "d2l", "pkg_resources"])
def test_the_error_of_a_missing_package_names_the_version_to_install(name, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # find_spec changes it
    with pytest.raises(ModuleNotFoundError, match="pip install .*(==|<)"):
        names.Missing.find_spec(name)


NUMPY = """
    import json, numpy as np
    public = {name: str(value).split(" at 0x")[0] for name, value in vars(np).items() if name[0] != "_"}
    for replaced in ("fromstring", "array", "asarray", "asanyarray"):
        del public[replaced]
    print(json.dumps(public))
"""


def test_only_names_that_numpy_lacks_are_added(program):
    plain, prepared = (json.loads(program(NUMPY, by_python=python).stdout) for python in (True, False))
    assert plain.items() <= prepared.items()
    assert "rank" in prepared.keys() - plain.keys()  # NumPy removed it in version 1.18


def test_a_module_of_the_program_hides_pythons(program, tmp_path):
    (tmp_path / "fractions.py").write_text("x = 1")
    assert program("import fractions; print(fractions.x, hasattr(fractions, 'gcd'))").stdout == "1 False\n"


def test_pythons_flags_reach_the_program(program):
    text = "import sys; print(__debug__, sys.warnoptions)"
    run = finished(sys.executable, "-O", "-W", "error", "-m", "gluon_mgpu", "run", "-", input=text)
    assert run.stdout == "False ['error']\n"


def test_another_sitecustomize_still_runs(program, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins; builtins.customized = 1")
    assert program("print(customized)", PYTHONPATH=str(tmp_path / "site")).stdout == "1\n"


START = "import json, sys; from gluon_mgpu.data import datasets; datasets.SHA256 = json.loads(sys.argv[1])\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """(folder, hashes) of two tiny data sets in MNIST's format; image i of mnist has the value i + 1 everywhere."""
    folder, hashes = tmp_path_factory.mktemp("data"), {}
    for shift, name in enumerate(("mnist", "fashion-mnist"), 1):
        values = np.arange(20, dtype=np.uint8) + shift
        images, labels = np.repeat(values, 28 * 28).reshape(-1, 1, 28, 28), values % 10
        dataset = datasets.Dataset(name, images, labels, images[:10], labels[:10], source="")
        hashes[name] = tiny.write(folder / name, dataset)
    return folder, hashes


@pytest.fixture
def download(data, tmp_path):
    """download(text) runs this code with downloads replaced, in an empty folder that is also the home directory."""

    def run(text):
        folder, hashes = data
        folders = {"GLUON_MGPU_DATA": str(folder), "HOME": str(tmp_path), "MXNET_HOME": str(tmp_path / "mx")}
        environment = {**prepare.environment(prepare.Preparation()), **folders}
        words = [sys.executable, "-c", START + textwrap.dedent(text), json.dumps(hashes)]
        return finished(*words, env=environment, cwd=tmp_path)

    return run


@pytest.mark.parametrize("before", ["", "mx.test_utils.get_mnist_ubyte()"], ids=["given names", "archive"])
def test_mxnets_data_sets_functions_and_iterators_read_the_verified_files(download, before):
    run = download(f"""
        import mxnet as mx
        import mxnet.test_utils
        from mxnet.gluon.data import vision
        {before}
        mnist = mx.test_utils.get_mnist()
        print(mnist["train_data"].shape, round(mnist["train_data"][4].max() * 255), mnist["test_label"][4])
        batch = next(mx.io.MNISTIter(
            image="data/t10k-images-idx3-ubyte", label="data/t10k-labels-idx1-ubyte", batch_size=5, shuffle=False))
        print(batch.data[0].shape, round(float(batch.data[0][4].max().asscalar()) * 256), batch.label[0][4].asscalar())
        for kind in vision.MNIST, vision.FashionMNIST:
            for train in True, False:
                data = kind(train=train)
                print(len(data), data[3][0].shape, int(data[3][0].max().asscalar()), int(data[3][1]))
    """)
    lines = [f"{n} (28, 28, 1) {3 + shift} {3 + shift}" for shift in (1, 2) for n in (20, 10)]
    assert run.stdout.splitlines() == ["(20, 1, 28, 28) 5 5", "(5, 1, 28, 28) 5 5.0", *lines], run.stderr


FILE = "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    "folder, name",
    [
        ("http://yann.lecun.com/exdb/mnist", "mnist"),
        ("https://x.org/kmnist-and-others/raw/MNIST_data", "mnist"),
        ("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion", "fashion-mnist"),
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", "fashion-mnist"),
        ("https://storage.googleapis.com/tensorflow/tf-keras-datasets", "fashion-mnist"),
        ("http://codh.rois.ac.jp/kmnist/dataset/kmnist", None),
        ("https://x.org/mnist/notMNIST-to-MNIST/raw", None),
        ("https://x.org/fashion-mnist/kuzushiji-mnist", None),
        ("https://x.org/mnist-c/raw", None),
    ],
)
def test_a_url_gets_a_known_file_only_if_its_folder_names_the_data_set(folder, name):
    for file in (FILE, f"{FILE}.gz"):
        assert downloads.known_file(f"{folder}/{file}") == (name and (name, FILE))
    assert downloads.known_file(f"{folder}/emnist-letters-{FILE}.gz") is None


def test_a_programs_own_requests_get_the_verified_files(download):
    run = download("""
        import gzip, urllib.request
        from urllib.request import Request, urlopen, urlretrieve
        import requests
        mnist, fashion = "http://127.0.0.1:1/mnist", "http://127.0.0.1:1/fashion-mnist"
        path, headers = urlretrieve(f"{mnist}/t10k-labels-idx1-ubyte.gz", "labels.gz")
        print(gzip.open(path).read()[8:12], headers["Content-Length"] == str(len(open(path, "rb").read())))
        with urlopen(Request(f"{fashion}/t10k-labels-idx1-ubyte.gz", headers={"User-Agent": "x"})) as response:
            print(response.status, gzip.decompress(response.read())[8:12])
        for options in ({}, {"stream": True}):
            response = requests.get(f"{fashion}/t10k-labels-idx1-ubyte.gz", **options)
            response.raise_for_status()
            print(response.ok, gzip.decompress(b"".join(response.iter_content(7)))[8:12])
        for get in (urlopen, requests.get):
            try:
                get("http://127.0.0.1:1/kmnist/t10k-labels-idx1-ubyte.gz")
            except OSError:
                print("refused")
    """)
    mnist, fashion = (bytes(range(start, start + 4)) for start in (1, 2))
    expected = [f"{mnist} True", f"200 {fashion}", f"True {fashion}", f"True {fashion}", "refused", "refused"]
    assert run.stdout.splitlines() == expected, run.stderr


def test_gluoncvs_own_downloader_says_where_to_put_the_file(download, tmp_path):
    (tmp_path / "gluoncv/utils").mkdir(parents=True)
    (tmp_path / "gluoncv/utils/__init__.py").write_text("from .download import download")
    (tmp_path / "gluoncv/utils/download.py").write_text(
        "import requests\ndef download(url, path=None, overwrite=False, sha1_hash=None):\n    requests.get(url)\n"
    )
    run = download("""
        from gluoncv.utils import download
        download("http://127.0.0.1:1/net.params", "models/net.params")
    """)
    assert run.returncode == 1 and str(tmp_path / "models/net.params") in run.stderr.splitlines()[-1], run.stderr
