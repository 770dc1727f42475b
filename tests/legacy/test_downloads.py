"""MXNet's dead downloads: MNIST and Fashion-MNIST come from verified files, any other download fails in one line."""

import json
import sys
import textwrap

import numpy as np
import pytest
import tiny
from runs import finished

from gluon_mgpu.legacy import prepare
from gluon_mgpu.training import datasets

START = "import json, sys; from gluon_mgpu.training import datasets; datasets.SHA256 = json.loads(sys.argv[1])\n"


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
def program(data, tmp_path):
    """program(text) runs it where the downloads are replaced, in an empty folder that is also the home."""

    def run(text):
        folder, hashes = data
        folders = {"GLUON_MGPU_DATA": str(folder), "HOME": str(tmp_path), "MXNET_HOME": str(tmp_path / "mx")}
        environment = {**prepare.environment(prepare.Preparation()), **folders}
        words = [sys.executable, "-c", START + textwrap.dedent(text), json.dumps(hashes)]
        return finished(*words, env=environment, cwd=tmp_path)

    return run


def test_gluons_data_sets_read_the_verified_files(program):
    run = program("""
        from mxnet.gluon.data import vision
        for kind in vision.MNIST, vision.FashionMNIST:
            for train in True, False:
                data = kind(train=train)
                print(len(data), data[3][0].shape, int(data[3][0].max().asscalar()), int(data[3][1]))
    """)
    lines = [f"{n} (28, 28, 1) {3 + shift} {3 + shift}" for shift in (1, 2) for n in (20, 10)]
    assert run.stdout.splitlines() == lines, run.stderr


@pytest.mark.parametrize("before", ["", "mx.test_utils.get_mnist_ubyte()"], ids=["given names", "archive"])
def test_mnist_functions_and_iterators_read_the_verified_files(program, before):
    run = program(f"""
        import mxnet as mx
        import mxnet.test_utils
        {before}
        mnist = mx.test_utils.get_mnist()
        print(mnist["train_data"].shape, round(mnist["train_data"][4].max() * 255), mnist["test_label"][4])
        batch = next(mx.io.MNISTIter(
            image="data/t10k-images-idx3-ubyte", label="data/t10k-labels-idx1-ubyte", batch_size=5, shuffle=False))
        print(batch.data[0].shape, round(float(batch.data[0][4].max().asscalar()) * 256), batch.label[0][4].asscalar())
    """)
    assert run.stdout == "(20, 1, 28, 28) 5 5\n(5, 1, 28, 28) 5 5.0\n", run.stderr


def test_a_damaged_copy_is_written_again(program, tmp_path):
    code = "from mxnet.gluon.data.vision import MNIST; print(len(MNIST('copies', train=False)))"
    assert program(code).stdout == "10\n"
    file = tmp_path / "copies" / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:20])
    assert program(code).stdout == "10\n"


ANY_OTHER = {
    "mx.gluon.utils.download('http://127.0.0.1:1/a/net.params', path='models')": "models",
    "mx.test_utils.download('http://127.0.0.1:1/a/b.zip', dirname='data')": "data/b.zip",
    "mx.gluon.model_zoo.vision.alexnet(pretrained=True)": "alexnet-",
}


@pytest.mark.parametrize("call", ANY_OTHER)
def test_any_other_download_that_fails_names_the_file_and_its_place(program, tmp_path, call):
    imports = "import mxnet as mx, mxnet.test_utils, os; os.environ['MXNET_GLUON_REPO'] = 'http://127.0.0.1:1'"
    run = program(f"{imports}\n{call}")
    last = run.stderr.splitlines()[-1]
    assert run.returncode == 1 and last.startswith("OSError: ") and "127.0.0.1:1/" in last
    assert str(tmp_path) in last and ANY_OTHER[call] in last


def test_a_download_takes_its_arguments_by_position_as_mxnets_does(program, tmp_path):
    (tmp_path / "served").write_text("content")
    run = program("""
        import functools, http.server, threading
        import mxnet as mx, mxnet.test_utils
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=".")
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/served"
        print(open(mx.gluon.utils.download(url, "first", True, None, 3, True)).read())
        print(open(mx.test_utils.download(url, "second", None, True, 3)).read())
        mx.gluon.utils.download(url, "first", False, "wrong", 3)
    """)
    assert run.stdout.count("content\n") == 2, run.stderr
    assert run.returncode == 1 and "UserWarning" in run.stderr.splitlines()[-1]
