"""Takes steps with a PyTorch file in two processes over gloo and in one, for `gluon-mgpu check`.

`python -m gluon_mgpu.check.pytorch_step FILE FOLDER` forks the two, then takes the same steps itself, and writes what
it found to FOLDER. The two exchange only what the file's step does: their results are frameworks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from gluon_mgpu.check import frameworks
from gluon_mgpu.check.comparison import Arrays
from gluon_mgpu.check.contributions import BatchResult, judge
from gluon_mgpu.support.subprocesses import how_it_ended

WORLD = 2
# "later" continues with the same network; the labels of "same" are equal
BATCHES = {"even": 16, "later": 32, "uneven": 13, "same": 16}
SECONDS, AFTER_OTHER = 60, 8  # limits for a step, and after the other process has completed it


class Stepper:
    """A fresh copy of the file, with its parameters. rank: also the seed, so that only what is sent, or drawn with a
    seed of its own, is equal."""

    def __init__(self, file: str, rank: int, double: bool = False) -> None:
        import torch

        self.file, self.dtype = file, torch.float64 if double else torch.float32
        torch.manual_seed(rank)
        np.random.seed(rank)
        self.module = frameworks.load(file)
        if hasattr(self.module, "init_net"):
            net, trainer = self.module.init_net(1.0)
            self.arguments = (net, trainer)
            state = net.state_dict(keep_vars=True)
            self.state = {name.replace("module.", ""): array for name, array in state.items()}
            self.buffers = frozenset(n.replace("module.", "") for n, _ in net.named_buffers()) & self.state.keys()
            self.synced = getattr(net, "broadcast_buffers", False)
        else:
            params = self.module.init_params()
            self.arguments = (params, 1.0)
            items = params.items() if isinstance(params, dict) else enumerate(params)
            self.state = {f"params[{name}]": array for name, array in items}
            self.buffers, self.synced = frozenset(), False
        if double:
            for array in self.state.values():
                array.data = array.data.double() if array.is_floating_point() else array.data
        self.initial = self.arrays()

    def arrays(self) -> Arrays:
        """The parameters and buffers, with those that are divided among the processes gathered."""
        gathered = [a.full_tensor() if hasattr(a, "full_tensor") else a for a in self.state.values()]
        return {n: a.detach().numpy().astype(np.float64) for n, a in zip(self.state, gathered)}

    def start(self) -> Arrays:
        """The parameters before each step."""
        counters = {name: a for name, a in self.initial.items() if name in self.buffers and not a.ndim}
        return {**frameworks.spread(self.initial), **counters}

    def batch(self, kind: str) -> tuple[Any, Any]:
        """X and y of a batch: the file's own `example_batch(n)`, or images and labels as of MNIST."""
        import torch

        n, rng = BATCHES[kind], np.random.default_rng(list(BATCHES).index(kind))
        if hasattr(self.module, "example_batch"):
            torch.manual_seed(n)
            X, y = self.module.example_batch(n)
        else:
            X, y = torch.tensor(rng.random((n, 1, 28, 28)), dtype=torch.float32), torch.tensor(rng.integers(0, 10, n))
        if kind == "same":
            y = y[:1].expand_as(y).clone()
        return tuple(a.to(self.dtype) if a.is_floating_point() else a for a in (X, y))

    def load(self, start: Arrays) -> None:
        import torch

        with torch.no_grad():
            for name, array in self.state.items():
                value = torch.tensor(start[name], dtype=array.dtype)
                if hasattr(array, "full_tensor"):
                    from torch.distributed.tensor import distribute_tensor

                    value = distribute_tensor(value, array.device_mesh, array.placements)
                array.copy_(value)

    def step(self, X: Any, y: Any) -> tuple[Arrays, Any]:
        """Take a step from `start`. Returns how it changes the arrays, and the losses if it returns them."""
        import torch

        start = self.start()
        self.load(start)
        losses = self.module.train_batch(X, y, *self.arguments)
        after = self.arrays()
        losses = losses.detach().numpy().ravel() if isinstance(losses, torch.Tensor) else np.zeros(0)
        return {name: after[name] - start[name] for name in start}, losses

    def accuracy(self) -> str | None:
        """What is wrong with the file's `evaluate_accuracy`, see `frameworks.accuracy`."""
        import torch

        self.load(self.start())
        X, _ = self.batch("even")
        net, lenet = self.arguments[0], getattr(self.module, "lenet", None)
        if isinstance(net, torch.nn.Module):
            net.eval()
        else:
            net = lenet and (lambda X: lenet(X, self.arguments[0]))
        return frameworks.accuracy(self.file, self.module, X, torch.tensor, self.arguments[0], net)

    def examples(self, X: Any, y: Any) -> list[int]:
        """The examples whose gradients a step computes in this process; empty if this is unknown."""
        if not X.is_floating_point():
            return []
        X = X.clone().requires_grad_()
        self.step(X, y)
        return [] if X.grad is None else X.grad.flatten(1).abs().sum(1).nonzero().ravel().tolist()


class Watch:
    """Ends a process that waits forever in a step, and says in which line."""

    def __init__(self, file: str, folder: Path, rank: int) -> None:
        self.file, self.folder, self.rank, self.name, self.begun = file, folder, rank, "", 0.0
        self.thread = threading.main_thread().ident
        threading.Thread(target=self._watch, daemon=True).start()

    def step(self, name: str, function: Any, *arguments: Any) -> Any:
        self.name, self.begun = name, time.monotonic()
        result = function(*arguments)
        self.name = ""
        (self.folder / f"{name}.{self.rank}").touch()
        while not (self.folder / f"{name}.{1 - self.rank}").exists():  # the launcher ends this if the other fails
            time.sleep(0.002)
        return result

    def fail(self, reason: str) -> None:
        (self.folder / f"failed.{self.rank}").write_text(reason)
        os._exit(3)

    def _watch(self) -> None:
        other_done = 0.0
        while True:
            time.sleep(0.1)
            name, begun, now = self.name, self.begun, time.monotonic()
            if not name:
                other_done = 0.0
                continue
            if (self.folder / f"{name}.{1 - self.rank}").exists():
                other_done = other_done or now
            if now - begun > SECONDS or (other_done and now - other_done > AFTER_OTHER):
                frame = sys._current_frames()[self.thread]  # type: ignore[index]
                lines = [number for f, number in traceback.walk_stack(frame) if f.f_code.co_filename == self.file]
                other = "has completed the step" if other_done else "waits, too"
                advice = "all processes must make the same calls in the same order"
                self.fail(f"line {lines[0] if lines else '?'} waits forever; the other process {other}; {advice}")


def _connect(folder: Path, rank: int, world: int) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)


def process(file: str, folder: Path, rank: int) -> None:
    """What each of the two processes does."""
    watch = Watch(file, folder, rank)
    try:
        _connect(folder, rank, WORLD)
        stepper = watch.step("build", Stepper, file, rank)
        results = {f"start/{name}": a for name, a in stepper.initial.items()}
        for kind in BATCHES:
            if kind in ("uneven", "same"):
                stepper = watch.step(f"new for {kind}", Stepper, file, rank)
            change, losses = watch.step(kind, stepper.step, *stepper.batch(kind))
            results |= {f"{kind}/{name}": a for name, a in change.items()} | {f"losses/{kind}": losses}
        np.savez(folder / f"result.{rank}.npz", **results)
        accuracy = watch.step("accuracy", stepper.accuracy)
        (folder / f"accuracy.{rank}").write_text(json.dumps(accuracy))
        for kind in BATCHES:
            stepper = watch.step(f"build {kind}", Stepper, file, rank)
            examples = watch.step(f"examples {kind}", stepper.examples, *stepper.batch(kind))
            (folder / f"examples.{kind}.{rank}").write_text(json.dumps(examples))
    except BaseException as error:
        watch.fail(frameworks.where(error, file))
    os._exit(0)


def _run_processes(file: str, folder: Path) -> str:
    """Run the two processes. Returns what is wrong if one of them fails before it has taken its steps."""
    children: list[int] = []
    for rank in range(WORLD):
        child = os.fork()
        if not child:
            process(file, folder, rank)
        children.append(child)
    ended: dict[int, int] = {}  # {rank: exit status}
    while len(ended) < WORLD:
        child, status = os.waitpid(-1, 0)
        ended[children.index(child)] = os.waitstatus_to_exitcode(status)
        if status and len(ended) < WORLD:  # the other may be about to fail, too
            time.sleep(0.5)
            for other in set(children) - {child}:
                os.kill(other, signal.SIGKILL)
    if all((folder / f"result.{rank}.npz").exists() for rank in range(WORLD)):
        return ""
    failed = {r: f.read_text() for r in ended if (f := folder / f"failed.{r}").exists()}
    for rank, status in ended.items():
        if rank not in failed and status != -signal.SIGKILL:
            aborted = " (as gloo does if the shapes of a sum differ)" if status == -signal.SIGABRT else ""
            failed[rank] = how_it_ended(status) + aborted
    # if one fails, the other loses its connection
    rank = min(failed, key=lambda rank: ("by peer" in failed[rank], "waits" in failed[rank]), default=0)
    return f"process {rank}: {failed.get(rank, 'was killed')}"


def _accuracy(folder: Path) -> str | None:
    """What is wrong with the accuracy in process 0, which prints it. One that fails takes no other steps."""
    found, failed = folder / "accuracy.0", list(folder.glob("failed.*"))
    if found.exists():
        return json.loads(found.read_text())
    return f"evaluate_accuracy fails: {failed[0].read_text()}" if failed else None


def _examples(folder: Path, kind: str) -> list[list[int]] | None:
    files = [folder / f"examples.{kind}.{rank}" for rank in range(WORLD)]
    found = [json.loads(f.read_text()) for f in files if f.exists()]
    return found if len(found) == WORLD and all(found) else None


def main(file: str, folder: Path) -> dict[str, Any]:
    """The claims, and how far the steps are from float64."""
    import torch
    import torch.nn.parallel

    torch.set_num_threads(1)
    if "optim" in Path(file).read_text():
        import torch._dynamo  # takes seconds, and the first optimizer would import it in each process
    sys.path.insert(0, str(Path(file).parent))  # as for a script, but its modules hide none that are imported above
    if reason := _run_processes(file, folder):
        return {"claims": {"update": reason}}
    _connect(folder, 0, 1)
    try:
        steps = _in_one_process(file, folder)
    except Exception as error:
        return {"claims": {"update": f"in one process, {frameworks.where(error, file)}"}}
    if not steps:
        return {"claims": {"repeatable": "a step uses random numbers, such as dropout; check it without them"}}
    results = [np.load(folder / f"result.{rank}.npz") for rank in range(WORLD)]
    names = steps["even"]["whole"]

    def of(kind: str) -> list[Arrays]:
        return [{name: result[f"{kind}/{name}"] for name in names} for result in results]

    batches, stale = {}, steps["later"].pop("stale")
    for kind, step in steps.items():
        losses = [result[f"losses/{kind}"] for result in results], step.pop("losses")
        batches[kind] = BatchResult(changes=of(kind), losses=losses, **step)
    how = ["compared part by part, as batch normalization sees them"] * batches["even"].by_part
    claims = {**judge(of("start"), **batches), "accuracy": _accuracy(folder)}
    if stale and not claims["update"]:
        claims["update"] = "a step adds to the gradients of the step before; call zero_grad after each update"
    return {"claims": claims, "how": how, "notes": batches["even"].notes()}


def _in_one_process(file: str, folder: Path) -> dict[str, dict[str, Any]]:
    """{batch: fields of its `BatchResult`}; empty if a step gives another result the second time."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    found, masked = {}, False
    for kind, stepper in _steppers(file):
        X, y = stepper.batch(kind)
        whole, losses = stepper.step(X, y)
        if kind == "even":
            cleared = Stepper(file, 0)
            if _differ(cleared.step(X, y)[0], whole):
                return {}
            for array in cleared.state.values():
                if array.grad is not None:
                    array.grad.zero_()
            masked = Stepper(file, 0).examples(X, y) != [*range(len(X))]
        turned, _ = Stepper(file, 0).step(X.flip(0), y.flip(0))
        examples = None if masked else _examples(folder, kind)  # a mask leaves no gradient of some examples
        parts = examples or np.array_split(range(len(X)), WORLD)
        alone = [Stepper(file, 0).step(X[part], y[part])[0] for part in map(list, parts)]
        fields = {
            "n": len(X),
            "terms": X.numel(),
            "start": stepper.start(),
            "whole": whole,
            "turned": turned,
            "alone": alone,
            "examples": examples,
            "exact": None,
        }
        found[kind] = {**fields, "losses": losses, "buffers": stepper.buffers, "synced": stepper.synced}
        if kind == "later":
            found[kind]["stale"] = _differ(cleared.step(X, y)[0], whole)
    with suppress(Exception):  # a step that insists on float32 is compared without
        torch.set_default_dtype(torch.float64)
        init = DistributedDataParallel.__init__
        DistributedDataParallel.__init__ = lambda self, net, *a, **k: init(self, net.double(), *a, **k)
        for kind, stepper in _steppers(file, double=True):
            found[kind]["exact"], _ = stepper.step(*stepper.batch(kind))
    return found


def _differ(some: Arrays, others: Arrays) -> bool:
    return any((some[name] != others[name]).any() for name in others)


def _steppers(file: str, **options: bool) -> Iterator[tuple[str, Stepper]]:
    """Each batch, and what takes its step: the network that has taken the step before, or a new one."""
    stepper = Stepper(file, 0, **options)
    for kind in BATCHES:
        stepper = Stepper(file, 0, **options) if kind in ("uneven", "same") else stepper
        yield kind, stepper


if __name__ == "__main__":
    file, folder = sys.argv[1:]
    Path(folder, "found.json").write_text(json.dumps(main(file, Path(folder))))
    os._exit(0)  # gloo's threads sometimes abort while Python shuts down
