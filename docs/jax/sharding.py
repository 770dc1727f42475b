"""The step of scratch.py without split_and_load and allreduce: a NamedSharding says how each array is divided, and the
compiler inserts the sums. Prints where they are in the compiled step, then trains."""

import argparse
import re
import sys
from time import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scratch import batches, evaluate_accuracy, init_params, lenet, loss

from gluon_mgpu.data import datasets


@jax.jit
def train_batch(X, y, params, lr):
    """X: (n, 1, 28, 28), y: (n,), the whole batch. Nothing here mentions devices."""
    grads = jax.grad(lambda params: loss(lenet(X, params), y).sum())(params)
    return [p - lr / len(X) * g for p, g in zip(params, grads)]


def print_sums(*arguments):
    """Print each sum over devices in the compiled step: its line, and the shapes of what it sums."""
    lines = train_batch.lower(*arguments).compile().as_text().splitlines()
    for number, line in enumerate(lines, start=1):
        if " all-reduce(" in line:
            print(f"line {number} of {len(lines)}: all-reduce of", *re.findall(r"f32\[[\d,]*\]", line))


def train(dataset, limit, epochs, lr, out, device):
    data = datasets.load(dataset, limit=limit)
    mesh = Mesh(jax.devices(device), ("devices",))
    if (rest := len(data.train_labels) % 256) % mesh.size:
        sys.exit(f"--limit {limit}: JAX cannot divide the last batch, of {rest}, evenly among {mesh.size} devices")
    whole = NamedSharding(mesh, PartitionSpec())  # a replica on each device
    split = NamedSharding(mesh, PartitionSpec("devices"))  # the first axis is divided evenly
    params = jax.device_put(init_params(), whole)
    tests = data.test_images, data.test_labels, np.arange(len(data.test_labels))
    for epoch in range(1, epochs + 1):
        start = time()
        order = np.random.default_rng([1, epoch]).permutation(len(data.train_labels))  # as scratch.train with seed=1
        for i, (X, y) in enumerate(batches(data.train_images, data.train_labels, order)):
            shards = jax.device_put(X, split), jax.device_put(y, split)
            if epoch == 1 and i == 0:
                print_sums(*shards, params, lr)
            params = train_batch(*shards, params, lr)
        jax.block_until_ready(params)
        seconds = time() - start
        accuracy = evaluate_accuracy(batches(*tests), params)
        print(f"epoch {epoch}, time: {seconds:.1f} sec, test acc: {accuracy:.2f}", flush=True)
    if out:
        np.savez(out, *params)
    several = train_batch(*jax.device_put((X, y), split), params, lr)
    one = train_batch(X, y, jax.device_put(params, mesh.devices[0]), lr)
    largest = max(abs(np.asarray(a) - b).max() for a, b in zip(several, one))
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
