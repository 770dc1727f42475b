"""LeNet on several devices from NDArray alone: every step of data parallelism is a function here.

Copy the parameters to each device, split a batch, forward and backward on each, sum the gradients, update, evaluate.
`highlevel` is the same step with Gluon, function for function. Source: the notebook "Multi-GPU Computation with Data
Parallelism" (Dive into Deep Learning, 2019).
"""

from gluon_mgpu import engine

engine.configure()

from mxnet import autograd, nd  # noqa: E402

from gluon_mgpu import checkpoint, devices, loop  # noqa: E402


def init_params(scale=0.01):
    """LeNet's eight parameters on the host: weights normal(0, scale), biases zero. Dense weights are (outputs, inputs),
    as Gluon keeps them, where the notebook has (inputs, outputs)."""
    shapes = [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]
    params = []
    for shape in shapes:
        params += [nd.random.normal(scale=scale, shape=shape), nd.zeros(shape[0])]
    return params


def lenet(X, params):
    """LeNet with average pooling: images (n, 1, 28, 28) in [0, 1] to scores (n, 10)."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    # nd.Activation is oneDNN's ReLU, and faster than nd.relu: docs/engine.md.
    h1_conv = nd.Convolution(data=X, weight=W1, bias=b1, kernel=(3, 3), num_filter=20)  # (n, 20, 26, 26)
    h1_activation = nd.Activation(h1_conv, act_type="relu")
    h1 = nd.Pooling(data=h1_activation, pool_type="avg", kernel=(2, 2), stride=(2, 2))  # (n, 20, 13, 13)
    h2_conv = nd.Convolution(data=h1, weight=W2, bias=b2, kernel=(5, 5), num_filter=50)  # (n, 50, 9, 9)
    h2_activation = nd.Activation(h2_conv, act_type="relu")
    h2 = nd.Pooling(data=h2_activation, pool_type="avg", kernel=(2, 2), stride=(2, 2))  # (n, 50, 4, 4)
    h3_linear = nd.FullyConnected(nd.flatten(h2), W3, b3, num_hidden=128)  # (n, 800) -> (n, 128)
    h3 = nd.Activation(h3_linear, act_type="relu")
    return nd.FullyConnected(h3, W4, b4, num_hidden=10)  # (n, 10)


def loss(y_hat, y):
    """Softmax cross-entropy of each example: scores (n, 10) and labels (n,) to losses (n,)."""
    return -nd.pick(nd.log_softmax(y_hat), y)


def get_params(params, ctx):
    """A replica of the parameters on one device, each with a gradient to be filled by backward."""
    new_params = [p.copyto(ctx) for p in params]
    for p in new_params:
        p.attach_grad()
    return new_params


def allreduce(data):
    """Sum arrays of one shape, one a device, in place: afterwards every device holds the sum."""
    for i in range(1, len(data)):
        data[0] += data[i].copyto(data[0].context)
    for i in range(1, len(data)):
        data[0].copyto(data[i])


def split_and_load(data, ctx):
    """Split a batch along its first axis into shards, as even as can be, one on each device.

    A batch of fewer examples than devices makes one shard an example: the last devices get none.
    """
    size, extra = divmod(data.shape[0], len(ctx))
    shards, start = [], 0
    for i, c in enumerate(ctx[: data.shape[0]]):
        end = start + size + (i < extra)
        shards.append(data[start:end].as_in_context(c))
        start = end
    return shards


def sgd(params, lr, batch_size):
    """One step of gradient descent on one device: p -= lr / batch_size * gradient, where gradients are sums."""
    for p in params:
        nd.sgd_update(p, p.grad, lr=lr, rescale_grad=1 / batch_size, wd=0, out=p)


def train_batch(X, y, device_params, ctx, lr):
    """One step on a global batch: X (n, 1, 28, 28), y (n,), device_params a replica a device.

    Returns the losses of each shard, still being computed: nothing here waits for the engine.
    """
    Xs, ys = split_and_load(X, ctx), split_and_load(y, ctx)
    with autograd.record():  # the loss is computed separately on each device
        losses = [loss(lenet(X_shard, params), y_shard) for X_shard, y_shard, params in zip(Xs, ys, device_params)]
    for shard_loss in losses:  # backpropagation runs separately on each device
        shard_loss.backward()
    for params in device_params[len(Xs) :]:  # a device without an example adds nothing to the sum
        for p in params:
            p.grad[:] = 0
    for grads in zip(*([p.grad for p in params] for params in device_params)):
        allreduce(list(grads))
    for params in device_params:  # the same update on each device keeps the replicas equal
        sgd(params, lr, X.shape[0])
    return losses


def evaluate_accuracy(data_iter, device_params, ctx):
    """The share of examples whose highest score is their label's. Every device scores its shard of each batch."""
    right = (
        [
            lenet(X_shard, params).argmax(axis=1) == y_shard
            for X_shard, y_shard, params in zip(split_and_load(X, ctx), split_and_load(y, ctx), device_params)
        ]
        for X, y in data_iter
    )
    return loop.mean(right)


class Replicas:
    """What `loop` drives: LeNet's parameters, drawn once and copied to every device."""

    def __init__(self, ctx, lr, params=None):
        engine.check(ctx)
        self.ctx, self.lr = ctx, lr
        params = params or init_params()
        self.device_params = [get_params(params, c) for c in ctx]

    def train_batch(self, X, y):
        return train_batch(X, y, self.device_params, self.ctx, self.lr)

    def evaluate_accuracy(self, data_iter):
        return evaluate_accuracy(data_iter, self.device_params, self.ctx)

    def parameters(self):
        return {name: p.asnumpy() for name, p in zip(checkpoint.LENET, self.device_params[0])}


def train(num_gpus, batch_size, lr, *, device="auto", **settings):
    """The notebook's experiment, `train(num_gpus=2, batch_size=256, lr=0.2)`: prints time and accuracy an epoch.

    num_gpus: how many devices, or which ([0, 2]). batch_size: the global one. device: "auto", "gpu" or "cpu".
    settings: epochs, dataset, data_dir, limit, seed, out, as `loop.run` describes them. Returns its list of `Epoch`.
    """
    ctx = devices.contexts(num_gpus, device)
    config = {"impl": "scratch", "lr": lr}
    return loop.run(lambda: Replicas(ctx, lr), ctx, batch_size, config=config, **settings)
