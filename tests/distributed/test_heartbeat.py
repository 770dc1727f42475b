"""The heartbeat: clients that do not come, come twice, end or fall silent, and strangers."""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import runs

from gluon_mgpu import Error
from gluon_mgpu.distributed import heartbeat

PAIR = ("worker 0", "worker 1")
CLIENTS = []  # of the test that runs


@pytest.fixture
def ended(monkeypatch):
    """The exit statuses with which Clients would have ended this process. Beats are fast."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.05)
    monkeypatch.setattr(heartbeat, "SILENCE", 5.0)
    statuses = []
    monkeypatch.setattr(heartbeat, "exit_after", lambda seconds, status: statuses.append(status))
    yield statuses
    for client in CLIENTS:
        client.over = True
    CLIENTS.clear()


@pytest.fixture
def coordinator(ended):
    """make(*names): a Coordinator for these clients. Its attribute `ends` has the arguments of on_end."""
    made = []

    def make(*expected):
        ends = []
        made.append(heartbeat.Coordinator("127.0.0.1", 0, expected or PAIR, lambda *end: ends.append(end)))
        made[-1].ends = ends
        return made[-1]

    yield make
    for one in made:
        one.over = True


def joined(coordinator, *names):
    """A Client per name; their constructors wait for each other."""
    made = {}

    def join(name):
        made[name] = heartbeat.Client("127.0.0.1", coordinator.port, name, coordinator.expected)

    in_threads(join, names)
    CLIENTS.extend(made.values())
    return [made[name] for name in names]


def in_threads(function, arguments):
    threads = [threading.Thread(target=function, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)


def finish(coordinator, clients):
    for client in clients:
        client.done()
    coordinator.close()
    assert not coordinator.ends


class Raw:
    """A connection to the coordinator on which a test sends and reads lines."""

    def __init__(self, coordinator):
        self.socket = socket.create_connection(("127.0.0.1", coordinator.port), timeout=10)
        self.file, self.counts = self.socket.makefile(), coordinator.counts

    def hello(self, name, about="here", **more):
        self.send(json.dumps({"name": name, "about": about, "of": self.counts, **more}))

    def send(self, text):
        self.socket.sendall(text.encode() + b"\n")

    def hear(self, key):
        return next(message for message in map(json.loads, self.file) if key in message)


def test_all_gather_returns_the_values_of_all_workers_by_rank(coordinator):
    made = coordinator()
    clients = joined(made, *PAIR)
    got, history = {}, "x" * (4 << 20)

    def gather(client):
        got[client.name] = [client.all_gather([client.name, turn]) for turn in (*range(3), history)]

    in_threads(gather, clients)
    assert got["worker 0"] == got["worker 1"] == [[["worker 0", i], ["worker 1", i]] for i in (*range(3), history)]
    finish(made, clients)


def test_when_one_worker_asks_to_stop_all_go_on_to_the_last_step_that_any_has_issued(coordinator):
    made = coordinator(*PAIR, "server 0")
    first, second, server = joined(made, *PAIR, "server 0")
    assert all(first.may_step(step) for step in range(10)) and all(second.may_step(step) for step in range(12))
    second.ask_to_stop()
    assert first.stop_known.wait(10) and second.stop_known.wait(10)
    assert [first.may_step(step) for step in (10, 11, 12)] == [True, True, False]
    assert not second.may_step(12)
    server.done()
    finish(made, [first, second])


@pytest.mark.parametrize("end", ["closes", "is silent"])
@pytest.mark.parametrize("lost, reporter", [(1, 0), (0, 1)])
def test_a_lost_client_is_named_to_all_others_and_the_first_of_them_reports_it(
    coordinator, end, lost, reporter, monkeypatch
):
    if end == "is silent":
        monkeypatch.setattr(heartbeat, "SILENCE", 2.0)
    made = coordinator(*PAIR, "server 0")
    connections = [Raw(made) for _ in range(3)]
    for connection, name in zip(connections, made.expected):
        connection.hello(name, f"host of {name}")
    connections[0].hear("complete")
    if end == "closes":
        connections[lost].socket.shutdown(socket.SHUT_RDWR)
    for connection in connections[:lost] + connections[lost + 1 :]:
        threading.Thread(target=keep_alive, args=(connection,), daemon=True).start()
    heard = [connections[i].hear("end") for i in (reporter, 2)]
    assert [message["report"] for message in heard] == [True, False]
    line = heard[0]["end"]
    assert f"worker {lost} (host of worker {lost})" in line and ("2 s" if end == "is silent" else "connection") in line
    made.thread.join(10)
    assert made.ends == [(line, True)]


def keep_alive(connection):
    with suppress(OSError):
        while True:
            connection.send("{}")
            time.sleep(0.05)


def test_once_all_workers_are_done_servers_get_a_few_seconds_and_are_not_lost(coordinator, ended):
    made = coordinator("worker 0", "server 0")
    worker, server = joined(made, "worker 0", "server 0")
    over = threading.Event()
    made.on_over = over.set
    worker.done()
    assert over.wait(10)
    runs.wait(lambda: ended == [0], 10)
    server.connection.sock.shutdown(socket.SHUT_RDWR)
    made.close()
    assert not made.ends


STRANGERS = ["GET / HTTP/1.1", "[1]", '{"name": "worker 7", "of": [2, 0]}', '{"name": ["worker 0"]}', "x" * (32 << 20)]


@pytest.mark.parametrize("said", [*STRANGERS, "[" * 100_000], ids=lambda said: said[:20])
def test_a_stranger_disturbs_nobody(coordinator, said):
    made = coordinator()
    with suppress(OSError):
        Raw(made).send(said)
    finish(made, joined(made, *PAIR))


def test_a_stranger_that_says_nothing_is_disconnected(coordinator, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENCE", 1.0)
    assert Raw(coordinator()).socket.recv(1) == b""


@pytest.mark.parametrize("said", ['{"issued": []}', '{"issued": "x"}', '{"issued": Infinity}', "[]", "x"])
def test_a_client_that_sends_a_malformed_message_is_lost(coordinator, said):
    made = coordinator()
    first, second = Raw(made), Raw(made)
    first.hello("worker 0")
    second.hello("worker 1")
    first.hear("complete")
    second.send(said)
    assert "worker 1 (here)" in first.hear("end")["end"]


def test_a_second_process_with_the_same_name_is_refused(coordinator):
    made = coordinator()
    first, second = Raw(made), Raw(made)
    first.hello("worker 0")
    first.hear("missing")
    second.hello("worker 0")
    assert second.hear("end")["status"] == 2 and list(made.clients) == ["worker 0"]


def test_a_process_started_for_another_number_of_workers_is_refused_with_both_numbers(coordinator):
    other = Raw(coordinator(*PAIR, "server 0"))
    other.hello("worker 1", of=[1, 1])
    heard = other.hear("end")
    assert heard["status"] == 2 and "[1, 1]" in heard["end"] and "[2, 1]" in heard["end"]


def test_processes_that_do_not_connect_in_time_are_named(coordinator, monkeypatch):
    first = Raw(coordinator(*PAIR, "server 0"))
    first.hello("worker 0")
    first.hear("missing")
    monkeypatch.setattr(heartbeat, "PATIENCE", 0.2)
    assert first.hear("end")["end"].startswith("worker 1, server 0 ")


def test_a_port_in_use_an_unknown_host_and_no_answer_are_errors_with_the_address(ended, monkeypatch):
    monkeypatch.setattr(heartbeat, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Error, match=f"127.0.0.1, port {port} .*in use"):
            heartbeat.Coordinator("127.0.0.1", port, PAIR)
    with pytest.raises(Error, match=f"127.0.0.1, port {port} .*refused"):
        heartbeat.Client("127.0.0.1", port, "worker 0", PAIR)
    with pytest.raises(Error, match="no.such.host.invalid"):
        heartbeat.Coordinator("no.such.host.invalid", 0, PAIR)
    with pytest.raises(Error, match="no.such.host.invalid"):
        heartbeat.Client("no.such.host.invalid", 1, "worker 0", PAIR)


@pytest.mark.parametrize("name, reported", [("worker 1", True), ("worker 2", False)])
def test_a_worker_that_loses_worker_0_ends_and_only_worker_1_reports_it(coordinator, ended, name, reported, capsys):
    made = coordinator(*PAIR, "worker 2")
    joined(made, *made.expected)
    made.clients[name].sock.shutdown(socket.SHUT_RDWR)
    runs.wait(lambda: len(ended) == 3, 10)
    assert ("error: worker 1: lost contact with worker 0" in capsys.readouterr().err) == reported


WAITS = """
import sys, time
from gluon_mgpu.distributed import heartbeat
heartbeat.Client("127.0.0.1", int(sys.argv[1]), "worker 1", ["worker 1"])
time.sleep(60)
"""


@pytest.mark.parametrize("gone", ["closed", "closed by its reader"])
def test_a_process_whose_output_nobody_reads_ends_too(coordinator, gone):
    made = coordinator("worker 1")
    line = [sys.executable, "-c", WAITS, str(made.port)]
    if gone == "closed":
        line = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *line]
    with runs.start(line) as process:
        try:
            runs.wait(lambda: "worker 1" in made.clients)
            if gone == "closed by its reader":
                process.stdout.close(), process.stderr.close()
            made.clients["worker 1"].sock.shutdown(socket.SHUT_RDWR)
            assert process.wait(10) == 1
        finally:
            process.kill()


TAKES_TOO_LONG = """
import time
from gluon_mgpu.distributed import heartbeat
heartbeat.BEAT = 0.05
with heartbeat.time_limit(60, "soon enough"):
    pass
with heartbeat.time_limit(0.5, "nobody came"):
    time.sleep(60)
"""


def test_a_time_limit_ends_the_process_with_an_error():
    done = subprocess.run([sys.executable, "-c", TAKES_TOO_LONG], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (1, "error: nobody came\n")
