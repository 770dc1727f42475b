# pip install d2lzh==1.0.0
import d2lzh
import mxnet as mx
from mxnet import gluon, init, nd

ctx = [mx.gpu(0), mx.gpu(1)]
net = d2lzh.resnet18(10)
net.initialize(init.Normal(sigma=0.01), ctx=ctx)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
data = gluon.data.ArrayDataset(nd.random.uniform(shape=(16, 1, 28, 28)), nd.arange(16) % 10)
batches = gluon.data.DataLoader(data, 8)
d2lzh.train(batches, batches, net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, ctx, 2)
