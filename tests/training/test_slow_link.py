"""Two workers on different machines: network namespaces with a slow link between them."""

import json
import os
import shutil

import pytest
import runs
from test_workers import SYNTHETIC, arrays, bits, command

from gluon_mgpu import train
from gluon_mgpu.support import subprocesses

POSSIBLE = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
pytestmark = [
    runs.needs_mpi,
    pytest.mark.slow,
    pytest.mark.skipif(not POSSIBLE, reason="needs root, ip and tc (Debian: iproute2)"),
]
BITS_PER_SECOND = 20e6
STEPS = 4
MACHINES = {f"mgpu{os.getpid()}-{i}": f"10.99.0.{i}" for i in (1, 2)}  # {network namespace: address}
# Stands for ssh, with which mpiexec starts programs on the other machine: [OPTIONS] ADDRESS COMMAND.
SSH = f"""while [ "${{1#-}}" != "$1" ]; do shift; done
machine=mgpu{os.getpid()}-${{1##*.}}
shift
exec ip netns exec "$machine" sh -c "$*"
"""


def ip(*words):
    done = runs.finished("ip", *words)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


@pytest.fixture
def machines():
    """The names of MACHINES, which are removed at the end."""
    names = [*MACHINES]
    if runs.finished("ip", "netns", "add", names[0]).returncode:
        pytest.skip("needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in MACHINES.items():
            ip("-netns", name, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-netns", name, "link", "set", link, "up")
            rate = f"tbf rate {BITS_PER_SECOND:.0f}bit burst 20k limit 16mb".split()
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", *rate)
        for name in names:
            runs.wait(lambda name=name: '"operstate":"UP"' in ip("-netns", name, "-json", "link", "show", "eth0"))
        yield names
    finally:
        for name in names:
            runs.finished("ip", "netns", "delete", name)


def sent(machine, link):
    return json.loads(ip("-netns", machine, "-json", "-stats", "link", "show", link))[0]["stats64"]["tx"]["bytes"]


def test_gradients_cross_a_slow_link_and_train_as_in_one_process(machines, tmp_path):
    folder, ssh = tmp_path / "run", tmp_path / "ssh"
    runs.write_program(ssh, SSH)
    hosts = ["-hosts", ",".join(MACHINES.values()), "-localhost", MACHINES[machines[0]]]
    launcher = ["-launcher", "ssh", "-launcher-exec", ssh]
    program, *words = runs.mpiexec((2, *command(impl="scratch", limit=64 * STEPS, out=folder)))
    # The namespaces share memory, which MPI would use instead of the network.
    environment = {
        **subprocesses.users_environment(),
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    run = ["ip", "netns", "exec", machines[0], program, *hosts, *launcher, *words]
    done = runs.finished(*run, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    alone = {**SYNTHETIC, "impl": "scratch", "limit": 64 * STEPS, "gpus": 2, "out": tmp_path / "alone"}
    train(**alone)
    assert bits(folder) == bits(tmp_path / "alone")

    size = sum(array.nbytes for array in arrays(folder).values())
    for machine in machines:
        assert STEPS * size < sent(machine, "eth0") < 1.2 * (STEPS + 1) * size  # the parameters are also sent once
        assert sent(machine, "lo") < 0.1 * size
