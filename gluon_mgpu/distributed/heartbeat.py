"""Tracks which processes of a run are alive, and lets workers exchange values. Messages are JSON lines sent over TCP.

The Coordinator runs in the scheduler or, with Horovod, in worker 0. Every worker and every server runs a Client. If a
process is lost, all other processes exit; otherwise, MXNet's parameter servers or Horovod would wait for it forever.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from gluon_mgpu.distributed.process import SECRET, Process
from gluon_mgpu.runtime import log
from gluon_mgpu.runtime.errors import Error, UsageError

BEAT_INTERVAL = 1.0  # seconds between heartbeats
SILENCE_LIMIT = 10.0  # seconds; a process that is silent for longer counts as lost; no worker holds the GIL that long
CONNECT_LIMIT = 300.0  # seconds within which all processes must connect
NOTICE_DELAY = 5.0  # seconds before a waiting process prints what it is waiting for
GRACE_PERIOD = 3.0  # seconds that the scheduler waits for the other processes to disconnect
MAX_GREETING = 4096  # maximum size of a client's first message, in bytes
MAX_LINE = 16 << 20  # maximum size of any other message, in bytes: enough for the history of 80,000 epochs
ISSUED = "issued"  # key of the gather in which the workers agree on their last step


class Coordinator:
    """Listens for the clients of a run on (host, port); port 0 chooses a free port. here: this process.

    An asyncio loop in a thread of its own does all the work, so no client delays another one. Raises Error if the port
    is in use or the host is not this machine.
    """

    def __init__(self, here: Process, host: str, port: int) -> None:
        self.here, self.workers = here, [f"worker {i}" for i in range(here.workers)]
        self.expected = self.workers + [f"server {i}" for i in range(here.servers)]
        self.listener = listen(host, port)
        self.own_address, self.port = self.listener.getsockname()
        self.coordinator_address = self.own_address
        self.clients: dict[str, asyncio.StreamWriter] = {}
        self.ended: set[str] = set()  # clients that announced their exit, or were lost
        self.gathering: dict[str, dict[str, Any]] = defaultdict(dict)  # {key: {worker: value}} of incomplete gathers
        self.stopping = False  # whether a process has asked the workers to stop
        self.done = False  # whether all workers have announced their exit
        self.finished = False
        self.thread = threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Wait until all clients are done or have been told to end, then stop listening."""
        while self.thread.is_alive() and not self.finished and self.ended != set(self.clients):
            time.sleep(BEAT_INTERVAL / 20)
        self.finished = True

    def ask_to_stop(self) -> bool:
        """Ask all workers to stop at the same step. Returns False if some processes are not connected yet."""
        self.stopping = not self._missing()
        return self.stopping

    async def _serve(self) -> None:
        # By default, asyncio prints a traceback if strangers use up all file descriptors.
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        server = await asyncio.start_server(self._read, sock=self.listener, limit=MAX_GREETING)
        began = time.monotonic()
        while not self.finished:
            self._send_state()
            if self._missing() and time.monotonic() - began > CONNECT_LIMIT:
                late = f"{', '.join(self._missing())} did not connect within {CONNECT_LIMIT:.0f} s"
                self._end(f"{late}: check that each process is running and can reach {self.here}")
            await asyncio.sleep(BEAT_INTERVAL)
        server.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the messages of one connection until it closes."""
        name, about, why = "", "", "its connection was closed"
        try:
            while line := await asyncio.wait_for(_line(reader, MAX_LINE if name else MAX_GREETING), SILENCE_LIMIT):
                message = json.loads(line)
                if name:
                    self._handle(name, message)
                else:
                    name, about = self._welcome(writer, message), message.get("about")
        except asyncio.TimeoutError:
            why = f"no message for {SILENCE_LIMIT:.0f} s"
        except Exception:  # a stranger may send anything
            why = "its connection was reset, or it sent something that is not a message"
        writer.close()
        if name and name not in self.ended:
            self.ended.add(name)
            self._end(f"{name} ({about}) was lost: {why}", lost=True)
        elif self.done and all(client.is_closing() for client in self.clients.values()):
            self._exit(None, 0, 0)

    def _welcome(self, writer: asyncio.StreamWriter, greeting: dict[str, Any]) -> str:
        """Add a client to the run, and return its name. Raises ValueError if it was refused."""
        name, counts, own_counts = str(greeting.get("name")), greeting.get("of"), [self.here.workers, self.here.servers]
        if not hmac.compare_digest(str(greeting.get("secret", "")).encode(), self.here.secret.encode()):
            refusal = f"{SECRET} differs from {self.here}'s: set the same value in all processes"
        elif counts != own_counts:
            refusal = f"[DMLC_NUM_WORKER, DMLC_NUM_SERVER] is {counts} in {name}, but {own_counts} in {self.here}"
        elif name in self.clients:
            refusal = f"{name} is already connected: give each worker and each server its own DMLC_TASK_ID"
        elif name not in self.expected:
            refusal = f"{name} is not part of this run: DMLC_TASK_ID must be below the number of workers or servers"
        else:
            self.clients[name] = writer
            self._send_state()
            return name
        _send(writer, {"end": refusal, "status": UsageError.exit_status, "report": True})
        raise ValueError(refusal)

    def _handle(self, name: str, message: dict[str, Any]) -> None:
        if "gather" in message:
            key = message["gather"]
            self.gathering[key][name] = message["value"]
            if len(self.gathering[key]) == len(self.workers):
                values = self.gathering.pop(key)
                self._send_all({"gathered": key, "values": [values[worker] for worker in self.workers]})
        elif "stop" in message:
            self.stopping = True
            self._send_state()
        elif "failed" in message:
            self.ended.add(name)
            # Horovod's workers share a terminal, and the failed worker reports its own error there.
            report = self.here.kvstore == "dist_sync"
            self._end(f"{name}: {message['failed']}", int(message["status"]), report)
        elif "done" in message:
            self.ended.add(name)
            if self.ended.issuperset(self.workers) and not self.finished:
                self.done = True
                self._send_state()
                self.ended.update(self.expected)  # a server that exits from now on is not reported as lost
                self._exit(None, 0, GRACE_PERIOD)

    def _missing(self) -> list[str]:
        return [name for name in self.expected if name not in self.clients]

    def _end(self, line: str, status: int = 1, report: bool = True, lost: bool = False) -> None:
        """Terminate all processes of the run; the first client that is still connected reports why.

        lost: whether a process was lost; then the report ends with advice.
        """
        if self.finished:
            return
        remaining = [name for name in self.expected if name in self.clients and name not in self.ended]
        for name in remaining:
            reports = report and name == remaining[0]
            _send(self.clients[name], {"end": line, "status": status, "report": reports, "lost": lost})
        self.finished = True
        self._exit(None if remaining or status == 130 else f"{self.here}: {line}", status, BEAT_INTERVAL)

    def _exit(self, line: str | None, status: int, seconds: float) -> None:
        """Terminate the scheduler as `end_process` does. Worker 0 terminates itself."""
        if self.here.role == "scheduler":
            end_process(line, status, seconds)

    def _send_state(self) -> None:
        self._send_all({"missing": self._missing(), "stop": self.stopping, "done": self.done})

    def _send_all(self, message: dict[str, Any]) -> None:
        for name, writer in self.clients.items():
            if name not in self.ended:
                _send(writer, message)


async def _line(reader: asyncio.StreamReader, most: int) -> bytes:
    """Read a line; b"" if the connection was closed. Raises ValueError if the line has more than `most` bytes."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            line += await reader.readuntil()
        except asyncio.LimitOverrunError as error:  # the reader buffers only MAX_GREETING bytes
            line += await reader.readexactly(error.consumed)
        except asyncio.IncompleteReadError:
            return b""
        if len(line) > most:
            raise ValueError("the message is too long")
    return line


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Queue a message. Never waits for the peer."""
    writer.write(json.dumps(message).encode() + b"\n")


class Client:
    """A process's connection to the Coordinator at (host, port). The constructor waits until all clients are connected.

    If another process fails or is lost, this process exits, whatever its main thread is doing.
    Raises Error if the host does not answer within CONNECT_LIMIT seconds.
    """

    def __init__(self, here: Process, host: str, port: int) -> None:
        self.here = here
        self.sock = _connect(host, port, str(here))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.own_address = self.sock.getsockname()[0]
        self.coordinator_address = self.sock.getpeername()[0]
        self.sending = threading.Lock()  # the main thread and the listening thread send
        self.missing: list[str] = []  # processes that are not connected yet
        self.complete = threading.Event()
        self.gathered: SimpleQueue[list[Any]] = SimpleQueue()
        self.stepping, self.issued, self.stopping = threading.Lock(), 0, False  # the lock protects the other two
        self.stop_at: Future[int] = Future()
        self.finished = False
        self.advice = ""  # what to do if a process is lost
        about, counts = f"{socket.gethostname()}, process {os.getpid()}", [here.workers, here.servers]
        self._send({"name": str(here), "about": about, "of": counts, "secret": here.secret})
        threading.Thread(target=self._listen, daemon=True).start()
        if not self.complete.wait(NOTICE_DELAY):
            log.say(f"{here}: waiting for {', '.join(self.missing)}", in_any_process=True)
            self.complete.wait()  # the coordinator terminates this process after CONNECT_LIMIT seconds

    def all_gather(self, value: Any) -> list[Any]:
        """Collect one JSON value per worker, in rank order. Waits for all workers. value: this worker's value."""
        self._send({"gather": "value", "value": value})
        return self.gathered.get()

    def ask_to_stop(self) -> bool:
        """Ask all workers to stop at the same step. Always returns True, because all workers are connected."""
        self._send({"stop": True})
        return True

    def may_step(self, step: int) -> bool:
        """Whether this worker may issue step number `step`, counted from 0.

        Once a worker has asked to stop, all workers continue up to the last step that any worker has issued. That step
        cannot complete without all workers, because it sums their gradients.
        """
        with self.stepping:
            if not self.stopping:
                self.issued = step + 1
                return True
        return step < self.stop_at.result()

    def close(self, failed: str | None = None, status: int = 0) -> None:
        """Tell the coordinator that this process is exiting. failed: why it failed; all other processes then exit."""
        self.finished = True
        self._send({"done": True} if failed is None else {"failed": failed, "status": status})
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError), self.sending:  # if the connection is lost, `_listen` notices it
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        why = "its connection was closed"
        try:
            with self.sock, self.sock.makefile("rb") as lines:
                for line in lines:
                    self._handle(json.loads(line))
        except socket.timeout:
            why = f"no message for {SILENCE_LIMIT:.0f} s"
        except (OSError, ValueError):  # the connection was reset in the middle of a line
            pass
        if not self.finished:
            dist_sync = self.here.kvstore == "dist_sync"
            coordinator = "the scheduler" if dist_sync else "worker 0"
            report = dist_sync or self.here.rank == 1  # Horovod's workers share a terminal: one report is enough
            self._end(f"{self.here}: lost contact with {coordinator}: {why}", 1, report, lost=True)

    def _handle(self, message: dict[str, Any]) -> None:
        if "missing" in message:  # the coordinator's state, sent every BEAT_INTERVAL
            self.missing = message["missing"]
            if not self.missing:
                self.complete.set()
            if message["done"] and self.here.role == "server":
                self.finished = True
                end_process(None, 0, 0)
            elif message["stop"] and not self.stopping and self.here.role == "worker":
                with self.stepping:  # from now on `issued` is final: `may_step` waits for `stop_at`
                    self.stopping = True
                self._send({"gather": ISSUED, "value": self.issued})
            else:
                self._send({"beat": True})
        elif message.get("gathered") == ISSUED:
            self.stop_at.set_result(max(message["values"]))
        elif "gathered" in message:
            self.gathered.put(message["values"])
        elif "end" in message and not self.finished:
            self._end(message["end"], message["status"], message["report"], message.get("lost", False))

    def _end(self, line: str, status: int, report: bool, lost: bool) -> None:
        self.finished = True
        if lost and self.advice:
            line = f"{line}; {self.advice}"
        # The delay lets a launcher see that the failed process exited first. An interrupt (130) is not an error.
        end_process(line if report and status != 130 else None, status, BEAT_INTERVAL / 2)


def end_process(line: str | None, status: int, seconds: float) -> None:
    """Terminate this process after `seconds` seconds; if `line` is not None, first report it as an error.

    The process exits even if nobody reads its output, and even if its main thread is inside MXNet, waiting for a lost
    process.
    """
    after(seconds, os._exit, status)
    if line is not None:
        log.error(line)
    with suppress(OSError, ValueError, AttributeError):  # standard output is gone, closed, or None
        sys.stdout.flush()


def after(seconds: float, function: Callable[..., object], *arguments: object) -> threading.Timer:
    """Call function(*arguments) after `seconds` seconds, unless the returned timer is canceled or the process
    exits."""
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()
    return timer


def listen(host: str, port: int) -> socket.socket:
    """Listen on a port; 0 chooses a free port. Raises Error if the port is in use or the host is not this machine."""
    try:
        return socket.create_server((host, port), backlog=128)  # IPv4 only, as in ps-lite and gloo
    except (OSError, UnicodeError) as error:
        raise Error(f"cannot listen on {host}, port {port} ({error}): use another port or a local address") from None


def _connect(host: str, port: int, name: str) -> socket.socket:
    """Connect to the Coordinator, which may not have started yet."""
    began, noticed = time.monotonic(), False
    while True:
        try:
            return socket.create_connection((host, port), timeout=SILENCE_LIMIT)
        except (OSError, UnicodeError) as error:
            waited = time.monotonic() - began
            advice = "check that the scheduler or, with Horovod, worker 0 is running at this address"
            line = f"no answer from {host}, port {port} ({error}): {advice}"
        if waited > CONNECT_LIMIT:
            raise Error(line)
        if waited > NOTICE_DELAY and not noticed:
            noticed = True
            log.say(f"{name}: {line}; retrying for up to {CONNECT_LIMIT:.0f} s", in_any_process=True)
        time.sleep(BEAT_INTERVAL / 4)
