"""Which process of a run this one is, by the environment that horovodrun or launch.py gave it. Imports no mxnet."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from contextlib import suppress
from typing import NamedTuple

from gluon_mgpu.runtime.errors import UsageError

KVSTORES = ("local", "horovod", "dist_sync")
DIVIDED = 10_000  # numbers: an array of so many is divided among the servers. By itself MXNet begins at 1,000,000


class Place(NamedTuple):
    kvstore: str  # one of KVSTORES
    role: str  # "worker"; of dist_sync also "server" and "scheduler"
    rank: int  # among those of this role, from 0
    workers: int
    servers: int
    local_workers: int  # that share this machine's cores
    root: str = ""  # dist_sync: the scheduler's host
    port: int = 0  # and its port

    def members(self) -> list[str]:
        """The names of all workers and servers of the run."""
        return [f"worker {i}" for i in range(self.workers)] + [f"server {i}" for i in range(self.servers)]

    def __str__(self) -> str:
        return "the scheduler" if self.role == "scheduler" else f"{self.role} {self.rank}"


LOCAL = Place("local", "worker", 0, 1, 0, 1)


def place() -> Place:
    """This process's Place; LOCAL for one that runs alone. Raises UsageError for an environment that says no such."""
    if "DMLC_ROLE" in os.environ:
        role = os.environ["DMLC_ROLE"]
        if role not in ("worker", "server", "scheduler"):
            raise UsageError(f"DMLC_ROLE={role}: give worker, server or scheduler")
        root = os.environ.get("DMLC_PS_ROOT_URI")
        if not root:
            raise UsageError("DMLC_PS_ROOT_URI is not set: give every process the scheduler's address")
        workers, servers = _number("DMLC_NUM_WORKER", 1), _number("DMLC_NUM_SERVER", 1)
        rank = 0 if role == "scheduler" else _number("DMLC_TASK_ID", 0, workers if role == "worker" else servers)
        local = _number("GLUON_MGPU_LOCAL_WORKERS", 1, default=1)
        # Its own watch listens one port above.
        return Place("dist_sync", role, rank, workers, servers, local, root, _number("DMLC_PS_ROOT_PORT", 1, 65535))
    if "HOROVOD_RANK" in os.environ:
        workers = _number("HOROVOD_SIZE", 1)
        local = _number("HOROVOD_LOCAL_SIZE", 1, default=1)
        return Place("horovod", "worker", _number("HOROVOD_RANK", 0, workers), workers, 0, local)
    return LOCAL


def asked(kvstore: str) -> Place:
    """This process's Place, which must be of the kvstore that was asked for. Raises UsageError where it is not."""
    here = place()
    if kvstore == here.kvstore:
        return here
    if kvstore == "horovod":
        raise UsageError("--kvstore horovod: start it with `horovodrun --gloo -np 2 python scripts/train.py …`")
    if kvstore == "dist_sync":
        raise UsageError(
            "--kvstore dist_sync: start the processes with `python scripts/launch.py --workers 2 --servers 1 -- python "
            "scripts/train.py …`, or on several machines as docs/distributed.md says"
        )
    raise UsageError(f"this is {here} of {here.workers}, started for {here.kvstore}: give --kvstore {here.kvstore}")


def check_compress(compress: str | None, here: Place) -> None:
    """Raises UsageError for a --compress that the kvstore does not offer."""
    if compress is None:
        return
    kind, _, threshold = compress.partition(":")
    if (kind, here.kvstore) == ("2bit", "dist_sync"):
        try:
            right = 0 < float(threshold) < 1e30
        except ValueError:
            right = False
        if not right:
            raise UsageError(f"--compress {compress}: give a threshold above 0, such as 2bit:0.5")
    elif (compress, here.kvstore) != ("fp16", "horovod"):
        raise UsageError(
            f"--compress {compress} --kvstore {here.kvstore}: fp16 is horovod's, and 2bit:THRESHOLD is dist_sync's"
        )


def own_address() -> str:
    """Where Horovod's other workers reach this one: the address of its interface. To itself, a machine's own name may
    be 127.0.1.1. Raises UsageError where there is no such interface, for which Horovod would end the process."""
    interface = os.environ.get("HOROVOD_GLOO_IFACE")
    if not interface:
        return os.environ.get("HOROVOD_HOSTNAME", "localhost")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            found = fcntl.ioctl(asking, 0x8915, struct.pack("256s", interface.encode()))  # netdevice(7), SIOCGIFADDR
        except OSError as error:
            raise UsageError(
                f"HOROVOD_GLOO_IFACE={interface}: no such interface with an IPv4 address here ({error.strerror}): give "
                "one by which the other machines reach this one"
            ) from None
    return socket.inet_ntoa(found[20:24])


def for_ps_lite(address: str, root: str) -> None:
    """Set what ps-lite reads of the environment and a user cannot be expected to know. address: at which this process
    is reached, where DMLC_NODE_HOST does not say. root: the scheduler's, of which ps-lite wants no name."""
    os.environ.setdefault("DMLC_NODE_HOST", address)
    os.environ["DMLC_PS_ROOT_URI"] = root
    os.environ.setdefault("MXNET_KVSTORE_BIGARRAY_BOUND", str(DIVIDED))
    os.environ.pop("PORT", None)  # ps-lite would listen there, in every process


def started() -> bool:
    """Whether horovodrun, launch.py or the like started this process as one of several."""
    return "HOROVOD_RANK" in os.environ or "DMLC_ROLE" in os.environ


def who() -> str:
    """What an error begins with, so that one knows whose it is."""
    try:
        return f"{place()}: " if started() else ""
    except UsageError:
        return ""


def speaks() -> bool:
    """Whether this process is worker 0, or alone."""
    role, rank = os.environ.get("DMLC_ROLE", "worker"), os.environ.get("HOROVOD_RANK", "0")
    return role == "worker" and rank == "0" and os.environ.get("DMLC_TASK_ID", "0") == "0"


def say(line: str, prefix: str = "gluon_mgpu: ") -> None:
    """A notice on standard error. Worker 0 speaks for all of them."""
    if speaks():
        with suppress(OSError):  # nobody reads it any more
            print(f"{prefix}{line}", file=sys.stderr)


def _number(name: str, least: int, end: int | None = None, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        number = int(text or "")
    except ValueError:
        number = least - 1
    if number < least or (end is not None and number >= end):
        allowed = f"{least} or more" if end is None else f"{least} to {end - 1}"
        shown = "is not set" if text is None else f"is {text!r}"
        raise UsageError(f"{name} {shown}: give a number, {allowed}")
    return number
