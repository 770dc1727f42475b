"""The lecture's experiment: how much time a second device saves, and how batch size and learning rate affect accuracy.

Each run trains in a new process, because the engine's settings depend on the number of contexts. Source: the lecture
"L14_6 Multi-GPU Training in Python".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gluon_mgpu.compat import devices
from gluon_mgpu.data import datasets
from gluon_mgpu.support import log, subprocesses
from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.training import folder as runs
from gluon_mgpu.training.config import RECORDED, Config
from gluon_mgpu.training.folder import RunFolder

RUNS = {  # the settings that differ; scale_lr multiplies the learning rate by batch_size / 256
    "1 device, batch 256": {"gpus": 1, "batch_size": 256},
    "2 devices, batch 256": {"gpus": 2, "batch_size": 256},
    "1 device, batch 512": {"gpus": 1, "batch_size": 512},
    "2 devices, batch 512": {"gpus": 2, "batch_size": 512},
    "2 devices, batch 512, lr scaled": {"gpus": 2, "batch_size": 512, "scale_lr": True},
}


def run(out: str | Path, device: str = "auto", **options: Any) -> list[RunFolder]:
    """Train all runs in RUNS, each in its own folder in `out`.

    options: fields of Config. All runs start from the same parameters. On CPU, each context gets one OpenMP thread,
    even if it is the only context. Raises UsageError if options are invalid, or if `out` holds runs with different
    options. Raises Error if the data is not available or a run fails.
    """
    config = Config(**options)
    ctx = devices.contexts(2, device)
    devices.say_if_no_gpu(ctx, device)
    datasets.load(config.dataset, config.data_dir, config.limit, config.seed)  # downloads the data set if necessary
    options["device"] = kind = ctx[0].device_type
    points = {Path(out, name.replace(",", "").replace(" ", "-")): {**options, **RUNS[name]} for name in RUNS}
    results = []
    for result in train_all(points, {"OMP_NUM_THREADS": "1"} if kind == "cpu" else {}):
        if isinstance(result, Error):
            raise result
        results.append(result)
    return results


def train_all(points: Mapping[Path, dict[str, Any]], env: Mapping[str, str]) -> Iterator[RunFolder | Error]:
    """Train runs, each in its own process. Finished runs are skipped, and interrupted runs continue.

    points: {folder: fields of Config}. env: additional environment variables. Yields each run, or why it failed: a
    UsageError if the folder holds a different run.
    """
    with log.progress(total=sum(Config(**options).epochs for options in points.values()), unit="epoch") as bar:
        for folder, options in points.items():
            bar.set_description(folder.name)
            try:
                result: RunFolder | Error = _train(folder, options, env, bar.update)
            except Error as error:
                result = error
            yield result


def _train(
    folder: Path, options: dict[str, Any], env: Mapping[str, str], on_epochs: Callable[[int], object]
) -> RunFolder:
    """on_epochs: called with the number of newly finished epochs."""
    begun = runs.exists(folder)
    if begun:
        run, config = runs.read(folder), Config(**options)
        assert run.recorded
        other = [name for name in sorted(RECORDED) if getattr(config, name) != getattr(run.recorded, name)]
        if {*other} - {"epochs"} or run.recorded.epochs > config.epochs:
            raise UsageError(None, folder, f"holds a run with other {', '.join(other)}; use another folder")
        on_epochs(len(run.position.history))
        if len(run.position.history) == config.epochs:
            return run
    values = {**options, "resume" if begun else "out": folder}
    given = {option: value for option, value in values.items() if value is not None and value is not False}
    flags = [f"--{o.replace('_', '-')}" + ("" if value is True else f"={value}") for o, value in given.items()]
    try:
        finished = subprocesses.run(
            [sys.executable, "-m", "gluon_mgpu", "train", *flags],
            env={**subprocesses.users_environment(), **env},
            on_line=lambda line: on_epochs(line.startswith("epoch ")),
        )
    except KeyboardInterrupt:
        log.say("run the same command again to continue")
        raise
    subprocesses.raise_for_status(str(folder), finished)
    return runs.read(folder)


def table(results: Sequence[RunFolder]) -> str:
    """Format a table of each run's median seconds per epoch, speed-up over the first run, and accuracies."""
    seconds = [median(epoch.train_seconds for epoch in result.position.history) for result in results]
    rows: list[list[object]] = [["", "lr", "s/epoch", "speed-up", "test accuracy by epoch"]]
    for name, result, s in zip(RUNS, results, seconds):
        history = result.position.history
        accuracies = "  ".join(f"{epoch.test_accuracy:.2f}" for epoch in history)
        rows.append([name, f"{history[-1].learning_rate:g}", f"{s:.2f}", f"{seconds[0] / s:.2f}", accuracies])
    config, details = results[0].recorded, results[0].details
    assert config
    lines = [f"{config.model} on {config.dataset}, {config.impl}, seed {config.seed}", *log.table(rows)]
    if details["devices"] == ["cpu(0)"]:
        lines.append("On CPU, each device has one OpenMP thread; otherwise, 1 device would use all cores.")
    return "\n".join(lines)
