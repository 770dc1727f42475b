"""Takes the steps of a JAX file on several CPU devices and on one, each time with a fresh copy of the file.

All sides run in one process, a fork of this one, which ends with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gluon_mgpu.check.processes as processes
from gluon_mgpu.check.accuracy import of_file
from gluon_mgpu.check.judge import Arrays, Claim, Driver, Report, Session, Shards, compare
from gluon_mgpu.check.processes import Send
from gluon_mgpu.support.programs import execute

LR = 0.1


def compare_file(path: str, devices: Sequence[int], steps: int, even: bool, seconds: float) -> Report:
    """Compare the steps of a file with `train_batch` and `init_params`."""
    file = os.path.realpath(path)

    def check(send: Send) -> None:
        jax.config.update("jax_num_cpu_devices", max(devices))
        sys.path.insert(0, str(Path(file).parent))
        send(compare(JAX(file), devices, steps, even))

    outcome = processes.run([check], 5 * seconds)  # all steps, and compiling them
    return Report({"runs": outcome.failure}) if outcome.failure else outcome.stages[0][0]


class JAX(Driver):
    divides = "split_and_load"

    def __init__(self, file: str) -> None:
        self.file = file

    def batch(self, i: int, n: int) -> Any:
        """The file's own `example_batch(n)`, or images."""
        module = execute("step", self.file)
        if not hasattr(module, "example_batch"):
            return super().batch(i, n)
        np.random.seed(i)
        batch = module.example_batch(n)
        return jax.tree.map(np.asarray, batch if isinstance(batch, (list, tuple)) else [batch])

    def take(self, batch: Any, examples: Sequence[int]) -> Any:
        return jax.tree.map(lambda array: array[[*examples]], batch)

    def split(self, k: int, batch: Any, n: int) -> Shards | None:
        split_and_load = getattr(execute("step", self.file), "split_and_load", None)
        if not split_and_load:
            return None
        return [np.asarray(part).astype(int).tolist() for part in split_and_load(np.arange(n), jax.devices("cpu")[:k])]

    def run(self, k: int, batches: Sequence[Any], double: bool = False, **_: Any) -> Session:
        session, devices, dtype = Session(), jax.devices("cpu")[:k], np.float64 if double else np.float32

        def own(nest: Any) -> Any:
            is_own = lambda a: jnp.issubdtype(a.dtype, np.floating) and (double or a.dtype == np.float64)  # noqa: E731
            return jax.tree.map(lambda a: a.astype(dtype) if is_own(a) else a, nest)

        try:
            module = execute("step", self.file)
            params = module.init_params()  # in float32 also if the steps are in float64, for the same random numbers
            with _watched(session.facts, double):
                get = getattr(module, "get_params", jax.device_put)
                params = [get(own(params), device) for device in devices]
                session.start = [arrays(p) for p in params]
                for batch in batches:
                    before = [arrays(p) for p in params]
                    params = module.train_batch(*own(batch), params, devices, LR)
                    for device, of_device in zip(devices, params):
                        if elsewhere := [a for a in jax.tree.leaves(of_device) if a.devices() != {device}]:
                            raise ValueError(f"the new parameters of {device} are on {elsewhere[0].devices()}")
                    session.add(before, [arrays(p) for p in params])
        except Exception as error:
            session.failure = processes.where(error)
        return session

    def checks(self, k: int, is_wrong: bool) -> Iterator[Claim]:
        if is_wrong:
            return
        module = execute("step", self.file)
        X, *_ = self.batch(0, 11)
        yield "accuracy", of_file(module, X, lambda y: np.array(y, np.int32), module.init_params())


def arrays(params: Any) -> Arrays:
    return {f"params[{i}]": np.asarray(p, np.float64) for i, p in enumerate(jax.tree.leaves(params))}


@contextmanager
def _watched(facts: dict[str, Any], double: bool) -> Iterator[None]:
    """Note the lowest precision. double: compute in float64 instead."""
    convert = jax.lax.convert_element_type_p
    bind = convert.bind

    def in_double(*args: Any, **params: Any) -> Any:
        name = str(np.dtype(params["new_dtype"]))
        if name in ("float16", "bfloat16"):
            facts["low"] = name
        if double and jnp.issubdtype(params["new_dtype"], jnp.floating):
            params["new_dtype"] = np.dtype(np.float64)
        return bind(*args, **params)

    jax.config.update("jax_enable_x64", double)
    convert.bind = in_double
    try:
        yield
    finally:
        del convert.bind
        jax.config.update("jax_enable_x64", False)
