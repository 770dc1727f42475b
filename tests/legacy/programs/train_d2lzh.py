# pip install d2lzh==1.0.0
# pip install gluonbook==0.8.10
import importlib
import sys

import mxnet as mx
from mxnet import gluon, init, nd

book = importlib.import_module(sys.argv[1])
ctx = [mx.gpu(0), mx.gpu(1)]
net = book.resnet18(10)
net.initialize(init.Normal(sigma=0.01), ctx=ctx)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
data = gluon.data.ArrayDataset(nd.random.uniform(shape=(16, 1, 28, 28)), nd.arange(16) % 10)
batches = gluon.data.DataLoader(data, 8)
book.train(batches, batches, net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, ctx, 2)
