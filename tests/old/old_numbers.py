"""Programs for MXNet 1.x with fixed seeds, which print numbers.

`old_numbers.py gpu|cpu PROGRAM...` prints {program: what it printed}; with cpu, CPU contexts take the place of GPUs.
"""

import contextlib
import io
import json
import sys
import warnings

warnings.simplefilter("ignore")
import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402
from mxnet.gluon import nn  # noqa: E402

GPUS = [getattr(mx, sys.argv[1])(i) for i in range(2)]
np.random.seed(1)
mx.random.seed(1)
X, y = nd.array(np.random.rand(32, 1, 12, 12)), nd.array(np.random.randint(0, 3, 32))


def train(net, X=X, y=y, ctx=GPUS):
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    net.initialize(mx.init.Xavier(), ctx=ctx)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    for _ in range(5):
        pairs = zip(gluon.utils.split_and_load(X, ctx), gluon.utils.split_and_load(y, ctx))
        with autograd.record():
            losses = [loss(net(a), b) for a, b in pairs]
        autograd.backward(losses)
        trainer.step(len(X))
    total = 0.0
    for part in losses:
        total += part.sum().asscalar()
    print(total, type(total).__name__)


def convolutions_on_two_gpus_saved_and_loaded():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, activation="relu"), nn.MaxPool2D(2), nn.BatchNorm(), nn.Dense(3))
    net.hybridize()
    train(net)
    net.export("net")
    again = gluon.SymbolBlock.imports("net-symbol.json", ["data"], "net-0000.params", ctx=GPUS[1])
    a, b = again(X.as_in_context(GPUS[1])), net(X.as_in_context(GPUS[0]))
    print(float(abs(a.asnumpy() - b.asnumpy()).max()), a.argmax(axis=1).asnumpy())


def module():
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16)
    net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="relu"), num_hidden=3)
    data = mx.io.NDArrayIter(X.asnumpy().reshape(32, -1), y.asnumpy(), 8)
    trained = mx.mod.Module(mx.sym.SoftmaxOutput(net, name="softmax"), context=GPUS)
    trained.fit(data, num_epoch=4, optimizer_params={"learning_rate": 0.1}, initializer=mx.init.Xavier())
    print(trained.score(data, ["acc", "ce"]))


def images_transforms_and_processes_that_load_them():
    change = gluon.data.vision.transforms
    change = change.Compose([change.Resize(16), change.CenterCrop(12), change.ToTensor(), change.Normalize(0.5, 0.2)])
    images = [nd.array(np.random.randint(0, 255, (20, 24, 3)), dtype="uint8") for _ in range(8)]
    data = gluon.data.SimpleDataset([(change(image), i) for i, image in enumerate(images)])
    for a, labels in gluon.data.DataLoader(data, 4, num_workers=2):
        print(a.shape, a.sum().asscalar(), labels.asnumpy())


def what_current_packages_compute_differently_without_an_error():
    frame = pd.read_csv(io.StringIO("a,b,t\n3,x,2020-01-01\nNA,None,2020-01-03\n1,z,2021-01-01\n"), parse_dates=["t"])
    frame["a"].fillna(0, inplace=True)
    print(frame, (frame["t"] - frame["t"][0]).astype("timedelta64[D]").tolist())
    print(pd.get_dummies(frame[["b"]], dummy_na=True).values.dtype, frame["a"].append(frame["a"]).sum())
    print(type(0.0 + np.float32(0.1)), repr(np.float32(2)), np.uint8(200) + np.uint8(100), np.uint8(200) + 100)
    print(np.argsort([1, 0, 1, 0] * 8).tolist(), pd.Series(list("cabbca")).value_counts().to_dict())
    print(np.unique(np.array([[1, 2], [2, 1]]), return_inverse=True)[1].shape, np.float(2) / np.int(2))


if __name__ == "__main__":
    printed = {}
    for name in sys.argv[2:]:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            globals()[name]()
        printed[name] = output.getvalue()
    print(json.dumps(printed))
