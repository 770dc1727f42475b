"""Runs of several workers, each process on a machine of its own: what crosses a network here really crosses one.

`make test-network` runs these. `machines` makes the machines.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import machines
import mxnet as mx
import pytest
import runs
from test_distributed import ARGS, BATCH, MODULES, OPTIONS, STEPS, apart, parameters

from gluon_mgpu.runtime import engine

lacks = machines.missing()
pytestmark = [pytest.mark.network, pytest.mark.skipif(bool(lacks), reason=lacks or "")]

WORKERS, SERVERS, PORT = 3, 2, 9091
LONG = ["--dataset", "synthetic", "--limit", 20000, "--epochs", 50, "--seed", 3]
# Horovod reaches the other machines by ssh: HOST COMMAND, with options before and after HOST.
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
while [ "$1" = -o ]; do shift 2; done
exec nsenter -t "$(cat "{folder}/pid.$host")" -n -m -u -- sh -c "$*"
"""


@pytest.fixture
def build(tmp_path):
    made = []

    def build(n, slow=False):
        made.append(machines.Network(n, tmp_path, slow))
        return made[-1]

    yield build
    for network in made:
        network.end()


def environment(**given):
    users = engine.users_environment()
    return {name: value for name, value in users.items() if not name.startswith(("DMLC_", "HOROVOD_"))} | given


def start(network, kvstore, folder, *args):
    """{name: Popen}: what a user starts; of dist_sync a process on each machine, of Horovod horovodrun on the first."""
    train = [*runs.TRAIN, "--kvstore", kvstore, "--device", "cpu", "--out", folder / "run", *args]
    if kvstore == "horovod":
        programs = folder / "programs"
        programs.mkdir()
        (programs / "ssh").write_text(SSH.format(folder=folder))
        (programs / "ssh").chmod(0o755)
        given = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(folder), "PYTHONUNBUFFERED": "1"}
        hosts = ",".join(f"{machine.name}:1" for machine in network.machines)
        run = [runs.HOROVODRUN, "--gloo", "--network-interfaces", "eth0", "-np", len(network.machines), "-H", hosts]
        return {"horovodrun": network.machines[0].start([*run, *train], environment(**given))}
    everyones = {
        "DMLC_PS_ROOT_URI": network.addresses[0],
        "DMLC_PS_ROOT_PORT": str(PORT),
        "DMLC_NUM_WORKER": str(WORKERS),
        "DMLC_NUM_SERVER": str(SERVERS),
    }
    roles = [("scheduler", 0), *(("server", i) for i in range(SERVERS)), *(("worker", i) for i in range(WORKERS))]
    started = {}
    for machine, (role, number) in zip(network.machines, roles):
        task = {} if role == "scheduler" else {"DMLC_TASK_ID": str(number)}
        name = " ".join((role, *task.values()))
        own = environment(**everyones, **task, DMLC_ROLE=role, PYTHONUNBUFFERED="1")
        started[name] = machine.start(train, own)
    return started


def on(network, kvstore):
    """The machines of the workers."""
    return network.machines[-WORKERS:] if kvstore == "dist_sync" else network.machines


def machines_for(kvstore):
    return 1 + SERVERS + WORKERS if kvstore == "dist_sync" else WORKERS


def ends(processes, seconds):
    """{name: (status, standard output, standard error)}"""
    until = time.monotonic() + seconds
    return {
        name: (process.returncode, out, err)
        for name, process in processes.items()
        for out, err in [process.communicate(timeout=max(0.1, until - time.monotonic()))]
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folders of runs in this process, by implementation."""
    made = {}
    for impl, module in MODULES.items():
        made[impl] = tmp_path_factory.mktemp("alone") / "run"
        module.train(1, BATCH, 0.2, device="cpu", out=str(made[impl]), **OPTIONS)
    return made


@pytest.mark.parametrize("slow", [False, True], ids=["free", "slow"])
@pytest.mark.parametrize("impl", MODULES)
@pytest.mark.parametrize("kvstore", runs.ENGINES)
def test_gradients_cross_the_network_and_training_is_that_of_one_process(
    build, tmp_path, kvstore, impl, slow, alone, capsys
):
    network = build(machines_for(kvstore), slow)
    began = time.monotonic()
    ended = ends(start(network, kvstore, tmp_path, "--impl", impl, *ARGS), runs.HORIZON)
    seconds = time.monotonic() - began
    assert {status for status, _, _ in ended.values()} == {0}, ended
    assert apart(parameters(tmp_path / "run"), parameters(alone[impl]), impl) < 1e-4

    mx.random.seed(OPTIONS["seed"])
    arrays = MODULES[impl].Replicas([mx.cpu()]).parameters()
    size = sum(array.nbytes for array in arrays.values())
    part = 1 if kvstore == "dist_sync" else 2 * (WORKERS - 1) / WORKERS  # push, and pull; ring allreduce
    computed = (STEPS + 1) * size * part  # each way; worker 0's parameters are sent once as gradients are
    # Horovod's workers ask one another every millisecond what is ready; here it was 0.27 MB/s for an idle worker.
    most = 1.05 * computed + 1e6 * seconds
    for machine in on(network, kvstore):
        for counted in machine.bytes():
            assert computed < counted < most
    if kvstore == "dist_sync":
        for server in network.machines[1 : 1 + SERVERS]:  # that share alike
            assert server.bytes() == pytest.approx([WORKERS / SERVERS * computed] * 2, rel=0.1)
    for machine in network.machines:
        assert max(machine.bytes("lo")) < 0.01 * computed  # horovodrun to worker 0; a process of ps-lite to itself
        assert max(machine.bytes("idle")) < 0.01 * computed  # by itself, ps-lite takes the first interface

    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    each = [[count / (STEPS + 1) / 1000 for count in machine.bytes()] for machine in network.machines]
    with capsys.disabled():
        print(
            f"\n{kvstore}, {impl}, {WORKERS} workers, cables: {network.how}\n"
            f"  kB a step, sent/received by each machine: {', '.join('{:.0f}/{:.0f}'.format(*two) for two in each)}\n"
            f"  kB a step of a worker, computed, each way: {size * part / 1000:.0f}\n"
            f"  ms a step: {metrics['train_seconds'] / STEPS * 1000:.0f}; by the slow cable at least "
            f"{least_seconds(kvstore, size) * 1000:.0f}"
        )


def least_seconds(kvstore, size):
    """Seconds that a step's gradients take on slow cables, where nothing else takes any. size: bytes of them."""
    if kvstore == "horovod":
        return 2 * (WORKERS - 1) * (size / WORKERS * 8 / machines.BITS + machines.DELAY)
    # Through the cable of a server: in from all workers, then out to all workers.
    return 2 * (WORKERS * size / SERVERS * 8 / machines.BITS + machines.DELAY)


PAGE = (runs.ROOT / "docs/distributed.md").read_text()
SCRIPTS = {
    "by hand": re.search(r"```bash\n(# On each machine.*?)```", PAGE, re.DOTALL)[1],
    "Slurm": re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", PAGE, re.DOTALL)[1],
    "Kubernetes": textwrap.dedent(re.search(r"        - \|\n(.*?)```", PAGE, re.DOTALL)[1]),
}
SRUN = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
for node in 0 1 2; do
    nsenter -t "$(cat "{folder}/pid.node$node")" -n -m -u -- sh -c 'cd {root} && exec "$@"' sh \\
        env SLURM_PROCID=$node "$@" || touch "{folder}/failed" &
done
wait
test ! -e "{folder}/failed"
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_of_the_docs_train_on_machines_of_their_own(name, build, tmp_path, alone):
    network = build(3 if name == "Slurm" else 2)
    addresses = "".join(f"{a} {m.name}\n" for a, m in zip(network.addresses, network.machines))
    for machine in network.machines:  # names as a cluster has them
        hosts = tmp_path / f"hosts.{machine.name}"
        hosts.write_text(f"127.0.0.1 localhost\n{addresses}{network.addresses[0]} train-0.train\n")
    options = " ".join(map(str, ["--kvstore dist_sync --device cpu", *ARGS, "--out", tmp_path / "run"]))
    script = re.sub(r"--kvstore dist_sync --out \S+(?=\")", options, SCRIPTS[name])
    programs = tmp_path / "programs"
    programs.mkdir()
    for program, text in (
        ("srun", SRUN.format(folder=tmp_path, root=runs.ROOT)),
        ("scontrol", "#!/bin/sh\nprintf 'node%d\\n' 0 1 2\n"),
    ):
        (programs / program).write_text(text)
        (programs / program).chmod(0o755)
    given = environment(PATH=f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    if name == "by hand":
        script = script.replace("10.0.0.1", network.addresses[0])
        scripts = [(script.replace("DMLC_TASK_ID=0", f"DMLC_TASK_ID={i}", 1), given) for i in range(2)]
    elif name == "Slurm":
        scripts = [
            (script, {**given, "SLURM_JOB_NODELIST": "node[0-2]", "SLURM_NNODES": "3", "SLURM_CPUS_ON_NODE": "1"})
        ]
    else:
        given.update(re.findall(r"- \{name: (\w+), value: \"?([^\"}]+)\"?\}", PAGE))
        scripts = [(script, {**given, "JOB_COMPLETION_INDEX": str(i)}) for i in range(2)]
    started = {
        i: network.machines[i].start(["bash", "-c", f"cd {runs.ROOT}\n{script}"], own)
        for i, (script, own) in enumerate(scripts)
    }
    ended = ends(started, runs.HORIZON)
    assert {status for status, _, _ in ended.values()} == {0}, ended
    assert f"as worker 0 of {len(network.machines)}" in ended[0][1]
    assert apart(parameters(tmp_path / "run"), parameters(alone["highlevel"]), "highlevel") < 1e-4


@pytest.mark.parametrize("kvstore, pulled", [("dist_sync", "worker 1"), ("dist_sync", "server 0")])
def test_a_pulled_cable_ends_every_process_with_a_line_that_names_who_was_lost(build, tmp_path, kvstore, pulled):
    network = build(machines_for(kvstore))
    processes = start(network, kvstore, tmp_path, *LONG)
    assert processes["worker 0"].stdout.readline().startswith("running on:")
    time.sleep(2)  # so that it is in the middle of a step
    network.pull(list(processes).index(pulled))
    ended = ends(processes, 30)
    assert {status for status, _, _ in ended.values()} == {1}
    for name, (_, _, err) in ended.items():
        who = "the scheduler was" if name == pulled else f"{pulled} (node{list(processes).index(pulled)}, "
        found = runs.lines(err)
        assert len(found) == 1 and who in found[0] and "lost: it has given no sign of life for 10 s" in found[0]


@pytest.mark.parametrize("pulled", [0, 1])
@pytest.mark.parametrize("kvstore", runs.ENGINES[1:])
def test_a_pulled_cable_ends_every_process_that_horovodrun_started(build, tmp_path, kvstore, pulled):
    network = build(WORKERS)
    process = start(network, kvstore, tmp_path, *LONG)["horovodrun"]
    assert "running on:" in process.stdout.readline()
    time.sleep(2)
    network.pull(pulled)
    status, _, err = ends({"horovodrun": process}, 30)["horovodrun"]
    assert status == 1
    named = (f"worker {pulled} (node{pulled}, ", f"worker {pulled} was lost")
    assert any(name in line for line in runs.lines(err) for name in named), err
    assert not runs.processes(str(tmp_path / "run"))


@pytest.mark.parametrize(
    "address, said",
    [
        ("10.99.0.77", "nobody answers at 10.99.0.77, port 9092 (No route to host)"),
        ("node77", "the host node77 does not resolve"),
    ],
)
def test_a_wrong_address_of_the_scheduler_is_said_in_one_line(build, tmp_path, address, said):
    given = {"DMLC_PS_ROOT_URI": address, "DMLC_PS_ROOT_PORT": str(PORT), "DMLC_ROLE": "worker", "DMLC_TASK_ID": "1"}
    network = build(1)
    train = [*runs.TRAIN, "--kvstore", "dist_sync", "--device", "cpu", "--dataset", "synthetic"]
    process = network.machines[0].start(train, environment(DMLC_NUM_WORKER="2", DMLC_NUM_SERVER="1", **given))
    assert said in process.stderr.readline()


def test_a_scheduler_that_no_other_machine_reaches_says_so(build):
    network = build(1)
    given = {"DMLC_PS_ROOT_URI": "node0", "DMLC_PS_ROOT_PORT": str(PORT), "DMLC_ROLE": "scheduler"}
    process = network.machines[0].start(
        [*runs.TRAIN, "--kvstore", "dist_sync"], environment(DMLC_NUM_WORKER="2", DMLC_NUM_SERVER="1", **given)
    )
    assert "node0 is 127.0.1.1 to this machine" in process.stderr.readline()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_the_machines_however_their_maker_ends(tmp_path, how):
    make = (
        "import machines, sys, time; network = machines.Network(2, sys.argv[1]);"
        "network.machines[1].start(['sleep', '345'], None); print(*network.pids(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", make, str(tmp_path)],
        cwd=runs.ROOT / "tests",
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as maker:
        before = {f"/proc/{pid}/ns/net" for pid in maker.stdout.readline().split()}
        assert len(before) == 3 and all(map(os.path.exists, before))
        maker.send_signal(how)
    for _ in range(100):
        left = [name for name in before if os.path.exists(name)]
        if not left:
            break
        time.sleep(0.1)
    assert not left
