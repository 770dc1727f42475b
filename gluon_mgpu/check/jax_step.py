"""Takes steps with a JAX file on two devices of one process and on one, for `gluon-mgpu check`.

`python -m gluon_mgpu.check.jax_step FILE FOLDER` writes what it found to FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gluon_mgpu.check import frameworks
from gluon_mgpu.check.comparison import Arrays
from gluon_mgpu.check.contributions import BatchResult, judge

DEVICES = 2
BATCHES = {"even": 16, "uneven": 15, "later": 16, "same": 16}  # few sizes, because JAX compiles for each


def arrays(params: Any) -> Arrays:
    return {f"params[{i}]": np.asarray(p, np.float64) for i, p in enumerate(jax.tree.leaves(params))}


def replicas(module: ModuleType, devices: list[Any]) -> list[Any]:
    """The initial parameters of each device."""
    get = getattr(module, "get_params", jax.device_put)
    return [get(module.init_params(), device) for device in devices]


def step(module: ModuleType, params: Any, X: Any, y: Any, devices: list[Any], dtype: Any = jnp.float32) -> list[Arrays]:
    """How a step changes the parameters, on each device."""
    start, copy = arrays(params), jax.tree.map(lambda a: jnp.asarray(a, dtype), params)
    after = module.train_batch(X.astype(dtype), y, [jax.device_put(copy, d) for d in devices], devices, 1.0)
    for device, of_device in zip(devices, after):
        if elsewhere := [a for a in jax.tree.leaves(of_device) if a.devices() != {device}]:
            raise ValueError(f"the new parameters of {device} are on {elsewhere[0].devices()}")
    return [{name: a - start[name] for name, a in arrays(of_device).items()} for of_device in after]


def main(file: str) -> dict[str, Any]:
    devices = jax.devices("cpu")[:DEVICES]
    try:
        return compare(file, devices)
    except Exception as error:
        return {"claims": {"update": frameworks.where(error, file)}}


def compare(file: str, devices: list[Any]) -> dict[str, Any]:
    module, one = frameworks.load(file), frameworks.load(file)
    initial, batches = replicas(module, devices), {}
    structure = jax.tree.structure(initial[0])
    for i, (kind, n) in enumerate(BATCHES.items()):
        rng, later = np.random.default_rng(i), kind == "later"
        X, y = rng.random((n, 1, 28, 28), np.float32), rng.integers(0, 10, n).astype(np.int32)
        y = y[:1].repeat(n) if kind == "same" else y
        start = frameworks.spread(arrays(initial[0]), seed=later)
        params = jax.tree.unflatten(structure, [a.astype(np.float32) for a in start.values()])
        examples = [list(part) for part in np.array_split(range(n), DEVICES)]
        if hasattr(module, "split_and_load"):
            examples = [np.asarray(part).astype(int).tolist() for part in module.split_and_load(np.arange(n), devices)]
        # a new copy, because what jit has kept of the first step, such as a global variable's value, is wrong later
        on_one = partial(step, frameworks.load(file) if later else one, params, devices=devices[:1])
        [whole] = on_one(X, y)
        if kind == "even" and any((whole[n] != a).any() for n, a in on_one(X, y)[0].items()):
            return {"claims": {"repeatable": "a step uses random numbers, such as dropout; check it without them"}}
        exact = None
        if kind == "even":
            with suppress(Exception), jax.experimental.enable_x64():
                [exact] = on_one(X, y, dtype=jnp.float64)
        [turned] = on_one(X[::-1], y[::-1])
        alone = [on_one(X[part], y[part])[0] for part in examples]
        changes = step(module, params, X, y, devices)
        batches[kind] = BatchResult(n, X.size, start, changes, whole, turned, exact, alone, examples)
    claims = judge([arrays(p) for p in initial], **batches)
    lenet = getattr(module, "lenet", None)
    net = lenet and (lambda X: lenet(X, params))
    claims["accuracy"] = frameworks.accuracy(file, module, X, lambda y: np.array(y, np.int32), params, net)
    return {"claims": claims, "notes": batches["even"].notes()}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    file, folder = sys.argv[1:]
    sys.path.insert(0, str(Path(file).parent))
    Path(folder, "found.json").write_text(json.dumps(main(file)))
    os._exit(0)
