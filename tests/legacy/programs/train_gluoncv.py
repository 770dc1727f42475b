# pip install gluoncv==0.10.5.post0 yacs portalocker opencv-python-headless scipy
import mxnet as mx
from gluoncv.model_zoo import get_model
from gluoncv.utils import split_and_load
from mxnet import autograd, gluon

ctx = [mx.gpu(0), mx.gpu(1)]
net = get_model("cifar_resnet20_v1", classes=10)
net.initialize(mx.init.Xavier(), ctx=ctx)
net.hybridize()
trainer = gluon.Trainer(net.collect_params(), "nag", {"learning_rate": 0.1, "momentum": 0.9})
loss = gluon.loss.SoftmaxCrossEntropyLoss()
X, y = mx.nd.random.uniform(shape=(16, 3, 32, 32)), mx.nd.arange(16) % 10
for _ in range(5):
    with autograd.record():
        losses = [loss(net(a), b) for a, b in zip(split_and_load(X, ctx), split_and_load(y, ctx))]
    autograd.backward(losses)
    trainer.step(16)
    print(sum(value.mean().asscalar() for value in losses) / 2)
