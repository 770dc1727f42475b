"""Tracks which processes of a run are alive, and lets workers exchange values. Messages are JSON lines sent over TCP.

The Coordinator runs in the scheduler or, with Horovod, in worker 0. Every worker and every server runs a Client. If a
process is lost, all other processes exit; otherwise, MXNet's parameter servers or Horovod would wait for it forever.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
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
GRACE_PERIOD = 3.0  # seconds that the scheduler waits for the servers to exit
MAX_GREETING = 4096  # maximum size of a client's first message, in bytes
MAX_LINE = 16 << 20  # maximum size of any other message, in bytes: enough for the history of 80,000 epochs


class Coordinator:
    """Listens for the clients of a run on (host, port); port 0 chooses a free port. here: this process.

    Raises Error if the port is in use or the host is not this machine.
    """

    def __init__(self, here: Process, host: str, port: int) -> None:
        self.here, self.expected = here, here.names()
        self.workers, self.servers = self.expected[: here.workers], self.expected[here.workers :]
        self.listener = listen(host, port)
        self.listener.settimeout(BEAT_INTERVAL / 4)
        self.address, self.port = self.listener.getsockname()
        self.lock = threading.Lock()  # protects the fields below, because every connection has its own thread
        self.clients: dict[str, _Connection] = {}
        self.strangers: set[_Connection] = set()  # connections that have not yet identified themselves
        self.ended: set[str] = set()  # clients that announced their exit, or were lost
        self.closed: set[str] = set()  # clients whose connection has been closed
        self.leaving = False  # True if this is the scheduler, and it is only waiting for the servers to exit
        self.gathering: dict[str, Any] = {}  # values of an incomplete all_gather
        self.issued: dict[str, int] = {}  # number of steps that each worker had issued when it was asked to hold
        self.finished = False
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Wait until all clients are done, then stop listening."""
        while self.thread.is_alive() and self.ended != set(self.clients):
            time.sleep(BEAT_INTERVAL / 20)
        self.finished = True
        self.thread.join(2 * BEAT_INTERVAL)

    def ask_to_stop(self) -> bool:
        """Ask all workers to stop at the same step. Returns False if some processes are not connected yet."""
        with self.lock:
            if self._missing():
                return False
            self._send_all({"hold": True})
            return True

    def _serve(self) -> None:
        started = last_beat = time.monotonic()
        while not self.finished:
            try:
                connection = _Connection(self.listener.accept()[0])
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # no new connection, or strangers use all file descriptors or threads
                time.sleep(BEAT_INTERVAL / 100)
            if time.monotonic() - last_beat > BEAT_INTERVAL:
                last_beat = time.monotonic()
                with self.lock:
                    self._beat(last_beat - started)
        self.listener.close()

    def _beat(self, seconds: float) -> None:
        missing = self._missing()
        self._send_all({"missing": missing})
        for connection in self.strangers:
            if time.monotonic() - connection.since > SILENCE_LIMIT:
                connection.close()
        if missing and seconds > CONNECT_LIMIT:
            late = ", ".join(missing)
            self._end(
                f"{late} did not connect within {CONNECT_LIMIT:.0f} s: check that each process is running and can "
                f"reach {self.here}"
            )

    def _read(self, connection: _Connection) -> None:
        def handle(message: dict[str, Any]) -> None:
            with self.lock:
                self._handle(connection, message)

        with self.lock:
            self.strangers.add(connection)
        why = connection.read(handle, MAX_GREETING)
        name = connection.name
        with self.lock:
            self.strangers.discard(connection)
            if name:
                self.closed.add(name)
            if name and name not in self.ended:
                self.ended.add(name)
                self._end(f"{name} ({connection.about}) was lost: {why}")
            elif self.leaving and not self.finished and self.closed.issuperset(self.servers):
                end_process(None, 0, 0)

    def _handle(self, connection: _Connection, message: dict[str, Any]) -> None:
        name = connection.name
        if not name:
            self._welcome(connection, message)
        elif "gather" in message and name in self.workers:
            self.gathering[name] = message["gather"]
            if len(self.gathering) == len(self.workers):
                self._send_all({"gathered": [self.gathering.pop(worker) for worker in self.workers]})
        elif "stop" in message:
            # Ask every worker how many steps it has issued. The workers then wait until they are told the last step.
            self._send_all({"hold": True})
        elif "issued" in message and name in self.workers:
            self.issued[name] = int(message["issued"])
            if len(self.issued) == len(self.workers):
                self._send_all({"stop at": max(self.issued.values())})
        elif "failed" in message:
            self.ended.add(name)
            # Horovod's workers share a terminal, and the failed worker reports its own error there.
            report = self.here.kvstore == "dist_sync"
            self._end(f"{name}: {message['failed']}", int(message["status"]), report)
        elif "done" in message:
            self.ended.add(name)
            if self.ended.issuperset(self.workers) and not self.finished:
                self._send_all({"done": True})  # to the servers
                self.ended.update(self.expected)  # a server that exits from now on is not reported as lost
                if self.here.role == "scheduler":
                    self.leaving = True
                    end_process(None, 0, GRACE_PERIOD)

    def _welcome(self, connection: _Connection, message: dict[str, Any]) -> None:
        name, counts = str(message.get("name")), message.get("of")
        own_counts = [self.here.workers, self.here.servers]
        if not hmac.compare_digest(str(message.get("secret", "")).encode(), self.here.secret.encode()):
            refusal = f"{SECRET} differs from {self.here}'s: set the same value in all processes"
        elif counts != own_counts:
            refusal = (
                f"{name} has [DMLC_NUM_WORKER, DMLC_NUM_SERVER] = {counts}, but the scheduler has {own_counts}: set "
                "the same values in all processes"
            )
        elif name in self.clients:
            refusal = f"{name} is already connected: give each worker and each server its own DMLC_TASK_ID"
        elif name not in self.expected:
            refusal = (
                f"{name} is not part of this run: DMLC_TASK_ID must be below {self.here.workers} in workers and below "
                f"{self.here.servers} in servers"
            )
        else:
            connection.name, connection.about = name, str(message.get("about"))
            self.clients[name] = connection
            self.strangers.discard(connection)
            self._send_all({"missing": self._missing()})
            return
        connection.send({"end": refusal, "status": UsageError.exit_status, "report": True})
        connection.finish()
        connection.close()

    def _missing(self) -> list[str]:
        return [name for name in self.expected if name not in self.clients]

    def _end(self, line: str, status: int = 1, report: bool = True) -> None:
        """Terminate all processes of the run; the first client that is still connected reports why."""
        if self.finished:
            return
        remaining = [name for name in self.expected if name in self.clients and name not in self.ended]
        for name in remaining:
            reports = report and name == remaining[0]
            self.clients[name].send({"end": line, "status": status, "report": reports})
        for name in remaining:
            self.clients[name].finish()
        self.finished = True  # set last, because `close` returns once this is set, and the process may then exit
        if self.here.role == "scheduler":
            end_process(None if remaining or status == 130 else f"{self.here}: {line}", status, BEAT_INTERVAL)

    def _send_all(self, message: dict[str, Any]) -> None:
        for name, connection in self.clients.items():
            if name not in self.ended:
                connection.send(message)


class _Connection:
    """Sends and receives lines of JSON over a socket. name: the client's name, "" until the client has sent it.

    While `read` runs, a thread sends the lines, so `send` never waits for a peer that does not read.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.name, self.about, self.since = sock, "", "", time.monotonic()
        self.unsent: SimpleQueue[bytes] = SimpleQueue()
        self.sender = threading.Thread(target=self._send_lines, daemon=True)
        sock.settimeout(SILENCE_LIMIT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any]) -> None:
        self.unsent.put(json.dumps(message).encode() + b"\n")

    def finish(self) -> None:
        """Wait until all lines have been sent, or the connection is lost. Nothing can be sent after that."""
        self.unsent.put(b"")
        self.sender.join()

    def _send_lines(self) -> None:
        try:
            while line := self.unsent.get():
                self.sock.sendall(line)
        except OSError:
            self.close()  # a part of a line may have been sent

    def close(self) -> None:
        """Shut down the connection, so that `read`, which runs in another thread, returns."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def read(self, handle: Callable[[dict[str, Any]], object], limit: int = MAX_LINE) -> str:
        """Call handle(message) for every message until the connection closes. Returns why it closed.

        limit: maximum size of the first message, in bytes.
        """
        try:
            self.sender.start()
            with self.sock, self.sock.makefile("rb") as lines:
                while line := lines.readline(limit):
                    limit = MAX_LINE
                    message = json.loads(line)
                    if not isinstance(message, dict):
                        raise ValueError("not a message")
                    handle(message)
        except socket.timeout:
            return f"no message for {SILENCE_LIMIT:.0f} s"
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError):
            pass  # the connection was reset, a stranger sent something that is not a message, or threads ran out
        finally:
            self.unsent.put(b"")
        return "its connection was closed"


class Client:
    """A process's connection to the Coordinator at (host, port). The constructor waits until all clients are connected.

    If another process fails or is lost, this process exits, whatever its main thread is doing.
    Raises Error if the host does not resolve or does not answer within CONNECT_LIMIT seconds.
    """

    def __init__(self, here: Process, host: str, port: int) -> None:
        self.here = here
        self.connection = _Connection(_connect(host, port, str(here)))
        self.own_address = self.connection.sock.getsockname()[0]
        self.coordinator_address = self.connection.sock.getpeername()[0]
        self.missing: list[str] = []  # processes that are not connected yet
        self.complete = threading.Event()
        self.gathered: SimpleQueue[list[Any]] = SimpleQueue()
        self.issued, self.stopping, self.stop_at = 0, False, 0
        self.stepping, self.stop_known = threading.Lock(), threading.Event()
        self.finished = False
        about = f"{socket.gethostname()}, process {os.getpid()}"
        counts = [here.workers, here.servers]
        self.connection.send({"name": str(here), "about": about, "of": counts, "secret": here.secret})
        threading.Thread(target=self._listen, daemon=True).start()
        if not self.complete.wait(NOTICE_DELAY):
            log.say_anyway(f"{here}: waiting for {', '.join(self.missing)}")
            self.complete.wait()  # the coordinator terminates this process after CONNECT_LIMIT seconds

    def all_gather(self, value: Any) -> list[Any]:
        """Collect one JSON value per worker, in rank order. Waits for all workers. value: this worker's value."""
        self.connection.send({"gather": value})
        return self.gathered.get()

    def ask_to_stop(self) -> bool:
        """Ask all workers to stop at the same step. Always returns True, because all workers are connected."""
        self.connection.send({"stop": True})
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
        self.stop_known.wait()
        return step < self.stop_at

    def failed(self, line: str, status: int) -> None:
        """Tell the other processes why this process is exiting."""
        self.finished = True
        self.connection.send({"failed": line, "status": status})
        self.connection.finish()

    def close(self) -> None:
        """Tell the coordinator that this process is exiting normally."""
        self.finished = True
        self.connection.send({"done": True})
        self.connection.finish()

    def _listen(self) -> None:
        why = self.connection.read(self._handle)
        if self.finished:
            return
        if self.here.kvstore == "dist_sync":
            self._end(f"{self.here}: lost contact with the scheduler: {why}", 1, report=True)
        else:  # Horovod's workers share a terminal: one report is enough
            self._end(f"{self.here}: lost contact with worker 0: {why}", 1, report=self.here.rank == 1)

    def _handle(self, message: dict[str, Any]) -> None:
        if "missing" in message:  # sent every BEAT_INTERVAL
            self.missing = message["missing"]
            if not self.missing:
                self.complete.set()
            self.connection.send({"beat": True})
        elif "gathered" in message:
            self.gathered.put(message["gathered"])
        elif "hold" in message:
            with self.stepping:  # from now on `issued` is final: `may_step` waits for "stop at"
                self.stopping = True
            self.connection.send({"issued": self.issued})
        elif "stop at" in message:
            self.stop_at = message["stop at"]
            self.stop_known.set()
        elif "done" in message:  # sent to servers only
            self.finished = True
            end_process(None, 0, 0)
        elif "end" in message and not self.finished:
            self._end(message["end"], message["status"], message["report"])

    def _end(self, line: str, status: int, report: bool) -> None:
        self.finished = True
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
        return socket.create_server(_resolved(host, port), backlog=128)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise Error(f"cannot listen on {host}, port {port} ({why}): use another port or a local address") from None


def _resolved(host: str, port: int) -> tuple[str, int]:
    """Resolve a host to an IPv4 address; ps-lite and gloo support only IPv4."""
    try:
        return str(socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]), port
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise Error(f"host {host} does not resolve to an IPv4 address ({why})") from None


def _connect(host: str, port: int, name: str) -> socket.socket:
    """Connect to the Coordinator, which may not have started yet."""
    began, noticed = time.monotonic(), False
    while True:
        try:
            return socket.create_connection(_resolved(host, port), timeout=SILENCE_LIMIT)
        except OSError as error:
            waited = time.monotonic() - began
            line = (
                f"no answer from {host}, port {port} ({error.strerror or 'timed out'}): check that the "
                "scheduler or, with Horovod, worker 0 is running and has this address"
            )
            if waited > CONNECT_LIMIT:
                raise Error(line) from None
            if waited > NOTICE_DELAY and not noticed:
                noticed = True
                log.say_anyway(f"{name}: {line}; retrying for up to {CONNECT_LIMIT:.0f} s")
            time.sleep(BEAT_INTERVAL / 4)
