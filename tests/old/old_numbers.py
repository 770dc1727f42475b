"""Programs for MXNet 1.x with fixed seeds, which print numbers.

`old_numbers.py gpu|cpu` runs them; with cpu, CPU contexts take the place of GPUs.
"""

import random
import sys
import types

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

GPUS = [getattr(mx, sys.argv[1])(i) for i in range(2)]
np.random.seed(1)
mx.random.seed(1)
X, y = nd.array(np.random.rand(32, 1, 12, 12)), nd.array(np.random.randint(0, 3, 32))


def convolutions_on_two_gpus_saved_and_loaded():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, activation="relu"), nn.MaxPool2D(2), nn.BatchNorm(), nn.Dense(3))
    net.hybridize()
    net.initialize(mx.init.Xavier(), ctx=GPUS)
    trainer, loss = gluon.Trainer(net.collect_params(), "adam"), gluon.loss.SoftmaxCrossEntropyLoss()
    for _ in range(5):
        pairs = zip(gluon.utils.split_and_load(X, GPUS), gluon.utils.split_and_load(y, GPUS))
        with autograd.record():
            losses = [loss(net(a), b) for a, b in pairs]
        autograd.backward(losses)
        trainer.step(len(X))
    print([part.sum().asscalar() for part in losses])
    net.export("net")
    again = gluon.SymbolBlock.imports("net-symbol.json", ["data"], "net-0000.params", ctx=GPUS[1])
    a, b = again(X.as_in_context(GPUS[1])), net(X.as_in_context(GPUS[0]))
    print(float(abs(a.asnumpy() - b.asnumpy()).max()), a.argmax(axis=1).asnumpy())


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


def sentences_in_buckets():
    sentences = np.random.randint(1, 9, (60, 7)).tolist() + np.random.randint(1, 9, (60, 4)).tolist()
    random.seed(1)
    data = mx.rnn.BucketSentenceIter(sentences, 10, buckets=[5, 8], invalid_label=0)
    cells = mx.rnn.SequentialRNNCell()
    cells.add(mx.rnn.LSTMCell(12, prefix="one_"))
    cells.add(mx.rnn.GRUCell(12, prefix="two_"))

    def unrolled(length):
        words = mx.sym.Embedding(mx.sym.var("data"), input_dim=9, output_dim=6)
        cells.reset()
        states = mx.sym.reshape(cells.unroll(length, words, merge_outputs=True)[0], shape=(-1, 12))
        scores = mx.sym.FullyConnected(states, num_hidden=9)
        label = mx.sym.reshape(mx.sym.var("softmax_label"), shape=(-1,))
        return mx.sym.SoftmaxOutput(scores, label, name="softmax"), ("data",), ("softmax_label",)

    model, metric = mx.mod.BucketingModule(unrolled, data.default_bucket_key, context=GPUS[0]), mx.metric.Perplexity(0)
    model.fit(data, eval_metric=metric, num_epoch=2, initializer=mx.init.Xavier())
    print(metric.get())


if __name__ == "__main__":
    for name, program in list(globals().items()):
        if isinstance(program, types.FunctionType) and program.__module__ == __name__:
            print("==", name)
            program()
