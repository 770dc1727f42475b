"""Tracks which processes of a run are alive and lets workers exchange values, as lines of JSON over TCP.

The Coordinator listens in the scheduler's process or, with Horovod, in worker 0's. Every worker and server is a Client.
A process is lost if its connection ends or it is silent for SILENCE seconds. Then all other processes end and one of
them reports the loss, because MXNet's parameter servers and Horovod would wait for the lost process forever.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

from gluon_mgpu.runtime import log
from gluon_mgpu.runtime.errors import Error, UsageError

BEAT = 1.0  # seconds between two heartbeats
SILENCE = 10.0  # seconds without a message after which a process is lost; no worker holds the GIL that long
PATIENCE = 300.0  # seconds that all processes have to connect
NOTICE_AFTER = 5.0  # seconds after which a waiting process prints what it is waiting for
GRACE = 3.0  # seconds for servers and the scheduler to end after all workers are done; ps-lite may take 10 s
LONGEST = 16 << 20  # bytes per line; enough to send the history of 80,000 epochs when a run is resumed


class Coordinator:
    """Listens for the clients of a run on (host, port); port 0 chooses a free port.

    expected: the clients' names, workers first. on_end(line, reported): called once, if a process fails or is lost,
    with the error message and whether a client reports it. on_over(): called when all workers are done.
    Raises Error if the port is in use or the host is not this machine.
    """

    def __init__(
        self,
        host: str,
        port: int,
        expected: Sequence[str],
        on_end: Callable[[str, bool], object] = lambda line, reported: None,
        on_over: Callable[[], object] = lambda: None,
    ) -> None:
        self.expected, self.on_end, self.on_over = list(expected), on_end, on_over
        self.workers = [name for name in self.expected if name.startswith("worker")]
        self.counts = _counts(self.expected)
        self.dist_sync = self.counts[1] > 0
        address = _resolved(host, port)
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.listener.bind(address)
        except OSError as error:
            self.listener.close()
            raise Error(f"cannot listen on {host}, port {port} ({error.strerror}): use another port") from None
        self.listener.listen(128)
        self.listener.settimeout(BEAT / 4)
        self.address, self.port = self.listener.getsockname()
        self.lock = threading.Lock()  # protects the fields below; every connection has a thread
        self.clients: dict[str, _Connection] = {}
        self.ended: set[str] = set()  # clients that announced their end
        self.gathering: dict[str, Any] = {}  # values of an incomplete all_gather
        self.issued: dict[str, int] = {}  # number of steps that each worker had issued when it was asked to stop
        self.over = self.stopping = False
        self.started = time.monotonic()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Wait until all clients are done, then stop listening."""
        while self.thread.is_alive() and self.ended != set(self.clients):
            time.sleep(BEAT / 20)
        self.over = True
        self.thread.join(2 * BEAT)

    def ask_to_stop(self) -> bool:
        """Have all workers stop at the same step. Returns False if they are not all connected yet."""
        with self.lock:
            if self._missing():
                return False
            self._hold()
            return True

    def _serve(self) -> None:
        last_beat = time.monotonic()
        while not self.over:
            try:
                connection = _Connection(self.listener.accept()[0])
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # no connection, or strangers use up all file descriptors or threads
                time.sleep(BEAT / 100)
            now = time.monotonic()
            if now - last_beat > BEAT:
                last_beat = now
                with self.lock:
                    self._beat(now)
        self.listener.close()

    def _beat(self, now: float) -> None:
        missing = self._missing()
        self._send_all({"missing": missing})
        if missing and now - self.started > PATIENCE:
            late = ", ".join(missing)
            self._end(f"{late} did not connect within {PATIENCE:.0f} s: check that it runs and has this address")

    def _read(self, connection: _Connection) -> None:
        def handle(message: dict[str, Any]) -> None:
            with self.lock:
                self._handle(connection, message)

        why = connection.read(handle)
        name = connection.name
        with self.lock:
            if name and name not in self.ended:
                self._end(f"{name} ({connection.about}) was lost: {why}", lost=name)

    def _handle(self, connection: _Connection, message: dict[str, Any]) -> None:
        name = connection.name
        if not name:
            self._welcome(connection, message)
        elif "gather" in message and name in self.workers:
            self.gathering[name] = message["gather"]
            if len(self.gathering) == len(self.workers):
                self._send_all({"gathered": [self.gathering.pop(worker) for worker in self.workers]})
        elif "stop" in message:
            self._hold()
        elif "issued" in message and name in self.workers:
            self.issued[name] = int(message["issued"])
            if len(self.issued) == len(self.workers):
                self._send_all({"stop at": max(self.issued.values())})
        elif "failed" in message:
            self.ended.add(name)
            # Horovod's workers share a terminal, and the failed worker reports its own error there.
            self._end(
                f"{name}: {message['failed']}",
                int(message.get("status", 1)),
                undo=bool(message.get("undo")),
                report=self.dist_sync,
            )
        elif "done" in message:
            self.ended.add(name)
            if self.ended.issuperset(self.workers):
                self._send_all({"over": True})
                self.ended.update(self.expected)  # a server that ends now is not lost
                self.on_over()

    def _welcome(self, connection: _Connection, message: dict[str, Any]) -> None:
        name = str(message.get("name"))
        refusal = self._refusal(name, message.get("of"))
        if refusal:
            connection.send({"end": refusal, "status": UsageError.exit_status, "report": True})
            return
        connection.name, connection.about = name, str(message.get("about"))
        self.clients[name] = connection
        if not self._missing():
            self._send_all({"complete": True})

    def _refusal(self, name: str, counts: object) -> str | None:
        if counts != self.counts:
            return (
                f"{name} has [DMLC_NUM_WORKER, DMLC_NUM_SERVER] = {counts}, but the scheduler has {self.counts}: set "
                "the same values in all processes"
            )
        if name in self.clients:
            return f"{name} is already connected: give each worker and each server its own DMLC_TASK_ID"
        return None if name in self.expected else f"{name} is not part of this run"

    def _missing(self) -> list[str]:
        return [name for name in self.expected if name not in self.clients]

    def _hold(self) -> None:
        """Ask every worker how many steps it has issued. It issues no more until it knows where to stop."""
        if not self.stopping:
            self.stopping = True
            self._send_all({"hold": True})

    def _end(self, line: str, status: int = 1, undo: bool = False, report: bool = True, lost: str = "") -> None:
        """End all processes of the run; the first client that is still connected reports why."""
        if self.over:
            return
        there = [name for name in self.expected if name in self.clients and name not in {*self.ended, lost}]
        reporter = there[0] if there and report else None
        for name in there:
            self.clients[name].send({"end": line, "status": status, "undo": undo, "report": name == reporter})
        self.over = True  # set last, because `close` then returns and the process may end
        self.on_end(line, bool(there))

    def _send_all(self, message: dict[str, Any]) -> None:
        for name, connection in self.clients.items():
            if name not in self.ended:
                connection.send(message)


class _Connection:
    """Sends and receives lines of JSON over a socket. name: the client's name, "" until the client sends it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.name, self.about = sock, "", ""
        self.sending = threading.Lock()
        sock.settimeout(SILENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any]) -> None:
        with self.sending, suppress(OSError):  # the reading thread notices a lost connection
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def read(self, handle: Callable[[dict[str, Any]], object]) -> str:
        """Call handle(message) for every message until the connection ends; returns why it ended."""
        rest = bytearray()
        try:
            while received := self.sock.recv(1 << 16):
                rest += received
                if len(rest) > LONGEST:
                    raise ValueError("line too long")
                if b"\n" not in received:
                    continue
                *lines, rest = rest.split(b"\n")
                for message in map(json.loads, lines):
                    if not isinstance(message, dict):
                        raise ValueError("not a message")
                    handle(message)
        except socket.timeout:
            return f"no sign of life for {SILENCE:.0f} s"
        except (OSError, ValueError, TypeError, ArithmeticError, RecursionError):
            pass  # the connection was reset, or a stranger sent something that is not a message
        finally:
            self.sock.close()
        return "its connection ended"


class Client:
    """A process's connection to the Coordinator at (host, port). The constructor waits until all clients are connected.

    If another process fails or is lost, this process ends, whatever its main thread is doing; if the failed process
    asked for it, `undo` is called first. expected: the same names as in the Coordinator.
    Raises Error if the host does not resolve or does not answer within PATIENCE seconds.
    """

    def __init__(self, host: str, port: int, name: str, expected: Sequence[str]) -> None:
        self.name, self.counts = name, _counts(expected)
        self.connection = _Connection(_connect(host, port, name))
        self.own_address = self.connection.sock.getsockname()[0]
        self.coordinator_address = self.connection.sock.getpeername()[0]
        self.complete, self.stop_known = threading.Event(), threading.Event()
        self.issued, self.stopping, self.stop_at, self.stepping = 0, False, 0, threading.Lock()
        self.gathered: SimpleQueue[list[Any]] = SimpleQueue()
        self.missing: list[str] = []
        self.over = False
        self.undo: Callable[[], object] = lambda: None
        about = f"{socket.gethostname()}, process {os.getpid()}"
        self.connection.send({"name": name, "about": about, "of": self.counts})
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()
        if not self.complete.wait(NOTICE_AFTER):
            _notice(f"{name}: waiting for {', '.join(self.missing)}")
            self.complete.wait()  # the coordinator ends this process after PATIENCE seconds

    def all_gather(self, value: Any) -> list[Any]:
        """Exchange values: returns those of all workers, by rank. Waits for every worker. value: any JSON value."""
        self.connection.send({"gather": value})
        return self.gathered.get()

    def ask_to_stop(self) -> bool:
        """Have all workers stop at the same step. Always returns True, because all are connected."""
        self.connection.send({"stop": True})
        return True

    def may_step(self, step: int) -> bool:
        """Whether this worker may issue step number `step`, from 0.

        Once a worker has asked to stop, all continue to the last step that any of them has issued: its gradients are
        summed over all workers, so it cannot complete without all of them.
        """
        with self.stepping:
            if not self.stopping:
                self.issued = step + 1
                return True
        self.stop_known.wait()
        return step < self.stop_at

    def failed(self, line: str, status: int, undo: bool) -> None:
        """Tell the other processes why this one ends, and whether they should call their `undo`."""
        self.over = True
        self.connection.send({"failed": line, "status": status, "undo": undo})

    def done(self) -> None:
        """Tell the coordinator that this process ends as planned."""
        self.over = True
        self.connection.send({"done": True})

    def _beat(self) -> None:
        while not self.over:
            self.connection.send({"beat": True})
            time.sleep(BEAT)

    def _listen(self) -> None:
        why = self.connection.read(self._handle)
        if self.over:
            return
        if self.counts[1]:  # dist_sync
            self._end(f"{self.name}: lost contact with the scheduler: {why}", 1, report=True)
        else:  # Horovod's workers share a terminal: one report is enough
            self._end(f"{self.name}: lost contact with worker 0: {why}", 1, report=self.name == "worker 1")

    def _handle(self, message: dict[str, Any]) -> None:
        if "missing" in message:
            self.missing = message["missing"]
        elif "complete" in message:
            self.complete.set()
        elif "gathered" in message:
            self.gathered.put(message["gathered"])
        elif "hold" in message:
            with self.stepping:  # from now on `issued` is final: `may_step` waits for the answer
                self.stopping = True
            self.connection.send({"issued": self.issued})
        elif "stop at" in message:
            self.stop_at = message["stop at"]
            self.stop_known.set()
        elif "over" in message:
            self.over = True
            exit_after(GRACE, 0)
        elif "end" in message and not self.over:
            self._end(message["end"], message.get("status", 1), bool(message.get("report")))
            if message.get("undo"):
                self.undo()

    def _end(self, line: str, status: int, report: bool) -> None:
        self.over = True
        # The delay lets a launcher see that the failed process ended first. An interrupt (130) is not an error.
        status = status if self.name.startswith("worker") else 1
        end_process(line if report and status != 130 else None, status, BEAT / 2)


def end_process(line: str | None, status: int, seconds: float) -> None:
    """End this process within some seconds; report `line` as an error, if it is not None.

    The process ends even if nobody reads its output, and even if its main thread waits for a lost process inside MXNet,
    where it cannot be interrupted.
    """
    exit_after(seconds, status)
    if line is not None:
        log.error(line)
    with suppress(OSError, ValueError, AttributeError):  # standard output is gone, closed, or None
        sys.stdout.flush()


@contextmanager
def time_limit(seconds: float, line: str) -> Iterator[None]:
    """End this process with an error message if the body takes longer than `seconds`."""
    timer = threading.Timer(seconds, end_process, (line, 1, BEAT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def exit_after(seconds: float, status: int) -> None:
    """End this process after some seconds if it has not ended by itself."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def _counts(names: Sequence[str]) -> list[int]:
    """[number of workers, number of servers]."""
    workers = sum(name.startswith("worker") for name in names)
    return [workers, len(names) - workers]


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
            return socket.create_connection(_resolved(host, port), timeout=SILENCE)
        except OSError as error:
            waited = time.monotonic() - began
            line = (
                f"no answer from {host}, port {port} ({error.strerror or 'timed out'}): check that the run's first "
                "process is running and has this address"
            )
            if waited > PATIENCE:
                raise Error(line) from None
            if waited > NOTICE_AFTER and not noticed:
                noticed = True
                _notice(f"{name}: {line}; trying for {PATIENCE:.0f} s")
            time.sleep(BEAT / 4)


def _notice(line: str) -> None:
    print(f"gluon_mgpu: {line}", file=sys.stderr, flush=True)
