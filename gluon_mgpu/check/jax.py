"""Takes the steps of a JAX file on several CPU devices and on one, each time with a fresh copy of the file.

All sides run in one process, a fork of this one, which ends with it.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import gluon_mgpu.check.processes as processes
from gluon_mgpu.check.accuracy import accuracy
from gluon_mgpu.check.judge import Arrays, Report, Session, Shards, Step, compare, merged
from gluon_mgpu.check.processes import Send

LR = 0.1
DRAWS = "normal uniform bernoulli truncated_normal exponential gumbel laplace categorical permutation".split()
BATCH = tuple[np.ndarray, np.ndarray]


def compare_file(path: str, devices: Sequence[int], steps: int, even: bool, seconds: float) -> Report:
    """Compare the steps of a file with `train_batch` and `init_params`."""
    file = os.path.realpath(path)

    def check(send: Send) -> None:
        os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}  # to compile fast
        import jax

        jax.config.update("jax_num_cpu_devices", max(devices))
        sys.path.insert(0, str(Path(file).parent))
        driver = JAX(file)
        report = merged([(k, compare(driver, k, steps, even)) for k in devices], driver.unit)
        if report.same and (found := driver.accuracy()) is not None:
            report.claims["accuracy"] = found
        send({"report": np.array(json.dumps(asdict(report)))})

    outcome = processes.run([check], 5 * seconds)  # all steps, and compiling them
    if outcome.failure:
        return Report({"runs": outcome.failure})
    return Report(**json.loads(str(outcome.stages[0][0]["report"])))


class JAX:
    unit = "device"

    def __init__(self, file: str) -> None:
        self.file = file

    def batch(self, i: int, n: int) -> BATCH:
        rng = np.random.default_rng(i)
        return rng.random((n, 1, 28, 28), np.float32), rng.integers(0, 10, n).astype(np.int32)

    def take(self, batch: BATCH, examples: Sequence[int]) -> BATCH:
        return batch[0][[*examples]], batch[1][[*examples]]

    def same_labels(self, batch: BATCH) -> BATCH:
        return batch[0], batch[1][:1].repeat(len(batch[1]))

    def split(self, k: int, batch: BATCH, n: int) -> Shards | None:
        import jax

        split_and_load = getattr(processes.load(self.file), "split_and_load", None)
        if not split_and_load:
            return None
        return [np.asarray(part).astype(int).tolist() for part in split_and_load(np.arange(n), jax.devices("cpu")[:k])]

    def run(self, k: int, batches: Sequence[BATCH], double: bool = False, **_: Any) -> Session:
        session = Session()
        with _watched(session.facts, double):
            try:
                self._take_steps(session, k, batches, double)
            except Exception as error:
                session.failure = processes.where(error)
        return session

    def _take_steps(self, session: Session, k: int, batches: Sequence[BATCH], double: bool) -> None:
        import jax

        module, devices = processes.load(self.file), jax.devices("cpu")[:k]
        get, dtype = getattr(module, "get_params", jax.device_put), np.float64 if double else np.float32
        params = [get(_converted(module.init_params(), double), device) for device in devices]
        session.start = [arrays(p) for p in params]
        session.facts["random"] = False
        for X, y in batches:
            before = [arrays(p) for p in params]
            params = module.train_batch(X.astype(dtype), y.copy(), params, devices, LR)
            for device, of_device in zip(devices, params):
                if elsewhere := [a for a in jax.tree.leaves(of_device) if a.devices() != {device}]:
                    raise ValueError(f"the new parameters of {device} are on {elsewhere[0].devices()}")
            after = [arrays(p) for p in params]
            session.steps.append(Step([{n: a - old[n] for n, a in new.items()} for old, new in zip(before, after)]))

    def accuracy(self) -> str | None:
        """What is wrong with the file's `evaluate_accuracy`, see `accuracy`."""
        module = processes.load(self.file)
        params, lenet = module.init_params(), getattr(module, "lenet", None)
        net = lenet and (lambda X: lenet(X, params))
        return accuracy(module, self.batch(0, 12)[0], lambda y: np.array(y, np.int32), params, net)


def arrays(params: Any) -> Arrays:
    import jax

    return {f"params[{i}]": np.asarray(p, np.float64) for i, p in enumerate(jax.tree.leaves(params))}


def _converted(params: Any, double: bool) -> Any:
    import jax

    return jax.tree.map(lambda a: a.astype("float64") if double and a.dtype.kind in "fV" else a, params)


@contextmanager
def _watched(facts: dict[str, Any], double: bool) -> Iterator[None]:
    """Note the lowest precision, and whether random numbers are drawn. double: compute in float64 instead, except for
    random numbers."""
    import jax
    import jax.numpy as jnp

    convert, names = jax.lax.convert_element_type_p, [name for name in DRAWS if hasattr(jax.random, name)]
    bind, drawing = convert.bind, {name: getattr(jax.random, name) for name in names}

    def in_double(*args: Any, **params: Any) -> Any:
        name = str(np.dtype(params["new_dtype"]))
        if name in ("float16", "bfloat16"):
            facts["low"] = name
        if double and jnp.issubdtype(params["new_dtype"], jnp.floating):
            params["new_dtype"] = np.dtype(np.float64)
        return bind(*args, **params)

    def noted(draw: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            facts["random"] = True
            bound = inspect.signature(draw).bind(*args, **options)
            if double and "dtype" in inspect.signature(draw).parameters:
                bound.arguments["dtype"] = np.float32
                return draw(*bound.args, **bound.kwargs).astype(np.float64)
            return draw(*args, **options)

        return call

    was = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", double)
    convert.bind = in_double
    for name, draw in drawing.items():
        setattr(jax.random, name, noted(draw))
    try:
        yield
    finally:
        del convert.bind
        for name, draw in drawing.items():
            setattr(jax.random, name, draw)
        jax.config.update("jax_enable_x64", was)
