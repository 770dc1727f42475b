"""The functions of "Dive into Deep Learning", as gluonbook (NDArray) and as d2l (mxnet.np), against NumPy."""

import importlib
import itertools
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_mgpu.legacy import names


@pytest.fixture(params=["gluonbook", "d2l.mxnet"])
def book(request, monkeypatch):
    """The module, and in .xp its array functions."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, names.Modules()])
    if request.param == "d2l.mxnet":
        mx.npx.set_np()
    module = importlib.import_module(request.param)
    module.xp = mx.np if request.param == "d2l.mxnet" else mx.nd
    with np.printoptions(legacy="1.25" if np.__version__ >= "2" else False):  # as `run` sets it
        yield module
    mx.npx.reset_np()
    del sys.modules[request.param]


@pytest.fixture
def problem(book):
    """A batch, and a network on two devices."""
    mx.random.seed(3)
    rng, net = np.random.default_rng(3), gluon.nn.Dense(3)
    net.initialize(mx.init.Xavier(), ctx=[mx.cpu(0), mx.cpu(1)])
    X, y = rng.random((10, 4)), rng.integers(0, 3, 10)
    return (book.xp.array(X, dtype="float32"), book.xp.array(y, dtype="int32")), net


def test_accuracy_is_the_share_of_correct_predictions_whatever_the_order_and_the_devices(book, problem):
    (X, y), net = problem
    loader, expected = book.load_array((X, y), 4), (net(X).asnumpy().argmax(1) == y.asnumpy()).sum()
    for arguments in ((net, loader), (loader, lambda X: net(X), mx.cpu(1)), (loader, net, [mx.cpu(0), mx.cpu(1)])):
        assert book.evaluate_accuracy(*arguments) == expected / 10
    assert book.evaluate_accuracy_gpu(net, loader) == book.evaluate_accuracy_gpus(net, loader) == expected / 10
    assert book.accuracy(net(X), y) == (expected / 10 if book.__name__ == "gluonbook" else expected)
    if book.xp is mx.nd:
        assert book.evaluate_accuracy(mx.io.NDArrayIter(X, y, 5), net, mx.cpu()) == expected / 10


def test_every_training_loop_learns(book, problem, capsys):
    batch, net = problem
    loader, loss, devices = book.load_array(batch, 4), gluon.loss.SoftmaxCrossEntropyLoss(), [mx.cpu(0), mx.cpu(1)]
    before = book.evaluate_loss(net, loader, loss)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.05})
    book.train(loader, loader, net, loss, trainer, devices, 5)
    book.train_ch13(net, loader, loader, loss, trainer, 5, devices)
    assert book.evaluate_loss(net, loader, loss) < before
    net.initialize(force_reinit=True)
    before = book.evaluate_loss(net, loader, loss)
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    book.train_ch3(net, loader, loader, loss, 5, trainer)  # d2l
    book.train_ch3(net, loader, loader, loss, 5, 4, None, None, trainer)  # gluonbook
    book.train_ch5(net, loader, loader, 4, trainer, mx.cpu(), 5)  # gluonbook
    assert book.train_epoch_ch3(net, loader, loss, trainer)[0] < before
    book.train_ch6(net, loader, loader, 2, 0.1)
    assert capsys.readouterr().out.count("\nepoch 2, loss ") == 6


def test_linear_regression_finds_the_weights(book):
    w, b = book.xp.zeros((2, 1)), book.xp.zeros((1,))
    X, y = book.synthetic_data(book.xp.array([2, -3.4]), 4.2, 200)
    w.attach_grad()
    b.attach_grad()
    for features, labels in itertools.chain(*(book.data_iter(10, X, y) for _ in range(20))):
        with mx.autograd.record():
            loss = book.squared_loss(book.linreg(features, w, b), labels)
        loss.backward()
        book.sgd([w, b], 0.05, 10)
    np.testing.assert_allclose([*w.asnumpy().ravel(), *b.asnumpy()], [2, -3.4, 4.2], atol=0.02)


def test_batches_of_fashion_mnist_are_those_of_the_transformed_dataset(book, monkeypatch, tmp_path):
    images = np.random.default_rng(5).integers(0, 256, (50, 28, 28, 1), np.uint8)
    labels = np.arange(50, dtype=np.int32) % 10
    data = gluon.data.ArrayDataset(book.xp.array(images, dtype="uint8"), labels)
    monkeypatch.setattr(book, "FashionMNIST", lambda root, train: data)
    test_iter = book.load_data_fashion_mnist(20)[1]
    transformed = data.transform_first(gluon.data.vision.transforms.ToTensor())
    for batch, expected in zip(test_iter, gluon.data.DataLoader(transformed, 20)):
        for array, other in zip(batch, expected):
            assert type(array) is type(other) and array.dtype == other.dtype
            np.testing.assert_array_equal(array.asnumpy(), other.asnumpy())
    assert next(iter(book.load_data_fashion_mnist(20, resize=32)[0]))[0].shape == (20, 1, 32, 32)


def test_networks_and_corr2d(book):
    X, K = np.arange(12.0).reshape(3, 4), np.array([[0.0, 1], [2, 3]])
    expected = [[(X[i : i + 2, j : j + 2] * K).sum() for j in range(3)] for i in range(2)]
    np.testing.assert_array_equal(book.corr2d(book.xp.array(X), book.xp.array(K)).asnumpy(), expected)
    net = book.resnet18(5)
    net.initialize()
    scores = net(book.xp.ones((2, 1, 28, 28)))
    net.hybridize()
    np.testing.assert_allclose(net(book.xp.ones((2, 1, 28, 28))).asnumpy(), scores.asnumpy(), atol=1e-5)


def test_plots_hold_the_points_and_need_no_display(book):
    animator = book.Animator(legend=["a", "b"])
    animator.add(1, (0.5, None))
    animator.add(2, (0.4, 0.3))
    assert [line.get_xydata().tolist() for line in animator.axes[0].lines] == [[[1, 0.5], [2, 0.4]], [[2, 0.3]]]
    x = book.xp.arange(3)
    book.plot(x, [x, x * x], "x", "y", ["x", "square"])
    assert [line.get_ydata().tolist() for line in book.plt.gca().lines] == [[0, 1, 2], [0, 1, 4]]
    book.semilogy(range(1, 3), [1, 2], "epoch", "loss", range(1, 3), [3, 4], ["train", "test"])
    assert book.plt.gca().get_yscale() == "log"
    book.show_fashion_mnist(book.xp.zeros((2, 1, 28, 28)), book.get_fashion_mnist_labels(book.xp.array([0, 9])))
    assert [axes.get_title() for axes in book.plt.gcf().axes] == ["t-shirt", "ankle boot"]


def test_another_name_is_named_with_where_to_find_it(book):
    with pytest.raises(AttributeError, match=f"^{book.__name__}.RNNModel: gluon_mgpu does not .*pip install d2l"):
        book.RNNModel  # noqa: B018
