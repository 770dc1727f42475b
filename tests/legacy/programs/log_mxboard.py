# pip install mxboard==0.1.0 protobuf<3.21 six
import tempfile

import mxnet as mx
from mxboard import SummaryWriter

net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Dense(4, activation="relu"), mx.gluon.nn.Dense(2))
net.initialize(ctx=mx.gpu(0))
net.hybridize()
scores = net(mx.nd.ones((3, 5), mx.gpu(0)))
with SummaryWriter(tempfile.mkdtemp()) as writer:
    writer.add_scalar("mean", scores.mean().asscalar(), 0)
    writer.add_histogram("scores", scores, 0, bins=10)
    writer.add_image("image", mx.nd.random.uniform(shape=(3, 28, 28)), 0)
    writer.add_graph(net)
    print(writer.get_logdir())
