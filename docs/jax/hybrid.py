"""gluon_mgpu/hybrid.py in JAX: the step of sharding.py, on a mesh with two axes. Only the shardings differ.

Prints the sums that the compiler inserts, each with its groups of devices, then trains.
"""

import argparse
import re

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from scratch import batches, init_params, lenet, loss
from sharding import train_batch

from gluon_mgpu.data import datasets

CONVOLUTIONS = [P(), P(), P(), P()]  # whole on each device
DENSE = [P("tensor", None), P("tensor"), P(None, "tensor"), P()]  # rows of W3, b3, columns of W4


def integers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def groups(line):
    """The groups of devices in a line of the compiled step: {{0,2},{1,3}}, or in short [2,2]<=[2,2]T(1,0)."""
    [text] = re.findall(r"replica_groups=(\S+?),? ", line)
    if text.startswith("{"):
        return [integers(group) for group in text.split("},{")]
    shape, axes, *order = map(integers, re.split("<=|T", text))
    return np.arange(np.prod(axes)).reshape(axes).transpose(*order).reshape(shape).tolist()


def print_sums(*arguments):
    """Print the shapes of each sum over devices in the compiled step, and its groups of devices."""
    for line in train_batch.lower(*arguments).compile().as_text().splitlines():
        if " all-reduce(" in line:
            print("all-reduce of", *re.findall(r"f32\[[\d,]*\]", line), "over", groups(line))


def train(dataset, steps, lr, out, device):
    data = datasets.load(dataset, limit=64 * steps)
    mesh = Mesh(np.reshape(jax.devices(device), (-1, 2)), ("data", "tensor"))
    split = NamedSharding(mesh, P("data"))  # each row has a part of the batch, and each device of a row all of it
    params = [jax.device_put(p, NamedSharding(mesh, spec)) for p, spec in zip(init_params(), CONVOLUTIONS + DENSE)]
    for i, (X, y) in enumerate(batches(data.train_images, data.train_labels, np.arange(64 * steps), batch_size=64)):
        shards = jax.device_put((X, y), split)
        if i == 0:
            print_sums(*shards, params, lr)
        before, params = params, train_batch(*shards, params, lr)
    print(f"loss in step {steps}: {loss(lenet(X, before), y).mean():.4f}")
    if out:
        np.savez(out, *params)
    several = train_batch(*shards, params, lr)
    one = train_batch(X, y, jax.device_put(params, jax.devices(device)[0]), lr)
    largest = max(abs(np.asarray(a) - b).max() for a, b in zip(several, one))
    print(f"largest difference from one device after another step: {largest:.1e}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_default_matmul_precision", "highest")  # or a GPU rounds float32 to 10 bits
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--out", help="save the parameters in this .npz file")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: the GPUs, or four CPU devices")
    train(**vars(parser.parse_args()))
