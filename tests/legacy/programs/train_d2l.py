# pip install d2l==0.17.6 pandas<3 pytz tzdata
# pip install d2l==0.11.4 pandas<3 pytz tzdata
import d2l
from mxnet import gluon, init, np, npx

if not hasattr(d2l, "resnet18"):
    from d2l import mxnet as d2l  # as the later editions do
npx.set_np()
net = d2l.resnet18(10)
devices = [npx.gpu(0), npx.gpu(1)]
net.initialize(init.Normal(sigma=0.01), ctx=devices)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
batches = d2l.load_array((np.random.uniform(size=(40, 1, 28, 28)), np.arange(40) % 10), 8)
d2l.train_ch13(net, batches, batches, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, 2, devices)
