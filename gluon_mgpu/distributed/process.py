"""Finds this process's role in a run from environment variables that horovodrun, launch.py or the user has set.

`import gluon_mgpu` tells `runtime` about the role. This module does not import mxnet.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from typing import NamedTuple

from gluon_mgpu.runtime import engine, errors, log
from gluon_mgpu.runtime.errors import UsageError

KVSTORES = ("local", "horovod", "dist_sync")
SECRET = "GLUON_MGPU_SECRET"  # nosec B105  # environment variable: a secret that the processes of a run share
SAME_SIGNAL = 0.5  # seconds; a second signal within this time is a duplicate from a launcher or a cluster manager
DIVIDED_SIZE = 10_000  # elements; larger arrays are divided among the servers; MXNet's default is 1,000,000


class Process(NamedTuple):
    """One process of a run. The defaults describe a process that trains alone.

    role: "worker"; with dist_sync, also "server" or "scheduler". rank: the process's number within its role, from 0.
    local_workers: number of workers that share this machine's cores. root, port: the scheduler's host and port
    (dist_sync). secret: the coordinator accepts only processes that know it.
    """

    kvstore: str = "local"  # one of KVSTORES
    role: str = "worker"
    rank: int = 0
    workers: int = 1
    servers: int = 0
    local_workers: int = 1
    root: str = ""
    port: int = 0
    secret: str = ""

    def __str__(self) -> str:
        return "the scheduler" if self.role == "scheduler" else f"{self.role} {self.rank}"


def current() -> Process:
    """Describe this process. Raises UsageError if the environment variables are invalid."""
    if "DMLC_ROLE" in os.environ:
        role = os.environ["DMLC_ROLE"]
        if role not in ("worker", "server", "scheduler"):
            raise UsageError("DMLC_ROLE", role, "must be worker, server or scheduler")
        root = os.environ.get("DMLC_PS_ROOT_URI")
        if not root:
            raise UsageError("DMLC_PS_ROOT_URI", None, "not set: set it to the scheduler's address in every process")
        workers, servers = _number("DMLC_NUM_WORKER", 1), _number("DMLC_NUM_SERVER", 1)
        rank = 0 if role == "scheduler" else _number("DMLC_TASK_ID", 0, workers if role == "worker" else servers)
        local = _number("GLUON_MGPU_LOCAL_WORKERS", 1, default=1)
        port = _number("DMLC_PS_ROOT_PORT", 1, 65535)  # the coordinator uses the next port
        return Process("dist_sync", role, rank, workers, servers, local, root, port, os.environ.get(SECRET, ""))
    if "HOROVOD_RANK" in os.environ:
        workers = _number("HOROVOD_SIZE", 1)
        local = _number("HOROVOD_LOCAL_SIZE", 1, default=1)
        return Process("horovod", "worker", _number("HOROVOD_RANK", 0, workers), workers, local_workers=local)
    return Process()


def identify(here: Process) -> None:
    """Tell `runtime` about this process: how to prepare MXNet, and whether this process prints notices."""
    if here.role == "worker":
        engine.plan(processes=here.local_workers, workers=here.workers)
    log.name = "" if here.kvstore == "local" else str(here)
    log.speaks = here.role == "worker" and here.rank == 0


def require(kvstore: str) -> Process:
    """Describe and identify this process. Raises UsageError if it was not started for this kvstore."""
    here = current()
    if kvstore != here.kvstore:
        train, launch = errors.command("train ..."), errors.command("launch --workers 2 --servers 1")
        use = errors.setting("kvstore", here.kvstore)
        how_to_start = {
            "horovod": f"start it with `horovodrun --gloo -np 2 {train}` (`make horovod` installs it)",
            "dist_sync": f"start it with `{launch} -- {train}`; for several machines, see docs/distributed.md",
        }
        other = f"this process was started as {here} of a {here.kvstore} run; use {use}"
        raise UsageError("kvstore", kvstore, how_to_start.get(kvstore, other))
    identify(here)
    return here


def check_compress(compress: str | None, here: Process) -> None:
    """Raise UsageError unless `compress` is None or the kvstore supports it. Kinds: "fp16" and "2bit:THRESHOLD"."""
    if compress is None or (compress, here.kvstore) == ("fp16", "horovod"):
        return
    kind, _, threshold = compress.partition(":")
    if (kind, here.kvstore) != ("2bit", "dist_sync"):
        horovod, dist_sync = (errors.setting("kvstore", name) for name in ("horovod", "dist_sync"))
        raise UsageError("compress", compress, f"fp16 requires {horovod}, and 2bit:THRESHOLD requires {dist_sync}")
    with suppress(ValueError):
        if 0 < float(threshold) < 1e30:
            return
    raise UsageError("compress", compress, "must be 2bit:THRESHOLD with a threshold above 0, such as 2bit:0.5")


def horovod_address() -> str:
    """The address of this machine on the network that it shares with horovodrun.

    This is not the machine's own name, because the machine itself may resolve that name to 127.0.1.1.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        query.connect((os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "localhost"), 9))  # sends nothing
        return query.getsockname()[0]


def prepare_ps_lite(own_address: str, scheduler_address: str) -> None:
    """Set environment variables for ps-lite: those that the user has not set, and the scheduler's address."""
    os.environ.setdefault("DMLC_NODE_HOST", own_address)
    os.environ["DMLC_PS_ROOT_URI"] = scheduler_address  # ps-lite's scheduler cannot listen on a name
    os.environ.setdefault("MXNET_KVSTORE_BIGARRAY_BOUND", str(DIVIDED_SIZE))
    os.environ.pop("PORT", None)  # otherwise, every process would listen on this port


def _number(name: str, least: int, end: int = sys.maxsize, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    with suppress(ValueError):
        if least <= int(text) < end:
            return int(text)
    allowed = f"at least {least}" if end == sys.maxsize else f"from {least} to {end - 1}"
    raise UsageError(name, text, f"must be set to an integer, {allowed}")
