"""Processes that are connected by gloo. Each is a fork of this one, and sends what it finds by a pipe."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gluon_mgpu.check.processes as processes
from gluon_mgpu.check.processes import Outcome, Send

NOT_CONNECTED = "the processes do not find each other"
_store: Any = None


def run(world: int, function: Callable[[Send, int, int], None], seconds: float) -> Outcome:
    """Call function(send, rank, world) in connected processes. If they stall, try again."""

    def process(rank: int, send: Send) -> None:
        _join(rank, world, ends, seconds / 2)
        function(send, rank, world)

    for _ in range(2):
        ends = os.pipe()  # for the port
        try:
            outcome = processes.run([partial(process, rank) for rank in range(world)], seconds)
        finally:
            for end in ends:
                os.close(end)
        outcome.late = outcome.late or NOT_CONNECTED in outcome.failure
        if not outcome.late:
            break
    return outcome


def _join(rank: int, world: int, ends: tuple[int, int], seconds: float) -> None:
    """Connect the processes, with torchrun's environment variables. The first makes the store, after the forks, because
    the store has threads, and writes its port to a pipe. seconds: how long one may wait for others."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=seconds)
    try:
        if rank == 0:
            global _store  # it ends with the last reference
            _store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
            os.write(ends[1], _store.port.to_bytes(4, "big") * world)
        port = int.from_bytes(os.read(ends[0], 4), "big")
        variables: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        variables |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        variables |= {"TORCHELASTIC_RUN_ID": "check"}
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.environ.update(CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", timeout=limit)
    except Exception as error:
        raise TimeoutError(f"{NOT_CONNECTED}: {error}") from error
    is_allowed = DistributedDataParallel._check_comm_hook
    DistributedDataParallel._check_comm_hook = lambda net, hook: (  # gloo sums bfloat16, too
        None if hook.__name__.startswith("bf16_compress") else is_allowed(net, hook)
    )
