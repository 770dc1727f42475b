"""Machines for the tests: network namespaces, each with a name, an address and a link to one switch.

Each machine has a holder: a process that reads a pipe from this process, so that it ends when this process ends, for
whatever reason. The holder is the first process of its PID namespace: when it ends, everything in the namespace ends,
and the kernel removes the namespaces and links.
"""

import json
import os
import shutil
import subprocess

NEEDED = ("ip", "tc", "unshare", "nsenter")
SLOW_BITS = 100e6  # bits per second, each way, of a slow link
PIECE = 16384  # bytes that a slow link carries at a time
HOLD = 'hostname "$1" && mount --bind "$2" /etc/hosts && read pid rest < /proc/self/stat && echo $pid && exec cat'


def missing():
    """What this machine lacks for the tests, as one line, or None."""
    lacks = ["root"] if os.geteuid() else []
    lacks += [f"`{program}`" for program in NEEDED if not shutil.which(program)]
    return f"make test-network needs {', '.join(lacks)} (Debian: iproute2, util-linux)" if lacks else None


class Machine:
    """hosts: the file that is its /etc/hosts."""

    def __init__(self, name, hosts):
        self.name, self.started = name, []
        unshare = "unshare --net --mount --uts --pid --fork --kill-child sh -c".split()
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.holder = subprocess.Popen([*unshare, HOLD, "sh", name, str(hosts)], **streams)
        self.pid = self.holder.stdout.readline().strip()
        if not self.pid:
            self.holder.wait()
            raise OSError("cannot create namespaces: root with CAP_SYS_ADMIN and CAP_NET_ADMIN is needed")
        self.enter = ["nsenter", "-t", self.pid, "-n", "-m", "-u", "-p", "--"]

    def run(self, *command, **options):
        return subprocess.run([*self.enter, *command], check=True, text=True, capture_output=True, **options).stdout

    def ip(self, *lines):
        self.run("ip", "-batch", "-", input="\n".join(lines) + "\n")

    def start(self, command, environment=None):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.started.append(subprocess.Popen([*self.enter, *map(str, command)], env=environment, **streams))
        return self.started[-1]

    def bytes(self, interface="eth0"):
        """(sent, received) through an interface."""
        counted = json.loads(self.run("ip", "-json", "-s", "link", "show", interface))[0]["stats64"]
        return counted["tx"]["bytes"], counted["rx"]["bytes"]

    def end(self):
        self.holder.stdin.close()
        self.holder.wait()
        for process in self.started:
            process.communicate()


class Network:
    """n machines: node0 at 10.99.0.1, node1 at 10.99.0.2, ... slow: with links of SLOW_BITS.

    As on Debian, a machine's own name is 127.0.1.1 on the machine itself. Its first interface reaches no other machine.
    """

    def __init__(self, n, folder, slow=False):
        names, self.addresses = [f"node{i}" for i in range(n)], [f"10.99.0.{i + 1}" for i in range(n)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n")
        self.machines, self.switch = [], Machine("switch", folder / "hosts")
        for i, name in enumerate(names):
            others = [f"{self.addresses[j]} {names[j]}" for j in range(n) if j != i]
            hosts = folder / f"hosts.{name}"
            hosts.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {name}", *others, ""]))
            machine = Machine(name, hosts)
            self.machines.append(machine)
            (folder / f"pid.{name}").write_text(machine.pid)
            machine.ip("link set lo up", "link add idle type veth peer name idle-end")
            machine.ip(f"addr add 10.98.0.{i + 1}/24 dev idle", "link set idle up", "link set idle-end up")
            self.switch.ip(f"link add port{i} type veth peer name eth0 netns /proc/{machine.pid}/ns/net")
            machine.ip(f"addr add {self.addresses[i]}/24 dev eth0", "link set eth0 up")
        ports = [f"port{i}" for i in range(n)]
        self.switch.ip(*(f"link set {port} up" for port in ports))
        self.switch.ip("link add bridge type bridge", "link set bridge up")
        self.switch.ip(*(f"link set {port} master bridge" for port in ports))
        rate = f"tbf rate {SLOW_BITS / 1e6:.0f}mbit burst {PIECE + 1600} limit 16mb".split()
        links = [*((m, "eth0") for m in self.machines), *((self.switch, port) for port in ports)]
        for machine, interface in links if slow else ():
            machine.ip(f"link set {interface} gso_max_size {PIECE} gso_max_segs 64")
            machine.run("tc", "qdisc", "add", "dev", interface, "root", *rate)

    def cut(self, i):
        """Take machine i's link down."""
        self.switch.ip(f"link set port{i} down")

    def end(self):
        for machine in (*self.machines, self.switch):
            machine.end()
