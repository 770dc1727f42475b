"""The functions that the MXNet chapters of "Dive into Deep Learning" import from the book's package.

If the book's own package is not installed, `names` provides this module under the package's name: gluonbook or d2lzh,
which date from 2018 and use mxnet.nd, or d2l, whose later versions use mxnet.np. The functions accept both kinds of
arrays. `figures` provides timers, sums and plots.
"""
# mypy: allow-untyped-defs

import itertools
import os
import random
from functools import partial

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.data import ArrayDataset, DataLoader
from mxnet.gluon.data.dataloader import default_batchify_fn
from mxnet.gluon.data.vision import FashionMNIST, transforms

from gluon_mgpu.legacy.figures import *  # noqa: F403  # programs import these names from here
from gluon_mgpu.legacy.figures import IN_NOTEBOOK, Accumulator, Animator, Timer, to_numpy

OF_2018 = __name__ in ("gluonbook", "d2lzh")
FASHION_MNIST = os.path.join("~", ".mxnet", "datasets", "fashion-mnist")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(
        f"{__name__}.{name}: gluon_mgpu does not provide this name; the package d2l may provide it: `pip install d2l`"
    )


def _arrays():
    """Returns mxnet.np if npx.set_np() was called, else mxnet.nd."""
    return mx.np if mx.util.is_np_array() else mx.nd


class Benchmark:
    def __init__(self, prefix=None):
        name_of_2018 = f"{prefix} time" if prefix else "time"
        self.name = name_of_2018 if OF_2018 else prefix or "Done"

    def __enter__(self):
        self.timer = Timer()

    def __exit__(self, *_):
        print(f"{self.name}: {self.timer.stop():.4f} sec")


def try_gpu(i=0):
    return mx.gpu(i) if i < mx.context.num_gpus() else mx.cpu()


def try_all_gpus():
    return [mx.gpu(i) for i in range(mx.context.num_gpus())] or [mx.cpu()]


def split_batch(X, y, devices):
    """Split a batch into shards. Returns two lists: the shards of X, and the shards of y.

    devices: a list of devices, one device, or None to leave the batch where it is.
    """
    if devices is None:
        return [X], [y]
    contexts = devices if isinstance(devices, (list, tuple)) else [devices]
    split = partial(gluon.utils.split_and_load, ctx_list=contexts, even_split=False)
    return split(X), split(y)


def split_batch_multi_inputs(X, y, devices):
    Xs, ys = zip(*(split_batch(features, y, devices) for features in X))
    return list(zip(*Xs)), ys[0]


def load_data_fashion_mnist(batch_size, resize=None, root=FASHION_MNIST):
    """Returns loaders for training and testing. A batch is images (n, 1, 28, 28) in [0, 1] and int32 labels (n,)."""
    transform = transforms.Compose([*([transforms.Resize(resize)] if resize else []), transforms.ToTensor()])

    def batchify(samples):
        images, labels = default_batchify_fn(samples)
        return transform(images), labels

    def load(train):
        data = ArrayDataset(*map(to_numpy, FashionMNIST(root, train)[:]))
        # Transforming whole batches is faster than using worker processes, which take cores from training.
        return DataLoader(data, batch_size, shuffle=train, batchify_fn=batchify)

    return load(train=True), load(train=False)


def get_dataloader_workers():
    return max(0, min(4, (os.cpu_count() or 1) - 2))  # on 2 cores, workers only delay training


def load_array(data_arrays, batch_size, is_train=True):
    return DataLoader(ArrayDataset(*data_arrays), batch_size, shuffle=is_train)


def data_iter(batch_size, features, labels):
    order = random.sample(range(len(features)), len(features))
    for start in range(0, len(order), batch_size):
        indices = _arrays().array(order[start : start + batch_size], dtype="int32")
        yield features.take(indices, axis=0), labels.take(indices, axis=0)


def synthetic_data(w, b, num_examples):
    """Returns X (num_examples, len(w)) and y (num_examples, 1), where y = Xw + b + noise."""
    normal = _arrays().random.normal
    X = normal(0, 1, (num_examples, len(w)))
    y = linreg(X, w, b).reshape((-1, 1))
    return X, y + normal(0, 0.01, y.shape)


def linreg(X, w, b):
    return _arrays().dot(X, w) + b


def squared_loss(y_hat, y):
    return (y_hat - y.reshape(y_hat.shape)) ** 2 / 2


def sgd(params, lr, batch_size):
    for param in params:
        param[:] = param - lr * param.grad / batch_size


def corr2d(X, K):
    h, w = K.shape
    Y = _arrays().zeros((X.shape[0] - h + 1, X.shape[1] - w + 1))
    for i, j in itertools.product(*map(range, Y.shape)):
        Y[i, j] = (X[i : i + h, j : j + w] * K).sum()
    return Y


class Residual(nn.HybridBlock):
    def __init__(self, num_channels, use_1x1conv=False, strides=1, **kwargs):
        super().__init__(**kwargs)
        self.conv1 = nn.Conv2D(num_channels, kernel_size=3, padding=1, strides=strides)
        self.conv2 = nn.Conv2D(num_channels, kernel_size=3, padding=1)
        self.conv3 = nn.Conv2D(num_channels, kernel_size=1, strides=strides) if use_1x1conv else None
        self.bn1, self.bn2 = nn.BatchNorm(), nn.BatchNorm()

    def hybrid_forward(self, F, X):
        relu = F.npx.relu if mx.util.is_np_array() else F.relu
        Y = self.bn2(self.conv2(relu(self.bn1(self.conv1(X)))))
        return relu(Y + (self.conv3(X) if self.conv3 else X))


def resnet18(num_classes):
    """ResNet-18 for small images, with its layers nested as in the book's parameter files."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(64, kernel_size=3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    for channels in (64, 128, 256, 512):
        stage, smaller = nn.HybridSequential(), channels > 64
        stage.add(Residual(channels, smaller, 1 + smaller), Residual(channels))
        net.add(stage)
    net.add(nn.GlobalAvgPool2D(), nn.Dense(num_classes))
    return net


def accuracy(y_hat, y):
    """Returns the number of correct predictions or, if OF_2018, the fraction of predictions that are correct.

    y_hat: scores (n, classes, ...) or classes (n, ...).
    """
    return _correct(y_hat, y) / (y.size if OF_2018 else 1)


def _correct(y_hat, y):
    if y_hat.ndim > 1 and y_hat.shape[1] > 1:
        y_hat = y_hat.argmax(axis=1)
    return _total((y_hat.astype(y.dtype) == y).astype("float32"))


def _total(array):
    return array.sum().asnumpy().item()


def _batches(data):
    if isinstance(data, mx.io.DataIter):
        data.reset()
        return ((batch.data[0], batch.label[0]) for batch in data)
    return data


def evaluate_accuracy(data_iter, net, ctx=None, split_f=split_batch):
    """Returns the fraction of correct predictions. In d2l, net is the first argument.

    ctx: the devices to compute on; default: the devices of net, if net is a Block.
    """
    if callable(data_iter):
        data_iter, net = net, data_iter
    if ctx is None and isinstance(net, gluon.Block):
        ctx = next(iter(net.collect_params().values())).list_ctx()
    metric = Accumulator(2)  # correct predictions, all predictions
    for X, y in _batches(data_iter):
        Xs, ys = split_f(X, y, ctx)
        y_hats = [net(X) for X in Xs]  # start work on all devices before reading a result
        metric.add(sum(map(_correct, y_hats, ys)), y.size)
    return metric[0] / metric[1]


evaluate_accuracy_gpu = evaluate_accuracy


def evaluate_accuracy_gpus(net, data_iter, split_f=split_batch):
    return evaluate_accuracy(data_iter, net, split_f=split_f)


def evaluate_loss(net, data_iter, loss):
    metric = Accumulator(2)  # sum and number of losses
    for X, y in _batches(data_iter):
        losses = loss(net(X), y)
        metric.add(_total(losses), losses.size)
    return metric[0] / metric[1]


def train_batch_ch13(net, features, labels, loss, trainer, devices, split_f=split_batch):
    """Train on one batch. Returns the sum of the losses and the number of correct predictions.

    trainer: see train_epoch_ch3's updater.
    """
    Xs, ys = split_f(features, labels, devices)
    with autograd.record():
        y_hats = [net(X) for X in Xs]
        losses = [loss(y_hat, y) for y_hat, y in zip(y_hats, ys)]
    autograd.backward(losses)
    update = partial(trainer.step, ignore_stale_grad=True) if isinstance(trainer, gluon.Trainer) else trainer
    update(labels.shape[0])
    return sum(map(_total, losses)), sum(map(_correct, y_hats, ys))


def _train_epoch(net, train_iter, loss, trainer, devices, split_f):
    """Train for one epoch. Returns the mean loss, the accuracy and the number of examples."""
    metric = Accumulator(4)  # losses, correct predictions, examples, all predictions
    for X, y in _batches(train_iter):
        metric.add(*train_batch_ch13(net, X, y, loss, trainer, devices, split_f), y.shape[0], y.size)
    return metric[0] / metric[2], metric[1] / metric[3], metric[2]


def train_epoch_ch3(net, train_iter, loss, updater):
    """Train for one epoch. Returns the mean loss and the accuracy.

    updater: a Trainer, or a function that takes the batch size.
    """
    return _train_epoch(net, train_iter, loss, updater, None, split_batch)[:2]


def _train(net, train_iter, test_iter, loss, trainer, num_epochs, devices, split_f=split_batch):
    """Train and print one line per epoch. In a notebook that uses d2l, update a plot instead."""
    animator, timer = None, Timer()
    if IN_NOTEBOOK and not OF_2018:
        animator = Animator("epoch", legend=["train loss", "train acc", "test acc"], xlim=[1, num_epochs])
    for epoch in range(1, num_epochs + 1):
        timer.start()
        mean_loss, train_acc, examples = _train_epoch(net, train_iter, loss, trainer, devices, split_f)
        seconds = timer.stop()
        test_acc = evaluate_accuracy(test_iter, net, devices, split_f)
        scores = f"loss {mean_loss:.4f}, train acc {train_acc:.3f}, test acc {test_acc:.3f}"
        if animator:
            animator.add(epoch, (mean_loss, train_acc, test_acc))
        else:
            print(f"epoch {epoch}, {scores}, time {seconds:.1f} sec", flush=True)
    if not OF_2018:
        print(f"{scores}\n{examples * num_epochs / timer.sum():.1f} examples/sec on {devices or mx.cpu()}")


def train_ch3(net, train_iter, test_iter, loss, num_epochs, batch_size, params=None, lr=None, trainer=None):
    """Train a network. In d2l, the sixth argument is a Trainer or a function instead of batch_size."""
    updater = trainer or (partial(sgd, params, lr) if params else batch_size)
    _train(net, train_iter, test_iter, loss, updater, num_epochs, devices=None)


def train_ch5(net, train_iter, test_iter, batch_size, trainer, ctx=None, num_epochs=None):
    """Train a network. In d2l 0.7, the arguments are the same as for train_ch6."""
    if isinstance(trainer, gluon.Trainer):
        train(train_iter, test_iter, net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, ctx, num_epochs)
    else:
        train_ch6(net, train_iter, test_iter, batch_size, trainer, ctx)


def train_ch6(net, train_iter, test_iter, num_epochs, lr, device=None):
    device = device or try_gpu()
    net.initialize(mx.init.Xavier(), ctx=device, force_reinit=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr})
    train(train_iter, test_iter, net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, device, num_epochs)


def train_ch13(net, train_iter, test_iter, loss, trainer, num_epochs, devices=None, split_f=split_batch):
    _train(net, train_iter, test_iter, loss, trainer, num_epochs, devices or try_all_gpus(), split_f)


def train(train_iter, test_iter, net, loss, trainer, ctx, num_epochs):
    print("training on", ctx)
    _train(net, train_iter, test_iter, loss, trainer, num_epochs, ctx)
