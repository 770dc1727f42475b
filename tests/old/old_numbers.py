"""Programs for MXNet 1.x with fixed seeds, which print numbers.

`old_numbers.py gpu|cpu` runs them; with cpu, CPU contexts take the place of GPUs.
"""

import collections
import contextlib
import io
import random
import sys
import types
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
random.seed(1)
X, y = nd.array(np.random.rand(32, 1, 12, 12)), nd.array(np.random.randint(0, 3, 32))


def train(net, X=X, y=y, ctx=GPUS, loss=None, **options):
    loss = loss or gluon.loss.SoftmaxCrossEntropyLoss()
    net.initialize(mx.init.Xavier(), ctx=ctx)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01, **options})
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


def linear_regression_from_scratch():
    X = nd.random.normal(shape=(200, 2))
    y = nd.dot(X, nd.array([2, -3.4])) + 4.2
    w, b = nd.random.normal(shape=(2,)), nd.zeros(1)
    for p in (w, b):
        p.attach_grad()
    for i in np.random.permutation(200).reshape(20, 10):
        with autograd.record():
            loss = (nd.dot(X[i], w) + b - y[i]) ** 2 / 2
        loss.backward()
        for p in (w, b):
            p[:] = p - 0.03 * p.grad / 10
    print(w.asnumpy(), b.asscalar(), float(loss.mean().asscalar()))


def lstm():
    text, net = nd.array(np.random.randint(0, 20, (16, 9))), nn.Sequential()
    net.add(nn.Embedding(20, 8), gluon.rnn.LSTM(16, layout="NTC"), nn.Dense(20, flatten=False))
    train(net, text[:, :-1], text[:, 1:], GPUS[:1])


def house_prices():
    alley = ["NA", "None", "Pave"]
    rows = "".join(f"{a},{'abc'[a % 3]},{alley[a % 3]},{3 * a}\n" for a in range(1, 41))
    frame = pd.read_csv(io.StringIO(f"area,kind,alley,price\n{rows}"))
    features = frame.iloc[:, :-1]
    numeric = features.dtypes[features.dtypes != "object"].index
    features[numeric] = features[numeric].apply(lambda x: (x - x.mean()) / x.std())
    features = pd.get_dummies(features, dummy_na=True)
    print(features.shape, list(features.columns), features.values.dtype)
    prices = nd.array(frame.price.values).reshape((-1, 1))
    train(nn.Dense(1), nd.array(features.values), prices, loss=gluon.loss.L2Loss(), wd=0.1)


class Square(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] ** 2)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], 2 * in_data[0] * out_grad[0])


@mx.operator.register("square_it")
class SquareProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Square()


def custom_operator():
    x = nd.random.uniform(shape=(3, 3), ctx=GPUS[0])
    x.attach_grad()
    with autograd.record():
        total = nd.Custom(x, op_type="square_it").sum()
    total.backward()
    print(total.asscalar(), x.grad.asnumpy())


def word_vectors():
    words = [random.choice("abcdefgh") * 2 for _ in range(400)]
    index = {word: i for i, (word, _) in enumerate(collections.Counter(words).most_common())}
    pairs, net = nd.array([[index[a], index[b]] for a, b in zip(words, words[1:])])[:398], nn.Sequential()
    net.add(nn.Embedding(8, 4), nn.Dense(1))
    train(net, pairs, nd.array(np.random.randint(0, 2, 398)), loss=gluon.loss.SigmoidBCELoss())
    print(pd.Series(words).value_counts().head(3).to_dict())


def fine_tuning_with_another_learning_rate_and_decay_for_each_layer():
    net = nn.HybridSequential()
    net.add(nn.Dense(8, activation="tanh"), nn.Dense(3))
    net[0].collect_params().setattr("lr_mult", 0.1)
    net[1].collect_params().setattr("wd_mult", 0.0)
    train(net, wd=0.1)


def schedule_metric_and_sparse_gradient():
    schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
    net = nn.Embedding(50, 4, sparse_grad=True)
    net.initialize(mx.init.Xavier(), ctx=GPUS[0])
    trainer = gluon.Trainer(net.collect_params(), "adagrad", {"lr_scheduler": schedule})
    metric = mx.metric.Loss()
    for _ in range(6):
        with autograd.record():
            loss = net(nd.array(np.random.randint(0, 50, 9), ctx=GPUS[0])) ** 2
        loss.backward()
        trainer.step(9)
        metric.update(None, [loss])
        print(trainer.learning_rate, metric.get())


def symbolic_recurrent_network():
    cell = mx.rnn.SequentialRNNCell()
    cell.add(mx.rnn.LSTMCell(8, prefix="a_"))
    cell.add(mx.rnn.GRUCell(6, prefix="b_"))
    outputs, _ = cell.unroll(4, mx.sym.var("data"), merge_outputs=True)
    executor = outputs.simple_bind(GPUS[0], data=(2, 4, 5))
    for _, array in sorted(executor.arg_dict.items()):
        array[:] = nd.array(np.random.uniform(-1, 1, array.shape))
    print(executor.forward()[0].asnumpy())


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
    print(pd.read_csv(io.StringIO("x\nNone\nNA\n"))["x"].tolist(), frame["t"].astype("int64").tolist())
    print(frame["b"].replace({"x": 1, "None": 2, "z": 3}).dtype, frame["b"].dtype, frame.values.flags.writeable)
    print(np.linalg.lstsq(np.vander([1.0, 2, 3], 3) * [1, 1, 1e-15], np.ones(3))[2])
    with contextlib.suppress(ValueError):
        frame["a"].sort_values(inplace=True)
    print(frame["a"].tolist(), 0.0 + nd.array([0.1]).asscalar())


if __name__ == "__main__":
    for name, program in list(globals().items()):
        if isinstance(program, types.FunctionType) and program.__module__ == __name__ and name != "train":
            print("==", name)
            program()
