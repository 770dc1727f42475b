"""`gluon-mgpu run` runs programs as `python` does, with names that Python has removed, and explains what is missing.

MNIST and Fashion-MNIST come from verified files. Each test runs a program in this environment.
"""

import runpy
import shlex
import sys
import venv
from pathlib import Path

import numpy as np
import pip
import pytest
import tiny
from runs import error, finished, gluon_mgpu

from gluon_mgpu.commands.main import main
from gluon_mgpu.data import datasets
from gluon_mgpu.old import downloads, explain, packages, prepare
from gluon_mgpu.support.errors import Error

AS_PYTHON = {
    "exit status": """
        import os, sys, __main__
        print(sys.argv, __name__, __file__, sys.path[0], sys.stdin.read().upper())
        print({'mxnet', 'numpy'} & sys.modules.keys(), os.environ.get('OMP_NUM_THREADS'))
        sys.exit(7)
        """,
    "traceback": "def f():\n    raise KeyError('x')\nf()",
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
@pytest.mark.slow
def test_a_program_behaves_as_under_python(program, text):
    run, expected = (program(text, "--debug", "a b", by_python=by_python, input="in") for by_python in (False, True))
    assert (run.returncode, run.stdout, run.stderr) == (expected.returncode, expected.stdout, expected.stderr)


@pytest.mark.slow
def test_modules_and_another_sitecustomize_work_as_with_python(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.customized = 1")
    (tmp_path / "module.py").write_text("import sys; print(sys.argv[1:], customized)")
    env = {**prepare.subprocesses.users_environment(), "PYTHONPATH": str(tmp_path)}
    run = gluon_mgpu("run", "--here", "-m", "module", "--epochs", "2", cwd=tmp_path, env=env)
    assert run.stdout == "['--epochs', '2'] 1\n", run.stderr


def test_names_that_python_removed_are_there_except_those_of_python_2(program):
    run = program("""
        import collections, fractions, inspect, os, platform, time
        print(isinstance({}, collections.Mapping), fractions.gcd(4, 6), time.clock() >= 0, os.errno.ENOENT)
        print(inspect.getargspec(lambda a, b=1: 0).args, platform.linux_distribution()[0])
        xrange
    """)
    assert run.stdout == "True 2 True 2\n['a', 'b'] \n" and "Python 2" in run.stderr.splitlines()[-1], run.stderr


PYTHON_2 = (
    "print 'a'",
    "print ('a'), len('b')\n    exec 'a' in {}",
    "a = `1`",
    "try: pass\n    except KeyError, e: pass",
)
NO = "raise ImportError(\"No module named '{}'\")"
NEEDS = [  # (program, with --here, what the last line of its error says)
    (f"try:\n    {NO}\nexcept ImportError:\n    raise KeyError".format("sklearn"), False, "--with scikit-learn "),
    (NO.format("nltk.corpus"), False, "--with nltk "),
    (NO.format("gluoncv"), True, "--with gluoncv==0.10.5 "),
    ("import types\nd2l = types.ModuleType('d2l')\nd2l.train_ch3", False, "--with d2l==0.11.4 "),
    ("import numpy\nnumpy.linalg.no_such", True, "omit --here"),
    ("import numpy\nnumpy.no_such", False, "--here"),
    ("for i in xrange(3): pass", False, "Python 2"),
    ("import cPickle", False, "Python 2"),
    ("from itertools import izip", False, "Python 2"),
    ("{}.iteritems()", False, "Python 2"),
    ("from gluon_mgpu import Error\nraise Error('libcuda.so.1: no such file')", False, "--cpu "),
    ("from pickle import urlopen", False, "ImportError: "),
    ("import sys\nprint >> sys.stderr, 'a'", False, "Python 2"),
    ("iter([]).next()", False, "Python 2"),
    ("{}.keys()[0]", False, "Python 2"),
    ("range(3) + [1]", False, "Python 2"),
    ("range(10 / 2)", False, "//"),
    ("import string\nstring.letters", False, "string.ascii_"),
    ("cmp(1, 2)", False, "key="),
    ("import pickle\npickle.loads(b\"S'\\\\xff'\\n.\")", False, "latin1"),
    ("import tkinter.no_such\nraise ImportError(\"No module named 'tkinter'\")", False, "python3-tk"),
    ("cv2 = None\nassert cv2 is not None", False, "--with opencv-python-headless "),
    ("raise ImportError('IProgress not found. Please update jupyter and ipywidgets.')", False, "--with ipywidgets "),
    ("raise SyntaxError('multiple exception types must be parenthesized')", False, "Python 2"),  # until 3.13
    *((f"import os\n\nif os:\n    {text}\n", False, "Python 2") for text in PYTHON_2),
    ("if 1:\n        a = 1\n\ta = 2", False, "expand"),
    ("def f(async): pass", False, "SyntaxError: "),  # which 2to3 leaves as it is
    ("def f(:\n    print 'a'", False, "SyntaxError: "),
]


@pytest.mark.parametrize("text, here, says", NEEDS)
def test_the_last_line_says_what_a_program_needs(text, here, says, tmp_path, capsys):
    (tmp_path / "old.py").write_text(text)
    with pytest.raises(Exception) as caught:
        runpy.run_path(str(tmp_path / "old.py"))
    explain.explain(caught.type, caught.value, caught.tb, here=here)
    *traceback, last = capsys.readouterr().err.splitlines()
    one_line = caught.type is Error or (isinstance(caught.value, SyntaxError) and says != "SyntaxError: ")
    assert says in last and (traceback == []) == one_line


def test_the_command_in_a_hint_has_the_options_that_were_given_and_the_program(program):
    run = program("import nltk_of_the_time", "a b", options=["--gpus", 2])
    hint = "gluon_mgpu run --gpus 2 --with nltk_of_the_time "
    assert f"{hint}{shlex.quote(str(run.args[-2]))} 'a b'`" in run.stderr.splitlines()[-1], run.stderr


def test_a_package_that_imports_a_module_beside_it_as_in_python_2_is_said_to_be_that(program, tmp_path):
    tiny.put(tmp_path / "package", {"__init__.py": b"import symbols_of_it", "symbols_of_it.py": b""})
    assert "lib2to3 -w" in program("import package").stderr.splitlines()[-1]


@pytest.mark.parametrize("here", [False, True])
def test_pip_lists_but_does_not_change_packages_that_programs_share(here, tmp_path):
    venv.create(tmp_path / "shared")
    (tmp_path / "shared" / packages.COMPLETE).touch()
    python = tmp_path / "shared/bin/python"
    (next((tmp_path / "shared/lib").glob("*/site-packages")) / "pip.pth").write_text(str(Path(pip.__file__).parents[1]))
    env = prepare.variables(prepare.Preparation(here=here), python)
    listed = finished(python, "-m", "pip", "list", env=env)
    assert listed.returncode == 0 and "numpy" in listed.stdout, listed.stderr
    removed = finished(python, "-m", "pip", "uninstall", "--yes", "no-such-package", env=env)
    assert (removed.returncode, "--with" in removed.stderr) == (int(not here), not here), removed.stderr


@pytest.mark.parametrize("words", ["a.ipynb x", "--out b a.py", "no-file.py", "--cpu --here -", ""])
def test_what_does_not_work_is_refused_in_one_line(capsys, words):
    error(capsys, main, "run", *words.split())


FILE = "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    "folder, name",
    [
        ("http://yann.lecun.com/exdb/mnist", "mnist"),
        ("https://x.org/kmnist-and-others/raw/MNIST_data", "mnist"),
        ("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion", "fashion-mnist"),
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", "fashion-mnist"),
        ("https://storage.googleapis.com/tensorflow/tf-keras-datasets", "fashion-mnist"),
        ("https://x.org/mnist/notMNIST-to-MNIST/raw", None),
    ],
)
def test_a_url_gets_a_known_file_only_if_its_folder_names_the_data_set(folder, name):
    for file in (FILE, f"{FILE}.gz"):
        assert downloads.known_file(f"{folder}/{file}") == (name and (name, FILE))
    assert downloads.known_file(f"{folder}/emnist-letters-{FILE}.gz") is None


DOWNLOADS = """
import gzip, urllib.request
from urllib.request import Request, urlopen
import mxnet as mx
import mxnet.test_utils
from gluoncv.utils import download
from mxnet.gluon.data import vision

mnist = mx.test_utils.get_mnist()
print(mnist["train_data"].shape, round(mnist["train_data"][4].max() * 255), mnist["test_label"][4])
mx.test_utils.get_mnist_ubyte()
files = {"image": "data/t10k-images-idx3-ubyte", "label": "data/t10k-labels-idx1-ubyte"}
batch = next(mx.io.MNISTIter(batch_size=5, shuffle=False, **files))
print(batch.data[0].shape, round(float(batch.data[0][4].max().asscalar()) * 256), batch.label[0][4].asscalar())
for kind in vision.MNIST, vision.FashionMNIST:
    for train in True, False:
        data = kind(train=train)
        print(len(data), data[3][0].shape, int(data[3][0].max().asscalar()), int(data[3][1]))

host, labels = "http://127.0.0.1:1", "t10k-labels-idx1-ubyte.gz"
with urlopen(Request(f"{host}/fashion-mnist/{labels}", headers={"User-Agent": "x"})) as response:
    print(list(gzip.decompress(response.read())[8:12]), response.status)
try:
    urlopen(f"{host}/kmnist/{labels}")
except OSError:
    print("refused")
download(f"{host}/net.params", "models/net.params")
"""
PRINTED = """\
(20, 1, 28, 28) 5 5
(5, 1, 28, 28) 5 5.0
20 (28, 28, 1) 4 4
10 (28, 28, 1) 4 4
20 (28, 28, 1) 5 5
10 (28, 28, 1) 5 5
[2, 3, 4, 5] 200
refused
1
"""


def test_every_way_to_download_finds_the_verified_files_and_others_end_with_where_to_put_the_file(tmp_path):
    """Two tiny data sets; image i of mnist has the value i + 1 everywhere, and that of fashion-mnist i + 2. The current
    folder is also the home directory, and has a stand-in for gluoncv."""
    hashes, home = {}, tmp_path / "home"
    for shift, name in enumerate(("mnist", "fashion-mnist"), 1):
        values = np.arange(20, dtype=np.uint8) + shift
        images, labels = np.repeat(values, 28 * 28).reshape(-1, 1, 28, 28), values % 10
        dataset = datasets.Dataset(name, images, labels, images[:10], labels[:10], source="")
        hashes[name] = tiny.write(tmp_path / name, dataset)
    code = b"import requests\ndef download(url, path=None, retries=5):\n    print(retries)\n    requests.get(url)\n"
    tiny.put(home / "gluoncv/utils", {"__init__.py": b"from .download import download", "download.py": code})
    start = f"from gluon_mgpu.data import datasets\ndatasets.SHA256 = {hashes}\n"
    folders = {"GLUON_MGPU_DATA": str(tmp_path), "HOME": str(home), "MXNET_HOME": str(home / "mx")}
    env = {**prepare.variables(prepare.Preparation()), **folders}
    run = finished(sys.executable, "-c", start + DOWNLOADS, env=env, cwd=home)
    assert run.stdout == PRINTED and str(home / "models/net.params") in run.stderr.splitlines()[-1], run.stderr
