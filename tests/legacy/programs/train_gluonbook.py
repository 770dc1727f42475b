# pip install gluonbook==0.8.10
import gluonbook as gb
import mxnet as mx
from mxnet import gluon, init, nd

ctx = [mx.gpu(0), mx.gpu(1)]
net = gb.resnet18(10)
net.initialize(init.Normal(sigma=0.01), ctx=ctx)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
data = gluon.data.ArrayDataset(nd.random.uniform(shape=(16, 1, 28, 28)), nd.arange(16) % 10)
batches = gluon.data.DataLoader(data, 8)
gb.train(batches, batches, net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, ctx, 2)
