"""`gluon-mgpu run` prints the numbers that the program printed in its time, in a stock environment with GPUs.

The stock environment is the one that `run` makes, with Python alone. Each program has fixed seeds.
"""

import json
import sys
import textwrap

import pytest
from runs import finished

from gluon_mgpu.old import environment
from gluon_mgpu.support import subprocesses

pytestmark = pytest.mark.slow

START = """
import warnings; warnings.simplefilter("ignore")
import collections, random
import mxnet as mx, numpy as np, pandas as pd
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
np.random.seed(1); mx.random.seed(1); random.seed(1)
"""
TRAIN = """
def train(net, X, y, loss=gluon.loss.SoftmaxCrossEntropyLoss(), ctx=[mx.gpu(0), mx.gpu(1)], steps=5, **options):
    net.initialize(mx.init.Xavier(), ctx=ctx)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01, **options})
    for step in range(steps):
        pairs = zip(gluon.utils.split_and_load(X, ctx), gluon.utils.split_and_load(y, ctx))
        with autograd.record():
            losses = [loss(net(a), b) for a, b in pairs]
        for l in losses:
            l.backward()
        trainer.step(len(X))
    total = 0.0
    for l in losses:
        total += l.sum().asscalar()
    print(total, type(total).__name__)
X, y = nd.array(np.random.rand(32, 1, 12, 12)), nd.array(np.random.randint(0, 3, 32))
"""
PROGRAMS = {
    "linear regression from scratch": """
        X = nd.random.normal(shape=(200, 2)); y = nd.dot(X, nd.array([2, -3.4])) + 4.2
        w, b = nd.random.normal(shape=(2,)), nd.zeros(1)
        for p in (w, b): p.attach_grad()
        for i in np.random.permutation(200).reshape(20, 10):
            with autograd.record():
                loss = (nd.dot(X[i], w) + b - y[i]) ** 2 / 2
            loss.backward()
            for p in (w, b): p[:] = p - 0.03 * p.grad / 10
        print(w.asnumpy(), b.asscalar(), float(loss.mean().asscalar()))
    """,
    "a convolutional network on two GPUs": """
        net = nn.HybridSequential()
        net.add(nn.Conv2D(8, 3, activation="relu"), nn.MaxPool2D(2), nn.BatchNorm(), nn.Dense(3))
        net.hybridize()
        train(net, X, y)
    """,
    "Module": """
        net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16)
        net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="relu"), num_hidden=3)
        net = mx.sym.SoftmaxOutput(net, name="softmax")
        data = mx.io.NDArrayIter(X.asnumpy().reshape(32, -1), y.asnumpy(), 8)
        module = mx.mod.Module(net, context=[mx.gpu(0), mx.gpu(1)])
        module.fit(data, num_epoch=4, optimizer_params={"learning_rate": 0.1}, initializer=mx.init.Xavier())
        print(module.score(data, ["acc", "ce"]))
    """,
    "an LSTM": """
        class Model(gluon.Block):
            def __init__(self):
                super().__init__()
                self.embed, self.lstm, self.out = nn.Embedding(20, 8), gluon.rnn.LSTM(16), nn.Dense(20, flatten=False)
            def forward(self, x):
                return self.out(self.lstm(self.embed(x).swapaxes(0, 1))).swapaxes(0, 1)
        text = nd.array(np.random.randint(0, 20, (16, 9)))
        train(Model(), text[:, :-1], text[:, 1:], ctx=[mx.gpu(0)])
    """,
    "house prices": """
        frame = pd.read_csv(io.StringIO("area,kind,alley,price\\n" + "".join(
            "%d,%s,%s,%d\\n" % (a, "abc"[a % 3], ["NA", "None", "Pave"][a % 3], 3 * a) for a in range(1, 41))))
        features = frame.iloc[:, :-1]
        numeric = features.dtypes[features.dtypes != "object"].index
        features[numeric] = features[numeric].apply(lambda x: (x - x.mean()) / x.std())
        features = pd.get_dummies(features, dummy_na=True)
        print(features.shape, list(features.columns), features.values.dtype)
        net = nn.Sequential(); net.add(nn.Dense(1))
        y = nd.array(frame.price.values).reshape((-1, 1))
        train(net, nd.array(features.values), y, gluon.loss.L2Loss(), wd=0.1)
    """,
    "a custom operator": """
        class Square(mx.operator.CustomOp):
            def forward(self, is_train, req, in_data, out_data, aux):
                self.assign(out_data[0], req[0], in_data[0] ** 2)
            def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
                self.assign(in_grad[0], req[0], 2 * in_data[0] * out_grad[0])
        @mx.operator.register("square_it")
        class Prop(mx.operator.CustomOpProp):
            def create_operator(self, ctx, shapes, dtypes):
                return Square()
        x = nd.random.uniform(shape=(3, 3), ctx=mx.gpu(0)); x.attach_grad()
        with autograd.record():
            y = nd.Custom(x, op_type="square_it").sum()
        y.backward()
        print(y.asscalar(), x.grad.asnumpy())
    """,
    "word vectors": """
        words = [random.choice("abcdefgh") * 2 for _ in range(400)]
        counts = collections.Counter(words)
        index = {w: i for i, (w, _) in enumerate(counts.most_common())}
        pairs = nd.array([[index[a], index[b]] for a, b in zip(words, words[1:])])
        labels = nd.array(np.random.randint(0, 2, len(pairs)))
        class Skip(gluon.Block):
            def __init__(self):
                super().__init__(); self.a, self.b = nn.Embedding(8, 4), nn.Embedding(8, 4)
            def forward(self, x):
                return (self.a(x[:, 0]) * self.b(x[:, 1])).sum(axis=1)
        train(Skip(), pairs[:398], labels[:398], gluon.loss.SigmoidBCELoss())
        print(pd.Series(words).value_counts().head(3).to_dict())
    """,
    "a generative adversarial network": """
        G, D = nn.Dense(2, in_units=2), nn.Sequential()
        D.add(nn.Dense(5, activation="tanh"), nn.Dense(1))
        for net in (G, D): net.initialize(mx.init.Normal(0.02), ctx=mx.gpu(0))
        trainers = [gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.05}) for net in (D, G)]
        bce, data = gluon.loss.SigmoidBCELoss(), nd.random.normal(shape=(32, 2), ctx=mx.gpu(0)) + 2
        for step in range(10):
            for trainer, label in zip(trainers, (0, 1)):
                fake = G(nd.random.normal(shape=(32, 2), ctx=mx.gpu(0)))
                with autograd.record():
                    if label == 0:
                        loss = bce(D(data), nd.ones(32, mx.gpu(0))) + bce(D(fake), nd.zeros(32, mx.gpu(0)))
                    else:
                        loss = bce(D(G(data)), nd.ones(32, mx.gpu(0)))
                loss.backward(); trainer.step(32)
                print("%.6f" % loss.mean().asscalar())
    """,
    "a trained network that is saved and loaded": """
        net = nn.HybridSequential(); net.add(nn.Conv2D(4, 3), nn.GlobalAvgPool2D(), nn.Dense(3)); net.hybridize()
        train(net, X, y)
        net.export("net")
        again = gluon.SymbolBlock.imports("net-symbol.json", ["data"], "net-0000.params", ctx=mx.gpu(1))
        a, b = again(X.as_in_context(mx.gpu(1))), net(X.as_in_context(mx.gpu(0)))
        print(float(abs(a.asnumpy() - b.asnumpy()).max()), again(X.as_in_context(mx.gpu(1))).argmax(axis=1).asnumpy())
    """,
    "images and transforms": """
        from mxnet.gluon.data.vision import transforms
        images = [nd.array(np.random.randint(0, 255, (20, 24, 3)), dtype="uint8") for _ in range(8)]
        change = transforms.Compose([transforms.Resize(16), transforms.CenterCrop(12), transforms.ToTensor(),
                                     transforms.Normalize(0.5, 0.2)])
        data = gluon.data.SimpleDataset([(change(image), i) for i, image in enumerate(images)])
        for X, y in gluon.data.DataLoader(data, 4, num_workers=2):
            print(X.shape, X.sum().asscalar(), y.asnumpy())
    """,
    "a schedule, a metric and a sparse gradient": """
        schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
        net = nn.Embedding(50, 4, sparse_grad=True); net.initialize(mx.init.Xavier(), ctx=mx.gpu(0))
        trainer = gluon.Trainer(net.collect_params(), "adagrad", {"lr_scheduler": schedule})
        metric = mx.metric.Loss()
        for step in range(6):
            with autograd.record():
                loss = net(nd.array(np.random.randint(0, 50, 9), ctx=mx.gpu(0))) ** 2
            loss.backward(); trainer.step(9); metric.update(None, [loss])
            print(trainer.learning_rate, metric.get())
    """,
    "a symbolic recurrent network": """
        cell = mx.rnn.SequentialRNNCell()
        cell.add(mx.rnn.LSTMCell(8, prefix="a_")); cell.add(mx.rnn.GRUCell(6, prefix="b_"))
        outputs, _ = cell.unroll(4, mx.sym.var("data"), merge_outputs=True)
        executor = outputs.simple_bind(mx.gpu(0), data=(2, 4, 5))
        for name, a in sorted(executor.arg_dict.items()):
            a[:] = nd.array(np.random.uniform(-1, 1, a.shape))
        print(executor.forward()[0].asnumpy())
    """,
    "what current packages compute differently without an error": """
        days = pd.to_datetime(["2020-01-01", "2020-01-03", "2021-01-01"])
        frame = pd.DataFrame({"a": [3.0, None, 1.0], "b": ["x", "None", "z"], "t": days})
        frame["a"].fillna(0, inplace=True); print(frame["a"].tolist())
        try:
            frame["a"].sort_values(inplace=True); print(frame["a"].tolist())
        except ValueError as error:
            print(error)
        print(pd.read_csv(io.StringIO("x\\nNone\\nNA\\n"))["x"].tolist())
        print(type(0.0 + np.float32(0.1)), 0.0 + nd.array([0.1]).asscalar())
        print(frame["t"].astype("int64").tolist(), (frame["t"] - frame["t"][0]).astype("timedelta64[D]").tolist())
        print(np.argsort([1, 0, 1, 0] * 8).tolist(), pd.Series(list("cabbca")).value_counts().to_dict())
        print(frame["b"].replace({"x": 1, "None": 2, "z": 3}).dtype, frame["b"].dtype, frame.values.flags.writeable)
        print(np.linalg.lstsq(np.vander([1.0, 2, 3], 3) * [1, 1, 1e-15], np.ones(3))[2])
        print(np.unique(np.array([[1, 2], [2, 1]]), return_inverse=True)[1].shape)
        print(np.uint8(200) + np.uint8(100), np.uint8(200) + 100)
        print(np.array([1, 2], dtype=np.float) / np.int(2), repr(np.float32(2)), frame["a"].append(frame["a"]).sum())
    """,
}
AS_CPU = "mx.gpu = mx.cpu\n"  # stock, without GPUs
RUN_ALL = """
import contextlib, io, json, sys, traceback
for name, text in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            exec(text, {"__name__": "__main__", "io": io})
        except Exception:
            traceback.print_exc(file=output)
    print(json.dumps([name, output.getvalue()]))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each program printed: ({name: text} with `run`, {name: text} with stock)."""
    folder, found = tmp_path_factory.mktemp("programs"), []
    (folder / "all.py").write_text(RUN_ALL)
    python = environment.find_or_make(environment.Wanted(cpu=True))
    for words, as_cpu in (["-m", "gluon_mgpu", "run", "--cpu"], ""), ([], AS_CPU):
        texts = {name: START + as_cpu + TRAIN + textwrap.dedent(text) for name, text in PROGRAMS.items()}
        env = {**subprocesses.users_environment(), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        first = [sys.executable, *words] if words else [python]
        run = finished(*first, "all.py", input=json.dumps(texts), cwd=folder, env=env, timeout=900)
        assert run.returncode == 0, run.stderr
        found.append(dict(map(json.loads, run.stdout.splitlines())))
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_numbers_are_those_of_stock(name, printed):
    ours, stock = (texts[name] for texts in printed)
    assert ours == stock and "Traceback" not in stock
