"""Runs in which every process has its own machine (`machines`), so that all data crosses a network.

`make test-network` runs these tests.
"""

import json
import os
import re
import sys
import textwrap
import time
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import machines
import mxnet as mx
import pytest
import runs
from runs import write_program
from test_workers import ARGS, RTOL, STEPS, apart, train_alone

from gluon_mgpu import IMPLS, implementations
from gluon_mgpu.runtime import engine

lacks = machines.missing()
pytestmark = [pytest.mark.network, pytest.mark.skipif(bool(lacks), reason=lacks or "")]

WORKERS, SERVERS, PORT = 3, 2, 9091
LONG = ["--device", "cpu", "--dataset", "synthetic", "--limit", 20000, "--epochs", 50, "--seed", 3]
# Stands for ssh, with which Horovod reaches the other machines: HOST COMMAND, with options before and after HOST.
SSH = """
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
while [ "$1" = -o ]; do shift 2; done
exec nsenter -t "$(cat "{folder}/pid.$host")" -n -m -u -- sh -c "$*"
"""
# Stands for srun: runs a command on every node.
SRUN = """
while [ "${{1#-}}" != "$1" ]; do shift; done
for node in 0 1 2; do
    nsenter -t "$(cat "{folder}/pid.node$node")" -n -m -u -- sh -c 'cd {root} && exec "$@"' sh \\
        env SLURM_PROCID=$node "$@" || touch "{folder}/failed" &
done
wait
test ! -e "{folder}/failed"
"""


@pytest.fixture
def build(tmp_path):
    with ExitStack() as networks:

        def build(n, slow=False):
            made = machines.Network(n, tmp_path, slow)
            networks.callback(made.end)
            return made

        yield build


def environment(**given):
    users = engine.users_environment()
    return {name: value for name, value in users.items() if not name.startswith(("DMLC_", "HOROVOD_"))} | given


def programs(folder, **scripts):
    """A folder with executable scripts, for PATH."""
    for name, code in scripts.items():
        write_program(folder / "programs" / name, code)
    return f"{folder}/programs:{Path(sys.executable).parent}:{os.environ['PATH']}"


def start(network, kvstore, folder, *args):
    """`start_program` with train.py."""
    return start_program(network, kvstore, folder, [*runs.TRAIN, "--kvstore", kvstore, "--out", folder / "run", *args])


def start_program(network, kvstore, folder, program):
    """{name: Popen}: with dist_sync, processes on the machines in turn; with Horovod, horovodrun on the first one."""
    if kvstore == "horovod":
        path = programs(folder, ssh=SSH.format(folder=folder))
        hosts = ",".join(f"{machine.name}:1" for machine in network.machines)
        run = [runs.HOROVODRUN, "--gloo", "--network-interfaces", "eth0", "-np", len(network.machines), "-H", hosts]
        given = environment(PATH=path, HOME=str(folder), PYTHONUNBUFFERED="1")
        return {"horovodrun": network.machines[0].start([*run, *program], given)}
    roles = [("scheduler", 0), *(("server", i) for i in range(SERVERS)), *(("worker", i) for i in range(WORKERS))]
    started = {}
    for machine, (role, rank) in zip(cycle(network.machines), roles):
        name = role if role == "scheduler" else f"{role} {rank}"
        started[name] = machine.start(program, dist_sync(network.addresses[0], role, rank))
    return started


def dist_sync(root, role, rank=0):
    """The environment of a process, as docs/distributed.md says."""
    counts = {"DMLC_NUM_WORKER": str(WORKERS), "DMLC_NUM_SERVER": str(SERVERS)}
    address = {"DMLC_PS_ROOT_URI": root, "DMLC_PS_ROOT_PORT": str(PORT)}
    return environment(**counts, **address, DMLC_ROLE=role, DMLC_TASK_ID=str(rank), PYTHONUNBUFFERED="1")


def machines_for(kvstore):
    return 1 + SERVERS + WORKERS if kvstore == "dist_sync" else WORKERS


def ends(processes, seconds):
    """{name: (status, standard output, standard error)}"""
    until = time.monotonic() + seconds
    ended = {}
    for name, process in processes.items():
        out, err = process.communicate(timeout=max(0.1, until - time.monotonic()))
        ended[name] = process.returncode, out, err
    return ended


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folders of runs in this process, by implementation."""
    return {impl: train_alone(impl, 1, tmp_path_factory.mktemp("alone") / "run") for impl in IMPLS}


@pytest.mark.parametrize("impl, slow", [("scratch", False), ("highlevel", False), ("highlevel", True)])
@pytest.mark.parametrize("kvstore", runs.ENGINES)
def test_gradients_cross_the_network_and_train_as_in_one_process(build, tmp_path, kvstore, impl, slow, alone, capsys):
    network = build(machines_for(kvstore), slow)
    began = time.monotonic()
    ended = ends(start(network, kvstore, tmp_path, "--impl", impl, *ARGS), runs.HORIZON)
    seconds = time.monotonic() - began
    assert {status for status, _, _ in ended.values()} == {0}, ended
    assert apart(tmp_path / "run", alone[impl]) < RTOL

    size = sum(array.nbytes for array in implementations.replicas(impl, [mx.cpu()]).parameters().values())
    part = 1 if kvstore == "dist_sync" else 2 * (WORKERS - 1) / WORKERS  # push and pull; ring allreduce
    # The busiest link is a server's: in from all workers, then out to all workers. Horovod's workers send and receive.
    busiest = 2 * WORKERS / SERVERS if kvstore == "dist_sync" else part
    computed = (STEPS + 1) * size * part  # each way; worker 0's parameters are sent once, like gradients
    most = 1.05 * computed + 1e6 * seconds  # Horovod's workers compare what is ready every millisecond: 0.27 MB/s
    for machine in network.machines[-WORKERS:]:
        for counted in machine.bytes():
            assert computed < counted < most
    if kvstore == "dist_sync":
        for server in network.machines[1 : 1 + SERVERS]:
            assert server.bytes() == pytest.approx([WORKERS / SERVERS * computed] * 2, rel=0.1)
    for machine in network.machines:
        assert max(machine.bytes("lo")) < 0.01 * computed
        assert max(machine.bytes("idle")) < 0.01 * computed  # ps-lite's own choice is the first interface

    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    each = [[count / (STEPS + 1) / 1000 for count in machine.bytes()] for machine in network.machines]
    with capsys.disabled():
        print(
            f"\n{kvstore}, {impl}, {WORKERS} workers, {'slow' if slow else 'fast'} links\n"
            f"  KB per step, sent/received by each machine: {', '.join('{:.0f}/{:.0f}'.format(*two) for two in each)}\n"
            f"  KB per step of a worker, computed, each way: {size * part / 1000:.0f}\n"
            f"  ms per step: {metrics['train_seconds'] / STEPS * 1000:.0f}, "
            f"at least {busiest * size * 8 / machines.SLOW_BITS * 1000:.0f} on slow links"
        )


DOCS = runs.ROOT / "docs"
MANIFEST = (DOCS / "cluster/kubernetes.yaml").read_text()
SCRIPTS = {
    "by hand": re.search(r"```bash\n(# On each machine.*?)```", (DOCS / "distributed.md").read_text(), re.DOTALL)[1],
    "Slurm": (DOCS / "cluster/slurm.sh").read_text(),
    "Kubernetes": textwrap.dedent(re.search(r"        - \|\n(.*)", MANIFEST, re.DOTALL)[1]),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_of_the_docs_train_on_several_machines(name, build, tmp_path, alone):
    network = build(3 if name == "Slurm" else 2)
    addresses = "".join(f"{a} {m.name}\n" for a, m in zip(network.addresses, network.machines))
    for machine in network.machines:  # names as a cluster has them
        hosts = tmp_path / f"hosts.{machine.name}"
        hosts.write_text(f"127.0.0.1 localhost\n{addresses}{network.addresses[0]} train-0.train\n")
    options = " ".join(map(str, ["--kvstore dist_sync", *ARGS, "--out", tmp_path / "run"]))
    script = re.sub(r"--kvstore dist_sync --out \S+(?=\")", options, SCRIPTS[name])
    srun, scontrol = SRUN.format(folder=tmp_path, root=runs.ROOT), "printf 'node%d\\n' 0 1 2"
    given = environment(PATH=programs(tmp_path, srun=srun, scontrol=scontrol))
    if name == "by hand":
        script = script.replace("10.0.0.1", network.addresses[0])
        scripts = [(script.replace("DMLC_TASK_ID=0", f"DMLC_TASK_ID={i}", 1), given) for i in range(2)]
    elif name == "Slurm":
        slurm = {"SLURM_JOB_NODELIST": "node[0-2]", "SLURM_NNODES": "3", "SLURM_CPUS_ON_NODE": "1"}
        scripts = [(script, {**given, **slurm})]
    else:
        given.update(re.findall(r"- \{name: (\w+), value: \"?([^\"}]+)\"?\}", MANIFEST))
        scripts = [(script, {**given, "JOB_COMPLETION_INDEX": str(i)}) for i in range(2)]
    lines = [(["bash", "-c", f"cd {runs.ROOT}\n{script}"], own) for script, own in scripts]
    started = {i: network.machines[i].start(*line) for i, line in enumerate(lines)}
    ended = ends(started, runs.HORIZON)
    assert {status for status, _, _ in ended.values()} == {0}, ended
    assert f"as worker 0 of {len(network.machines)}" in ended[0][1]
    assert apart(tmp_path / "run", alone["highlevel"]) < RTOL


@pytest.mark.parametrize("lost", ["worker 1", "server 0"])
def test_a_cut_link_ends_every_process_and_worker_0_names_who_was_lost(build, tmp_path, lost):
    network = build(machines_for("dist_sync"))
    processes = start(network, "dist_sync", tmp_path, *LONG)
    assert processes["worker 0"].stdout.readline().startswith("running on:")
    time.sleep(2)  # so that a step is in progress
    network.cut(list(processes).index(lost))
    ended = ends(processes, 30)
    assert {status for status, _, _ in ended.values()} == {1}
    errors = {name: runs.errors(err) for name, (_, _, err) in ended.items()}
    assert {name: len(lines) for name, lines in errors.items() if lines} == {"worker 0": 1, lost: 1}
    assert f"{lost} (node" in errors["worker 0"][0] and "scheduler" in errors[lost][0]


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("kvstore", runs.ENGINES[1:])
def test_a_cut_link_ends_every_process_that_horovodrun_started(build, tmp_path, kvstore, lost):
    network = build(WORKERS)
    process = start(network, kvstore, tmp_path, *LONG)["horovodrun"]
    assert "running on:" in process.stdout.readline()
    time.sleep(2)
    network.cut(lost)
    status, _, err = ends({"horovodrun": process}, 30)["horovodrun"]
    assert status == 1 and any(re.search(rf"worker {lost}\b", line) for line in runs.errors(err)), err
    assert not runs.processes(str(tmp_path / "run"))


def test_a_scheduler_that_other_machines_cannot_reach_says_so(build):
    process = build(1).machines[0].start([*runs.TRAIN, "--kvstore", "dist_sync"], dist_sync("node0", "scheduler"))
    assert "127.0.1.1" in process.stderr.readline()
