"""PyTorch's networks are ours, every subject trains alike, and figures are what they are said to be. torch is never
imported here, beside mxnet: it has its own processes, and tests that need it are skipped where it is missing."""

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from bench import peers

from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training import datasets

needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="make bench-peers installs PyTorch")
SUBJECTS = {s.name: s for s in peers.SUBJECTS["lenet"]}


def measured(model, ms):
    """What `run` measured of a model. ms: {subject: ms of each round}; of the others 100 in each."""
    rounds = len(next(iter(ms.values())))
    runs = {
        s.name: [
            {"step_ms": x, "peak_mb": 300 + i, "loss": 2.3, "compile_s": 9.0 - i if s.compiled else None}
            for i, x in enumerate(ms.get(s.name, [100] * rounds))
        ]
        for s in peers.SUBJECTS[model]
    }
    return {**peers.step_job(model, 100), "runs": runs, "goals": peers.goals(model, runs)}


def result(**models):
    return {"rounds": 3, "models": {model: measured(model, ms) for model, ms in models.items()}}


def row(table, name):
    line = next(line for line in table.splitlines() if line.startswith(f"{name}  "))
    return line[len(name) :].split()


def goal_line(table, start):
    return next(line for line in table.splitlines() if line.startswith(start))


def test_ratios_are_of_runs_of_one_round():
    ms = {peers.NOTEBOOK: [60, 30, 90], peers.DDP: [40, 10, 81], peers.HIGHLEVEL: [20, 10, 45]}
    table = peers.table(result(lenet=ms))
    # 256 examples in the median's 20 ms; 40/20, 10/10, 81/45 -> 1.8, where the medians' ratio is 2; 60/20, 30/10, 90/45
    spreads = ["20.0", "(10.0-45.0)", "12800", "1.80", "(1.00-2.00)", "3.00", "(2.00-3.00)"]
    assert row(table, peers.HIGHLEVEL) == [*spreads, "301", "2.3000"]
    assert row(table, peers.DDP)[3:5] == ["1.00", "(1.00-1.00)"]


def test_compile_seconds_are_those_of_the_first_round_with_nothing_compiled_before():
    table = peers.table(result(lenet={peers.DDP: [40, 40, 40]}))
    assert row(table, "DDP, 2 processes, torch.compile")[-2:] == ["9.0", "2.3000"]
    assert len(row(table, "DDP, 2 processes, torch.compile")) == len(row(table, "DDP, 2 processes, channels_last")) + 1


def test_seconds_of_compiling_are_what_the_first_steps_took_beyond_as_many_later_ones():
    job = {"warm_up": 10, "steps": 100}
    found = {"warm_up_seconds": 7.0, "seconds": [3.0], "losses": [2.0], "peak_mb": 5}
    compiled, plain = (SUBJECTS[peers.DDP + which] for which in (", torch.compile", ""))
    assert peers._step(job, compiled, found)["compile_s"] == pytest.approx(6.7)  # 10 steps of 30 ms
    assert peers._step(job, plain, found) == {"step_ms": 30, "peak_mb": 5, "loss": 2.0, "compile_s": None}


def test_goals_of_lenet_say_what_was_reached():
    ms = {
        peers.DDP: [130, 131, 120],  # 130/100
        "DDP, 2 processes, channels_last": [99, 98, 120],
        "DDP, 2 processes, torch.compile": [101, 102, 110],
        "PyTorch, 2 threads, torch.compile": [80, 70, 90],
        peers.SCRATCH: [106, 107, 90],  # 100/106
        peers.HIGHLEVEL_ALONE: [190, 191, 180],  # 190/100/2
    }
    table = peers.table(result(lenet=ms))
    ours = peers.HIGHLEVEL
    assert goal_line(table, f"{ours}, against DDP, 2 processes:").endswith("1.30 (1.20-1.31); goal 1.3: reached")
    closest = "every DDP, the closest DDP, 2 processes, channels_last"
    assert goal_line(table, f"{ours}, against {closest}").endswith("0.99 (0.98-1.20); goal 1: not reached")
    assert goal_line(table, f"{ours}, against PyTorch, 2 threads, torch.compile:").endswith("0.80 (0.70-0.90)")
    assert goal_line(table, peers.SCRATCH + ", against").endswith("0.94 (0.93-1.11); goal 0.95: not reached")
    assert goal_line(table, f"efficiency: {ours}").endswith("0.95 (0.90-0.95); goal 0.95: reached")


def test_goals_of_resnet18_count_every_pytorch():
    ms = {peers.DDP: [115, 116, 90], "PyTorch, 2 threads, torch.compile": [99, 98, 200]}
    table = peers.table(result(resnet18=ms))
    ours = f"{peers.HIGHLEVEL}, against"
    assert goal_line(table, f"{ours} DDP, 2 processes").endswith("1.15 (0.90-1.16); goal 1.15: reached")
    closest = goal_line(table, f"{ours} all of PyTorch, the closest PyTorch, 2 threads, torch.compile")
    assert closest.endswith("0.99 (0.98-2.00); goal 1: not reached")
    assert "scratch" not in table


def test_a_result_is_the_same_from_json_and_becomes_a_picture():
    found = result(lenet={peers.DDP: [40, 41, 42]}, resnet18={peers.DDP: [500, 510, 520]})
    learned = {s.name: {"seconds": [9.0, 8.0], "accuracy": [0.1, 0.65]} for s in peers.LEARNERS}
    found["accuracy"] = {**peers.accuracy_job(2, 1), "runs": learned}
    again = json.loads(json.dumps(found))
    assert peers.table(again) == peers.table(found)
    assert peers.table(found).splitlines()[-1].split()[-3:] == ["8.5", "0.1000", "0.6500"]
    picture = io.BytesIO()
    peers.draw(again, picture)
    assert picture.getvalue().startswith(b"\x89PNG")


def test_without_pytorch_or_a_compiler_for_it_nothing_begins(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Error, match="make bench-peers"):
        peers.run()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Error, match="no-such-compiler"):
        peers.run()


def short(**changed):
    """25 steps so far off 0.2 that the loss leaves ln 10, where it stays for an epoch else; and 100 test examples."""
    job = {**peers.accuracy_job(1, seed=7), "dataset": "synthetic", "limit": 400, "batch_size": 16, "lr": 1.0}
    return {**job, **changed}


def test_what_fails_and_what_takes_too_long_is_named(monkeypatch, tmp_path):
    scratch = SUBJECTS[peers.SCRATCH]
    with pytest.raises(Error, match="scratch, 2 contexts failed: .*unknown data set 'none'"):
        peers.in_own_processes(scratch, short(dataset="none"), tmp_path)
    monkeypatch.setattr(peers, "WORKER_SECONDS", 0.1)
    with pytest.raises(Error, match="scratch, 2 contexts was not done after 0.1 s"):
        peers.in_own_processes(scratch, short(), tmp_path)


def test_what_torch_compile_left_as_it_is_does_not_pass_for_compiled(tmp_path):
    uncompiled = SUBJECTS[peers.SCRATCH]._replace(compiled=True)
    with pytest.raises(Error, match="torch.compile left the network as it is"):
        peers.in_own_processes(uncompiled, short(), tmp_path)


@pytest.fixture(scope="module")
def trained():
    """What a subject comes to in `short`, each run once."""
    found = {}

    def train(name):
        if name not in found:
            found[name] = peers.in_own_processes(SUBJECTS[name], short(), Path("unused"))
        return found[name]

    return train


CHANNELS_LAST = pytest.param(f"{peers.DDP}, channels_last", marks=needs_torch)


@pytest.mark.parametrize("name", (peers.NOTEBOOK, peers.HIGHLEVEL, CHANNELS_LAST))
def test_every_subject_trains_alike(trained, name):
    ours, other = trained(peers.SCRATCH), trained(name)
    assert abs(ours["losses"][0] - np.log(10)) > 0.01
    assert other["losses"] == ([None] if name == peers.NOTEBOOK else pytest.approx(ours["losses"], rel=3e-6))
    # every image still gets the same class: what the scores are is mostly the last layer's biases
    labels = datasets.synthetic(400, 100, seed=7).test_labels
    assert other["accuracy"] == ours["accuracy"]
    assert ours["accuracy"][0] in np.bincount(labels) / 100
    assert 50 < other["peak_mb"] < 3000 and 0 < other["seconds"][0] < 60


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("subject", peers.LEARNERS, ids=lambda subject: subject.name)
def test_every_learner_learns_and_its_accuracy_says_so(subject):
    first, second = peers.in_own_processes(subject, short(limit=4000, batch_size=8, lr=0.2, epochs=2), Path("unused"))[
        "accuracy"
    ]
    assert 0 <= first <= 1 and second > 0.9


@pytest.mark.parametrize("name", (peers.SCRATCH, pytest.param(peers.DDP, marks=needs_torch)))
def test_ctrl_c_ends_all_processes_at_once(name):
    long = short(limit=60000)
    code = f"""
        from pathlib import Path
        from bench import peers
        subject = next(s for s in peers.SUBJECTS["lenet"] if s.name == {name!r})
        peers.in_own_processes(subject, {long!r}, Path("unused"))
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE, text=True) as parent:
        by = time.monotonic() + 30
        while len(workers := children(parent.pid)) < (2 if name == peers.DDP else 1):
            assert time.monotonic() < by and parent.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        parent.send_signal(signal.SIGINT)
        said = parent.communicate(timeout=10)[1]
    assert parent.returncode == -signal.SIGINT and said.strip().endswith("KeyboardInterrupt")
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]


def children(pid):
    """The processes whose parent is pid: the second field after the name in /proc/PID/stat."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            pass
    return found


# Gradients are sums over the examples. In float64, rounding hides nothing; in float32, which is what training computes
# in, a ReLU of ResNet-18 that is almost 0 can fall on the other side, and changes gradients before it by a percent.
OURS = """
    import sys
    import gluon_mgpu
    gluon_mgpu.configure(1)
    import mxnet as mx
    import numpy as np
    from gluon_mgpu import highlevel
    from gluon_mgpu.training import datasets, loop
    from bench import peers
    from gluon_mgpu.training.settings import Settings

    model, file = sys.argv[1:]
    images, labels = datasets.synthetic(4, 1, seed=3)[1:3]
    X, y = next(loop.batches(images, labels, 4))
    replicas = highlevel.Replicas([mx.cpu()], Settings(model=model))
    rng = np.random.default_rng(0)
    parameters = {
        name: p + 0.1 * rng.standard_normal(p.shape, np.float32) if p.ndim == 1 and "running" not in name else p
        for name, p in peers.initial(replicas.parameters(), 5).items()
    }
    replicas.load(parameters, {})
    found = {"X": X.asnumpy(), "y": y.asnumpy()}
    for kind in ("float32", "float64"):
        replicas.net.cast(kind)
        losses = highlevel.forward_backward(replicas.net, [X.astype(kind)], [y.astype(kind)])
        found[f"losses {kind}"] = losses[0].asnumpy()
        for name, gradient in replicas.gradients().items():
            found[f"parameter {name}"] = parameters[name]
            found[f"gradient {kind} {name}"] = gradient
    np.savez(file, **found)
"""
PYTORCHS = """
    import json
    import sys
    import numpy as np
    import torch
    from bench import torch_peers

    assert "mxnet" not in sys.modules
    model, file = sys.argv[1:]
    ours = np.load(file)
    differences = {}
    for kind in ("float32", "float64"):
        net = torch_peers.network(model, seed=0)
        torch_peers.load(net, {name: ours[name] for name in ours if name.startswith("parameter")})
        net.to(getattr(torch, kind))
        scores = net(torch.from_numpy(ours["X"]).to(getattr(torch, kind)))
        losses = torch.nn.functional.cross_entropy(scores, torch.from_numpy(ours["y"]).long(), reduction="none")
        losses.sum().backward()
        gradients = [p.grad.numpy() for p in net.parameters()]
        of_ours = [ours[name] for name in ours if name.startswith(f"gradient {kind}")]
        assert [g.shape for g in of_ours] == [g.shape for g in gradients]
        assert {g.dtype.name for g in of_ours} == {kind}
        whole = np.sqrt(sum((g**2).sum() for g in gradients))
        differences[kind] = {
            "loss": float(np.abs(ours[f"losses {kind}"] - losses.detach().numpy()).max()),
            "all": float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(of_ours, gradients))) / whole),
            # of those that are no rounding error: a bias before batch normalization has no gradient
            "each": max(
                float(np.linalg.norm(a - b) / np.linalg.norm(b))
                for a, b in zip(of_ours, gradients)
                if np.linalg.norm(b) > 1e-8 * whole
            ),
        }
    print(json.dumps(differences))
"""


@needs_torch
@pytest.mark.parametrize("model", ("lenet", "resnet18"))
def test_pytorchs_network_has_our_loss_and_our_gradients(model, tmp_path):
    for code in (OURS, PYTORCHS):
        command = [sys.executable, "-c", textwrap.dedent(code), model, str(tmp_path / "ours.npz")]
        done = subprocess.run(command, env=peers._environment(SUBJECTS[peers.SCRATCH], tmp_path), capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
    differences = json.loads(done.stdout)
    assert max(differences["float64"].values()) < 1e-12
    in_float32 = differences["float32"]
    assert in_float32["loss"] < 1e-4
    assert in_float32["all"] < (1e-4 if model == "lenet" else 0.03)


@needs_torch
@pytest.mark.slow
def test_all_of_lenet_is_measured_and_its_subjects_have_the_same_loss():
    found = peers.run(models=("lenet",), rounds=1, steps=10)
    runs = found["models"]["lenet"]["runs"]
    losses = [of_it[0]["loss"] for name, of_it in runs.items() if name != peers.NOTEBOOK]
    assert len(losses) == len(SUBJECTS) - 1 and max(losses) - min(losses) < 3e-6
    assert [name for name, of_it in runs.items() if of_it[0]["compile_s"]] == [
        s.name for s in SUBJECTS.values() if s.compiled
    ]
    assert all(name in peers.table(found) for name in runs)
