"""The heartbeat: clients that never connect, connect twice, end or fall silent, and connections from strangers."""

import gc
import json
import re
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import runs

from gluon_mgpu import Error
from gluon_mgpu.distributed import heartbeat
from gluon_mgpu.distributed.process import Process


@pytest.fixture
def ends(monkeypatch):
    """(error message or None, exit status) of each process that would have ended. Beats are fast."""
    monkeypatch.setattr(heartbeat, "BEAT_INTERVAL", 0.05)
    monkeypatch.setattr(heartbeat, "SILENCE_LIMIT", 5.0)
    found = []
    monkeypatch.setattr(heartbeat, "end_process", lambda line, status, seconds: found.append((line, status)))
    yield found
    for made in gc.get_objects():
        if isinstance(made, heartbeat.Client):
            made.finished = True  # otherwise, it would end this process when its connection closes


@pytest.fixture
def coordinator(ends):
    """make(workers, servers): the Coordinator of a scheduler if there are servers, else of Horovod's worker 0."""
    made = []

    def make(workers=2, servers=0, secret=""):
        kind = ("dist_sync", "scheduler") if servers else ("horovod", "worker")
        made.append(heartbeat.Coordinator(Process(*kind, 0, workers, servers, secret=secret), "127.0.0.1", 0))
        return made[-1]

    yield make
    for one in made:
        one.finished = True


def joined(coordinator):
    """A Client for each worker and server; their constructors wait for each other."""

    def client(name):
        role, rank = name.split()
        here = coordinator.here._replace(role=role, rank=int(rank))
        return heartbeat.Client(here, "127.0.0.1", coordinator.port)

    return in_threads(client, coordinator.expected)


def in_threads(function, arguments):
    return list(ThreadPoolExecutor().map(function, arguments, timeout=10))


def finish(coordinator, clients, ends):
    for client in clients:
        client.close()
    coordinator.close()
    assert {status for _, status in ends} <= {0}


class Raw:
    """A connection to the coordinator on which a test sends and reads lines."""

    def __init__(self, coordinator):
        self.socket = socket.create_connection(("127.0.0.1", coordinator.port), timeout=10)
        self.file, self.here = self.socket.makefile(), coordinator.here

    def hello(self, name, **more):
        right = {"of": [self.here.workers, self.here.servers], "secret": self.here.secret}
        self.send(json.dumps({"name": name, "about": f"host of {name}", **right, **more}))

    def send(self, text):
        self.socket.sendall(text.encode() + b"\n")

    def hear(self, key):
        return next(message for message in map(json.loads, self.file) if key in message)


def greeted(coordinator):
    """A connection for each worker and server, after all of them have said hello."""
    connections = [Raw(coordinator) for _ in coordinator.expected]
    for connection, name in zip(connections, coordinator.expected):
        connection.hello(name)
    while connections[0].hear("missing")["missing"]:
        pass
    return connections


def test_all_gather_returns_the_values_of_all_workers_by_rank(coordinator, ends):
    made = coordinator()
    clients = joined(made)
    turns = [0, 1, "x" * 500_000]

    def gathered(client):
        return [client.all_gather([client.here.rank, turn]) for turn in turns]

    assert in_threads(gathered, clients) == [[[[0, turn], [1, turn]] for turn in turns]] * 2
    finish(made, clients, ends)


def test_when_one_worker_asks_to_stop_all_go_on_to_the_last_step_that_any_has_issued(coordinator, ends):
    made = coordinator(2, 1)
    first, second, server = joined(made)
    assert all(first.may_step(step) for step in range(10)) and all(second.may_step(step) for step in range(12))
    second.ask_to_stop()
    assert first.stop_at.result(10) == second.stop_at.result(10) == 12
    assert [first.may_step(step) for step in (10, 11, 12)] == [True, True, False]
    assert not second.may_step(12)
    finish(made, [server, first, second], ends)


@pytest.mark.parametrize("lost, reporter", [(1, 0), (0, 1)])
def test_a_silent_client_is_named_to_all_others_and_one_reports_it(coordinator, ends, lost, reporter, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENCE_LIMIT", 1.0)
    connections = greeted(coordinator(2, 1))
    for connection in connections[:lost] + connections[lost + 1 :]:
        threading.Thread(target=keep_alive, args=(connection,), daemon=True).start()
    heard = [connections[i].hear("end") for i in (reporter, 2)]
    assert [message["report"] for message in heard] == [True, False]
    assert f"worker {lost} (host of worker {lost})" in heard[0]["end"]
    runs.wait(lambda: ends == [(None, 1)], 10)  # the scheduler ends too; a worker reports the error


@pytest.mark.parametrize("lost", [True, False])
def test_the_report_of_a_lost_process_ends_with_advice_and_that_of_a_failed_one_does_not(coordinator, ends, lost):
    first, second, _ = joined(coordinator(2, 1))
    first.advice, second.finished = "continue with --resume runs/first", True
    if lost:
        second.sock.shutdown(socket.SHUT_RDWR)
    else:
        second.close("no space left", 1)
    runs.wait(lambda: [line for line, _ in ends if line], 10)
    (line,) = [line for line, _ in ends if line]
    assert line.endswith(first.advice) == lost


def keep_alive(connection):
    with suppress(OSError):
        while True:
            connection.send("{}")
            time.sleep(0.05)


def test_a_client_that_does_not_read_delays_nobody(coordinator):
    silent, other = greeted(coordinator())
    for _ in range(40):  # more than fits into the sockets' buffers
        for connection in (silent, other):
            connection.send(json.dumps({"gather": "value", "value": "x" * 400_000}))
        assert len(other.hear("gathered")["values"]) == 2
    assert other.hear("missing")["missing"] == []


def test_once_all_workers_are_done_servers_exit_then_the_scheduler_which_waits_a_few_seconds_at_most(coordinator, ends):
    worker, server = joined(coordinator(1, 1))
    worker.close()
    runs.wait(lambda: ends == [(None, 0)] * 2, 10)  # the scheduler after GRACE_PERIOD, and the server
    server.sock.shutdown(socket.SHUT_RDWR)
    runs.wait(lambda: ends == [(None, 0)] * 3, 10)  # the scheduler, now


STRANGERS = ["GET / HTTP/1.1", "[1]", '{"name": "worker 0", "of": [2, 0], "secret": "x"}', '{"name": ["worker 0"]}']


@pytest.mark.parametrize("said", [*STRANGERS, "x" * (32 << 20), "[" * 100_000], ids=lambda said: said[:20])
def test_a_stranger_disturbs_nobody(coordinator, ends, said):
    made = coordinator()
    with suppress(OSError):
        Raw(made).send(said)
    finish(made, joined(made), ends)


@pytest.mark.parametrize("said", ['{"gather": []}', "x"])
def test_a_client_that_sends_a_malformed_message_is_lost(coordinator, said):
    first, second = greeted(coordinator())
    second.send(said)
    assert "worker 1 (host of worker 1)" in first.hear("end")["end"]


REFUSED = [
    ({"name": "worker 0"}, ["worker 0"]),
    ({"name": "worker 2"}, ["worker 2"]),
    ({"of": [1, 1]}, ["[1, 1]", "[2, 1]"]),
    *(({"secret": secret}, ["GLUON_MGPU_SECRET"]) for secret in ("", "wrong", "é", 1, None)),
]


@pytest.mark.parametrize("greeting, named", REFUSED, ids=lambda value: str(value)[:30])
def test_a_process_that_does_not_belong_to_the_run_is_refused_with_the_reason(coordinator, greeting, named):
    made = coordinator(2, 1, secret="secret")
    first, other = Raw(made), Raw(made)
    first.hello("worker 0")
    first.hear("missing")
    other.hello(**{"name": "worker 1", **greeting})
    heard = other.hear("end")
    assert heard["status"] == 2 and all(part in heard["end"] for part in named)
    assert not other.file.read() and list(made.clients) == ["worker 0"]


def test_a_greeting_that_is_too_long_is_not_read_to_its_end(coordinator):
    stranger = Raw(coordinator()).socket
    stranger.settimeout(heartbeat.SILENCE_LIMIT / 2)
    with suppress(ConnectionError):
        stranger.sendall(b"x" * 100_000)
        assert stranger.recv(1) == b""  # a timeout would not be a ConnectionError


def test_a_stranger_that_never_ends_its_greeting_is_disconnected(coordinator, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENCE_LIMIT", 0.5)
    stranger = Raw(coordinator()).socket
    with pytest.raises(OSError):
        for _ in range(100):
            stranger.sendall(b"x")
            time.sleep(0.1)


def test_processes_that_do_not_connect_in_time_are_named(coordinator, monkeypatch):
    first = Raw(coordinator(2, 1))
    first.hello("worker 0")
    first.hear("missing")
    monkeypatch.setattr(heartbeat, "CONNECT_LIMIT", 0.2)
    assert first.hear("end")["end"].startswith("worker 1, server 0 ")


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid"])
def test_no_answer_and_an_unknown_host_are_errors_with_the_address(host, monkeypatch):
    monkeypatch.setattr(heartbeat, "CONNECT_LIMIT", 0.2)
    with pytest.raises(Error, match=host):
        heartbeat.Client(Process("horovod", workers=2), host, port=1)


@pytest.mark.parametrize("name, reported", [("worker 1", True), ("worker 2", False)])
def test_a_worker_that_loses_worker_0_ends_and_only_worker_1_reports_it(coordinator, ends, name, reported):
    made = coordinator(3)
    joined(made)
    made.clients[name].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    runs.wait(lambda: len(ends) == 3, 10)
    assert {status for _, status in ends} == {1}
    assert any(re.match("worker 1: .*worker 0", line or "") for line, _ in ends) == reported


@pytest.mark.parametrize("gone", ["closed", "closed by its reader"])
def test_a_process_whose_output_nobody_reads_ends_too(coordinator, gone):
    made = coordinator()
    here = 'process.Process("horovod", "worker", 1, 2)'
    waits = f"from gluon_mgpu.distributed import heartbeat, process; heartbeat.Client({here}, '127.0.0.1', {made.port})"
    line = [sys.executable, "-c", waits]
    if gone == "closed":
        line = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *line]
    with runs.start(line) as process:
        runs.wait(lambda: "worker 1" in made.clients)
        if gone == "closed by its reader":
            process.stdout.close(), process.stderr.close()
        made.clients["worker 1"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        assert process.wait(10) == 1
