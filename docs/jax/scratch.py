"""gluon_mgpu/scratch.py in JAX: one process, and the same functions. Arrays never change, so each returns new ones."""

import argparse
import sys
from time import time

import jax
import jax.numpy as jnp
import numpy as np

from gluon_mgpu.data import datasets


def init_params(scale=0.1, seed=1):
    rng, params = np.random.default_rng(seed), []
    for shape in [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]:
        params += [jnp.float32(rng.normal(0, scale, shape)), jnp.zeros(shape[0])]
    return params


def convolution(X, W, b):
    h = jax.nn.relu(jax.lax.conv(X, W, (1, 1), "VALID") + b[:, None, None])
    return jax.lax.reduce_window(h, 0.0, jax.lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID") / 4  # average pooling


def lenet(X, params):
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h2 = convolution(convolution(X, W1, b1), W2, b2)  # (n, 50, 4, 4)
    return jax.nn.relu(h2.reshape(len(X), -1) @ W3.T + b3) @ W4.T + b4  # (n, 10)


def loss(y_hat, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(y_hat), y[:, None], axis=1)[:, 0]


def get_params(params, device):
    return jax.device_put(params, device)


def allreduce(data):
    total = sum(jax.device_put(x, data[0].device) for x in data)
    return [jax.device_put(total, x.device) for x in data]


def split_and_load(data, devices):
    return list(map(jax.device_put, np.array_split(data, len(devices)), devices))


@jax.jit  # compiled once for each device and shape; a call only queues the work
def forward_backward(params, X, y):
    return jax.grad(lambda params: loss(lenet(X, params), y).sum())(params)


@jax.jit
def sgd(params, grads, lr, batch_size):
    return [p - lr / batch_size * g for p, g in zip(params, grads)]


def train_batch(X, y, device_params, devices, lr):
    Xs, ys = split_and_load(X, devices), split_and_load(y, devices)
    grads = map(forward_backward, device_params, Xs, ys)
    sums = zip(*[allreduce(of_parameter) for of_parameter in zip(*grads)])
    return [sgd(params, of_device, lr, len(X)) for params, of_device in zip(device_params, sums)]


def evaluate_accuracy(data_iter, params):  # on the first device
    return np.concatenate([lenet(X, params).argmax(1) == y for X, y in data_iter]).mean()


def batches(images, labels, order, batch_size=256):
    for chosen in np.split(order, range(batch_size, len(order), batch_size)):
        yield images[chosen].astype(np.float32) / 255, labels[chosen].astype(np.int32)


def train(dataset, limit, epochs, lr, out, device):
    data, devices = datasets.load(dataset, limit=limit), jax.devices(device)
    if 0 < (rest := len(data.train_labels) % 256) < len(devices):
        sys.exit(f"--limit {limit}: the last batch has {rest} image, for {len(devices)} devices; choose another limit")
    device_params = [get_params(init_params(), d) for d in devices]
    tests = data.test_images, data.test_labels, np.arange(len(data.test_labels))
    for epoch in range(1, epochs + 1):
        start = time()
        order = np.random.default_rng([1, epoch]).permutation(len(data.train_labels))  # as scratch.train with seed=1
        for X, y in batches(data.train_images, data.train_labels, order):
            device_params = train_batch(X, y, device_params, devices, lr)
        jax.block_until_ready(device_params)
        seconds = time() - start
        accuracy = evaluate_accuracy(batches(*tests), device_params[0])
        print(f"epoch {epoch}, time: {seconds:.1f} sec, test acc: {accuracy:.2f}")
    if out:
        np.savez(out, *device_params[0])
    several, one = (train_batch(X, y, device_params[:k], devices[:k], lr)[0] for k in (len(devices), 1))
    largest = max(abs(a - b).max() for a, b in zip(several, one))
    print(f"largest difference from one device after another step: {largest:.1e}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_default_matmul_precision", "highest")  # or a GPU rounds float32 to 10 bits
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--out", help="save the parameters in this .npz file")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: the GPUs, or two CPU devices")
    train(**vars(parser.parse_args()))
