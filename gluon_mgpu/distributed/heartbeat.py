"""Who of a run's processes is alive, and what its workers agree on. It carries lines of JSON, and no gradient.

The Hub listens: in the scheduler's process, or with Horovod in worker 0's. Every process is a Member of it. A process
whose connection ends, or that gives no sign of life for SILENCE seconds, is lost; then every other one says so in one
line and ends, since MXNet's stores and Horovod would wait for it for ever.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gluon_mgpu.runtime.errors import Error, UsageError

BEAT = 1.0  # seconds between signs of life
SILENCE = 10.0  # seconds without one: lost. Nothing in a worker holds Python's lock for so long
PATIENCE = 300.0  # seconds within which all have to come
LAST_WORDS = 3.0  # seconds for a server to end once all workers are done
WAITING_SAID = 5  # beats after which a process says for whom it waits
LONGEST = 16 << 20  # bytes of a line; some 80,000 epochs of a run that is resumed


class Hub:
    """Listens on (host, port), port 0 for a free one, for the processes of a run, `expected` by name.

    on_loss: called with what the others are told, once one is lost; on_over: once all workers are done. Raises Error
    for a port that is taken and a host that is not this machine's.
    """

    def __init__(
        self,
        host: str,
        port: int,
        expected: Sequence[str],
        on_loss: Callable[[str], object] = lambda line: None,
        on_over: Callable[[], object] = lambda: None,
    ) -> None:
        self.expected, self.on_loss, self.on_over = list(expected), on_loss, on_over
        self.workers = [name for name in self.expected if name.startswith("worker")]
        self.numbers = _numbers(self.expected)
        address = _resolved(host, port)
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.listener.bind(address)
        except OSError as error:
            self.listener.close()
            raise Error(f"{host}, port {port} cannot be listened on ({error.strerror}): give another port") from None
        self.listener.listen(128)
        self.address, self.port = self.listener.getsockname()
        self.members: dict[str, _Connection] = {}
        self.ended: set[str] = set()
        self.gathering: dict[int, dict[str, Any]] = {}
        self.issued: dict[str, int] = {}
        self.over = self.asked = self.stopping = False
        self.since = time.monotonic()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Wait until all members are done; then listen no more."""
        while self.thread.is_alive() and self.ended != set(self.members):
            time.sleep(BEAT / 20)
        self.over = True
        self.thread.join(2 * BEAT)

    def ask_to_stop(self) -> bool:
        """All workers will stop at one step. Returns whether there are any yet."""
        self.asked = len(self.members) == len(self.expected)
        return self.asked

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            beat = time.monotonic()
            while not self.over:
                for key, _ in selector.select(BEAT / 4):
                    if key.data:
                        self._read(selector, key.data)
                    else:
                        self._accept(selector)
                if self.asked:
                    self._hold()
                now = time.monotonic()
                if now - beat > BEAT:
                    beat = now
                    self._tell({"missing": [name for name in self.expected if name not in self.members]})
                    self._look(selector, now)
            self.listener.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection = _Connection(self.listener.accept()[0])
        except OSError:  # it is gone again, or strangers hold all files that we may open: `_look` sends them away
            return
        selector.register(connection.sock, selectors.EVENT_READ, connection)

    def _read(self, selector: selectors.BaseSelector, connection: _Connection) -> None:
        try:
            messages = connection.messages()
            for message in messages or ():
                self._take(connection, message)
        except (OSError, ValueError, TypeError, ArithmeticError, RecursionError):
            messages = None  # a reset, or nothing that a member says
        if connection.name:  # a stranger has SILENCE seconds in all
            connection.heard = time.monotonic()
        if messages is None:
            self._drop(selector, connection)
            if connection.name and connection.name not in self.ended:
                self._lost(connection.name, "its connection ended")

    def _drop(self, selector: selectors.BaseSelector, connection: _Connection) -> None:
        selector.unregister(connection.sock)
        connection.sock.close()

    def _take(self, connection: _Connection, message: dict[str, Any]) -> None:
        if not connection.name:
            name = str(message.get("name"))
            refusal = self._refusal(name, message.get("of"))
            if refusal:
                connection.send({"lost": str(refusal), "status": refusal.exit_status})
                return
            connection.name, connection.about = name, str(message.get("about"))
            self.members[name] = connection
            if len(self.members) == len(self.expected):
                self._tell({"all": True})
        elif "gather" in message and connection.name in self.workers:
            values = self.gathering.setdefault(message["gather"], {})
            values[connection.name] = message.get("value")
            if len(values) == len(self.workers):
                told = {"gathered": message["gather"], "values": [values[name] for name in self.workers]}
                del self.gathering[message["gather"]]
                self._tell(told)
        elif "stop" in message:
            self._hold()
        elif "issued" in message and connection.name in self.workers:
            self.issued[connection.name] = int(message["issued"])
            if len(self.issued) == len(self.workers):
                self._tell({"stop at": max(self.issued.values())})
        elif "failed" in message:
            self.ended.add(connection.name)
            self._end(
                f"{connection.name}: {message['failed']}", int(message.get("status", 1)), bool(message.get("undo"))
            )
        elif "done" in message:
            self.ended.add(connection.name)
            if self.ended.issuperset(self.workers):
                self._tell({"over": True})
                self.ended.update(self.expected)  # who goes now is not lost
                self.on_over()

    def _refusal(self, name: str, numbers: object) -> UsageError | None:
        if numbers != self.numbers:
            return UsageError(
                f"{name} has DMLC_NUM_WORKER, DMLC_NUM_SERVER {numbers} where the scheduler has {self.numbers}: give "
                "all processes the same"
            )
        if name in self.members:
            return UsageError(f"{name} is there already: each worker and each server needs its own DMLC_TASK_ID")
        return None if name in self.expected else UsageError(f"this run has no {name}: DMLC_TASK_ID begins with 0")

    def _hold(self) -> None:
        if not self.stopping:
            self.stopping = True
            self._tell({"hold": True})

    def _look(self, selector: selectors.BaseSelector, now: float) -> None:
        for connection in [key.data for key in selector.get_map().values() if key.data]:
            if now - connection.heard <= SILENCE:
                continue
            if not connection.name:
                self._drop(selector, connection)
            elif connection.name not in self.ended:
                return self._lost(connection.name, f"it has given no sign of life for {SILENCE:.0f} s")
        missing = [name for name in self.expected if name not in self.members]
        if missing and now - self.since > PATIENCE:
            late = ", ".join(missing)
            self._end(f"{late} did not come within {PATIENCE:.0f} s: is it started, and with this address?")

    def _lost(self, name: str, why: str) -> None:
        self._end(f"{name} ({self.members[name].about}) was lost: {why}")

    def _end(self, line: str, status: int = 1, undo: bool = False) -> None:
        if not self.over:
            self.over = True
            self._tell({"lost": line, "status": status, "undo": undo})
            self.on_loss(line)

    def _tell(self, message: dict[str, Any]) -> None:
        for name, connection in self.members.items():
            if name not in self.ended:
                connection.send(message)


class _Connection:
    """Lines of JSON over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.name, self.about = sock, "", ""
        self.heard, self.rest = time.monotonic(), bytearray()
        self.sending = threading.Lock()
        sock.settimeout(SILENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any]) -> None:
        try:
            with self.sending:
                self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # whoever reads will see that it is gone

    def messages(self) -> list[dict[str, Any]] | None:
        """What has come, as dictionaries; None at the end. Raises OSError or ValueError for what is no such thing."""
        received = self.sock.recv(1 << 16)
        if not received:
            return None
        self.rest += received
        if len(self.rest) > LONGEST:
            raise ValueError("too long")
        if b"\n" not in received:
            return []
        *lines, self.rest = self.rest.split(b"\n")
        found = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in found):
            raise ValueError("no message")
        return found


class Member:
    """A process's connection to the Hub at (host, port). Where another one is lost, it ends this process,
    and calls undo() where that one has `failed` and asked for it.

    expected: the names of all members, as the Hub has them. Raises Error for a host that does not resolve, or
    at which nobody answers within PATIENCE seconds.
    """

    def __init__(self, host: str, port: int, name: str, expected: Sequence[str]) -> None:
        self.name = name
        self.connection = _Connection(_connect(host, port, name))
        self.own_address, self.hub_address = (
            end[0] for end in (self.connection.sock.getsockname(), self.connection.sock.getpeername())
        )
        self.all_there, self.stop_known = threading.Event(), threading.Event()
        self.issued, self.stopping, self.stop_at, self.stepping = 0, False, 0, threading.Lock()
        self.answers: dict[int, list[Any]] = {}
        self.answered = threading.Condition()
        self.missing: list[str] = []
        self.gathers = 0
        self.over = False
        self.undo: Callable[[], object] = lambda: None
        about = f"{socket.gethostname()}, process {os.getpid()}"
        self.connection.send({"name": name, "about": about, "of": _numbers(expected)})
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()
        waited = 0
        while not self.all_there.wait(BEAT):  # the hub loses patience, not we
            waited += 1
            if waited == WAITING_SAID and self.missing:
                print(f"gluon_mgpu: {name}: waiting for {', '.join(self.missing)}", file=sys.stderr)

    def gather(self, value: Any) -> list[Any]:
        """What every worker gave, by rank; waits for all. value: what JSON can hold."""
        self.gathers += 1
        number = self.gathers
        self.connection.send({"gather": number, "value": value})
        with self.answered:
            while number not in self.answers:
                self.answered.wait(BEAT)  # so that Ctrl-C is heard
            return self.answers.pop(number)

    def ask_to_stop(self) -> bool:
        """All workers will stop at one step. Returns whether there are any yet: a Member has met them."""
        self.connection.send({"stop": True})
        return True

    def may_step(self, step: int) -> bool:
        """Whether this worker may issue its step of that number, from 0. Once one asked to stop, all go on to the step
        that the foremost has issued: it may be waiting for it, and cannot be asked to go back."""
        with self.stepping:
            if not self.stopping:
                self.issued = step + 1
                return True
        while not self.stop_known.wait(BEAT):
            pass
        return step < self.stop_at

    def failed(self, line: str, status: int, undo: bool) -> None:
        """Tell the others why this process ends, and whether they are to undo what they have begun."""
        self.over = True
        self.connection.send({"failed": line, "status": status, "undo": undo})

    def done(self) -> None:
        self.over = True
        self.connection.send({"done": True})

    def _beat(self) -> None:
        while not self.over:
            self.connection.send({"beat": True})
            time.sleep(BEAT)

    def _listen(self) -> None:
        why = "its connection ended"
        while True:
            try:
                messages = self.connection.messages()
            except socket.timeout:
                messages, why = None, f"it has given no sign of life for {SILENCE:.0f} s"
            except (OSError, ValueError):
                messages = None
            for message in messages or ():
                self._take(message)
            if messages is None:
                if not self.over:
                    self._end(f"{self.hub_name()} was lost: {why}")
                return

    def hub_name(self) -> str:
        return "worker 0" if self.name.startswith("worker") and "DMLC_ROLE" not in os.environ else "the scheduler"

    def _take(self, message: dict[str, Any]) -> None:
        if "missing" in message:
            self.missing = message["missing"]
        elif "all" in message:
            self.all_there.set()
        elif "gathered" in message:
            with self.answered:
                self.answers[message["gathered"]] = message["values"]
                self.answered.notify_all()
        elif "hold" in message:
            with self.stepping:  # what is said is what will be, whatever the main thread waits for
                self.stopping = True
                issued = self.issued
            self.connection.send({"issued": issued})
        elif "stop at" in message:
            self.stop_at = message["stop at"]
            self.stop_known.set()
        elif "over" in message:
            self.over = True
            end_soon()
        elif "lost" in message and not self.over:
            self._end(message["lost"], message.get("status", 1))
            if message.get("undo"):
                self.undo()

    def _end(self, line: str, status: int = 1) -> None:
        self.over = True
        # Not at once, so that a launcher sees the one that failed end first.
        end_with(f"{self.name}: {line}", status if self.name.startswith("worker") else 1, BEAT / 2)


def end_with(line: str, status: int, seconds: float) -> None:
    """Say what was wrong, and end this process within so many seconds: also where nobody reads what it says. What waits
    for a lost process, in MXNet's threads, cannot be called back."""
    _end_in(seconds, status)
    with suppress(OSError):
        os.write(2, f"error: {line}\n".encode())
    with suppress(OSError, ValueError, AttributeError):  # gone, closed, or None
        sys.stdout.flush()


@contextmanager
def ended_after(line: str, seconds: float) -> Iterator[None]:
    """End this process with that line where what is done in the meantime takes longer."""
    timer = threading.Timer(seconds, end_with, (line, 1, BEAT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_soon() -> None:
    """All workers are done: end this process, where it does not by itself. A server and the scheduler were once seen to
    stay in ps-lite for 10 s more."""
    _end_in(LAST_WORDS, 0)


def _end_in(seconds: float, status: int) -> None:
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def _numbers(names: Sequence[str]) -> list[int]:
    """How many workers and how many servers."""
    workers = sum(name.startswith("worker") for name in names)
    return [workers, len(names) - workers]


def _resolved(host: str, port: int) -> tuple[str, int]:
    """An IPv4 address, since ps-lite and gloo know no other."""
    try:
        return str(socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]), port
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise Error(f"the host {host} does not resolve to an IPv4 address ({why}): give a name or an address") from None


def _connect(host: str, port: int, name: str) -> socket.socket:
    began, said = time.monotonic(), False
    while True:
        try:
            return socket.create_connection(_resolved(host, port), timeout=SILENCE)
        except OSError as error:  # it may only be starting
            waited, why = time.monotonic() - began, error.strerror or "timed out"
            asked = "is the run's first process started, and is this its address?"
            if waited > PATIENCE:
                raise Error(f"nobody answers at {host}, port {port}, for {PATIENCE:.0f} s ({why}): {asked}") from None
            if waited > WAITING_SAID * BEAT and not said:
                said = True
                print(
                    f"gluon_mgpu: {name}: nobody answers at {host}, port {port} ({why}), asked for {PATIENCE:.0f} s: "
                    f"{asked}",
                    file=sys.stderr,
                )
            time.sleep(BEAT / 4)
