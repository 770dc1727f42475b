"""The watch of who is alive: processes that do not come, are there twice, end or fall silent, and strangers."""

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import runs

from gluon_mgpu import Error
from gluon_mgpu.distributed import heartbeat as watch

PAIR = ("worker 0", "worker 1")
MEMBERS = []  # that a test has joined


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watch, "BEAT", 0.05)
    monkeypatch.setattr(watch, "SILENCE", 5.0)
    ended = []  # what a Member that ends its process asks for: here that is pytest's
    monkeypatch.setattr(watch, "_end_in", lambda seconds, status: ended.append(status))
    yield
    for member in MEMBERS:  # also where a test failed
        member.over = True
    MEMBERS.clear()
    assert not ended


def joined(hub, *names):
    """A Member each, which wait for each other."""
    made = {}
    threads = [
        threading.Thread(
            target=lambda name=name: made.update({name: watch.Member("127.0.0.1", hub.port, name, hub.expected)})
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    MEMBERS.extend(made.values())
    return [made[name] for name in names]


class Raw:
    """A connection to the hub that speaks for itself."""

    def __init__(self, hub):
        self.socket = socket.create_connection(("127.0.0.1", hub.port), timeout=10)
        self.file, self.numbers = self.socket.makefile(), hub.numbers

    def hello(self, name, about="here", **more):
        self.send(json.dumps({"name": name, "about": about, "of": self.numbers, **more}))

    def send(self, text):
        self.socket.sendall(text.encode() + b"\n")

    def hear(self, key):
        return next(message for message in map(json.loads, self.file) if key in message)


def test_what_workers_gather_is_what_each_gave_by_rank(quick):
    hub = watch.Hub("127.0.0.1", 0, PAIR)
    members = joined(hub, *PAIR)
    got, history = {}, "x" * (4 << 20)

    def gather(member):
        got[member.name] = [member.gather([member.name, turn]) for turn in (*range(3), history)]

    threads = [threading.Thread(target=gather, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert got["worker 0"] == got["worker 1"] == [[["worker 0", i], ["worker 1", i]] for i in (*range(3), history)]
    for member in members:
        member.done()
    hub.close()


def test_once_one_asks_to_stop_all_go_on_to_the_step_of_the_foremost(quick):
    hub = watch.Hub("127.0.0.1", 0, (*PAIR, "server 0"))
    first, second, server = joined(hub, *PAIR, "server 0")
    assert all(first.may_step(step) for step in range(10)) and all(second.may_step(step) for step in range(12))
    second.ask_to_stop()
    assert first.stop_known.wait(10) and second.stop_known.wait(10)
    assert [first.may_step(step) for step in (10, 11, 12)] == [True, True, False]
    assert not second.may_step(12)
    server.done()
    runs.wait(lambda: "server 0" in hub.ended)  # or it would be told that all workers are done, and end
    first.done(), second.done()
    hub.close()


def keep_alive(connection):
    with suppress(OSError):
        while True:
            connection.send("{}")
            time.sleep(0.05)


@pytest.mark.parametrize("end", ["closes", "is silent"])
def test_a_member_that_ends_or_falls_silent_is_named_to_the_others(quick, end, monkeypatch):
    if end == "is silent":
        monkeypatch.setattr(watch, "SILENCE", 2.0)
    lines = []
    hub = watch.Hub("127.0.0.1", 0, PAIR, lines.append)
    first, second = Raw(hub), Raw(hub)
    first.hello("worker 0", "here")
    second.hello("worker 1", "there")
    first.hear("all")
    if end == "closes":
        second.socket.shutdown(socket.SHUT_RDWR)
    else:
        threading.Thread(target=keep_alive, args=(first,), daemon=True).start()
    why = "its connection ended" if end == "closes" else "it has given no sign of life for 2 s"
    assert first.hear("lost")["lost"] == f"worker 1 (there) was lost: {why}"
    hub.thread.join(10)
    assert lines == [f"worker 1 (there) was lost: {why}"]


def test_a_server_that_ends_before_the_scheduler_once_all_workers_are_done_is_not_lost(quick):
    lines, over = [], threading.Event()
    hub = watch.Hub("127.0.0.1", 0, ("worker 0", "server 0"), lines.append, over.set)
    worker, server = Raw(hub), Raw(hub)
    worker.hello("worker 0")
    server.hello("server 0")
    worker.hear("all")
    worker.send('{"done": true}')
    server.hear("over")
    server.socket.shutdown(socket.SHUT_RDWR)
    time.sleep(0.5)
    hub.close()
    assert over.is_set() and not lines


def test_a_member_that_is_done_may_go(quick):
    lines = []
    hub = watch.Hub("127.0.0.1", 0, PAIR, lines.append)
    members = joined(hub, *PAIR)
    for member in members:
        member.done()
        member.connection.sock.shutdown(socket.SHUT_RDWR)
    hub.close()
    assert not lines


@pytest.mark.parametrize(
    "said",
    [
        "GET / HTTP/1.1",
        "[1]",
        '{"name": "worker 7", "of": [2, 0]}',
        '{"name": ["worker 0"]}',
        "x" * (32 << 20),
        "[" * 100_000,
    ],
)
def test_a_stranger_disturbs_nobody(quick, said):
    lines = []
    hub = watch.Hub("127.0.0.1", 0, PAIR, lines.append)
    stranger = Raw(hub)
    try:
        stranger.send(said)
    except OSError:
        pass
    members = joined(hub, *PAIR)
    assert len(members) == 2 and not lines
    for member in members:
        member.done()
    hub.close()


def test_a_stranger_that_says_nothing_is_sent_away(quick, monkeypatch):
    monkeypatch.setattr(watch, "SILENCE", 1.0)
    hub = watch.Hub("127.0.0.1", 0, PAIR)
    assert Raw(hub).socket.recv(1) == b""
    hub.over = True


def test_strangers_that_hold_all_files_disturb_nobody_once_they_are_gone():
    # In a process of its own: this one may have no file left.
    program = "import test_watch; test_watch.strangers_hold_all_files(); print('undisturbed')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "undisturbed\n"), done.stderr


def strangers_hold_all_files():
    hub = watch.Hub("127.0.0.1", 0, PAIR)
    other = Raw(hub)
    other.hello("worker 7")
    other.hear("lost")  # it listens
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    stranger, free = socket.socket(), os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        stranger.connect(("127.0.0.1", hub.port))
        time.sleep(0.5)  # in which the hub cannot accept it
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for member in joined(hub, *PAIR):
        member.done()
    hub.close()


@pytest.mark.parametrize("said", ['{"gather": []}', '{"issued": "x"}', '{"issued": Infinity}', "[]", "x"])
def test_a_member_that_says_what_none_can_say_is_lost_to_the_others(quick, said):
    hub = watch.Hub("127.0.0.1", 0, PAIR)
    first, second = Raw(hub), Raw(hub)
    first.hello("worker 0")
    second.hello("worker 1")
    first.hear("all")
    first.send('{"issued": 1}')
    second.send(said)
    assert first.hear("lost")["lost"].startswith("worker 1 (here) was lost: its connection ended")


def test_a_number_that_is_given_twice_is_refused_to_the_second_one(quick):
    hub = watch.Hub("127.0.0.1", 0, PAIR)
    first, second = Raw(hub), Raw(hub)
    first.hello("worker 0")
    first.hear("missing")
    second.hello("worker 0")
    assert second.hear("lost")["lost"].startswith("worker 0 is there already: each worker")


def test_a_process_started_for_another_number_of_workers_or_servers_is_refused_with_both(quick):
    hub = watch.Hub("127.0.0.1", 0, (*PAIR, "server 0"))
    other = Raw(hub)
    other.hello("worker 1", of=[1, 1])
    said = other.hear("lost")
    assert said["lost"].startswith(
        "worker 1 has DMLC_NUM_WORKER, DMLC_NUM_SERVER [1, 1] where the scheduler has [2, 1]:"
    )
    assert said["status"] == 2


def test_who_does_not_come_is_named(quick, monkeypatch):
    hub = watch.Hub("127.0.0.1", 0, (*PAIR, "server 0"))
    first = Raw(hub)
    first.hello("worker 0")
    first.hear("missing")
    monkeypatch.setattr(watch, "PATIENCE", 0.2)
    assert first.hear("lost")["lost"].startswith("worker 1, server 0 did not come within 0 s")


def test_a_taken_port_a_wrong_host_and_nobody_there_are_one_line_each(quick, monkeypatch):
    monkeypatch.setattr(watch, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(
            Error, match=f"127.0.0.1, port {taken.getsockname()[1]} cannot be listened on .Address already"
        ):
            watch.Hub("127.0.0.1", taken.getsockname()[1], PAIR)
        free = taken.getsockname()[1]
    with pytest.raises(Error, match=r"nobody answers at 127\.0\.0\.1, port .* for 0 s"):
        watch.Member("127.0.0.1", free, "worker 0", PAIR)
    for made in (
        lambda: watch.Hub("no.such.host.invalid", 0, PAIR),
        lambda: watch.Member("no.such.host.invalid", 1, "worker 0", PAIR),
    ):
        with pytest.raises(Error, match="the host no.such.host.invalid does not resolve"):
            made()


WAITS = """
import sys, time
from gluon_mgpu.distributed import heartbeat as watch
watch.BEAT, watch.SILENCE = 0.05, 1.0
member = watch.Member("127.0.0.1", int(sys.argv[1]), "worker 1", sys.argv[2:])
print("there", flush=True)
time.sleep(60)
"""


def test_a_process_whose_hub_is_lost_ends_with_a_line_that_names_it(quick):
    hub = watch.Hub("127.0.0.1", 0, ("worker 1",))
    line = [sys.executable, "-c", WAITS, str(hub.port), *hub.expected]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=runs.ROOT) as process:
        assert process.stdout.readline() == "there\n"
        hub.members["worker 1"].sock.shutdown(socket.SHUT_RDWR)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err == "error: worker 1: worker 0 was lost: its connection ended\n"


WAITS_IN_VAIN = """
import time
from gluon_mgpu.distributed import heartbeat as watch
watch.BEAT = 0.05
with watch.ended_after("worker 1: soon enough", 60):
    pass
with watch.ended_after("worker 1: nobody came", 0.5):
    time.sleep(60)
"""


def test_what_takes_too_long_ends_the_process_with_a_line():
    done = subprocess.run([sys.executable, "-c", WAITS_IN_VAIN], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (1, "error: worker 1: nobody came\n")


@pytest.mark.parametrize("gone", ["closed", "closed by its reader", "not read"])
def test_a_process_whose_output_nobody_reads_ends_too(quick, gone):
    hub = watch.Hub("127.0.0.1", 0, ("worker 1",))
    full = "import os; os.set_blocking(2, False)\ntry:\n    while True: os.write(2, b'x' * 4096)\n"
    full += "except BlockingIOError: os.set_blocking(2, True)\n"
    script = (full if gone == "not read" else "") + WAITS.replace('print("there", flush=True)\n', "")
    line, streams = (
        [sys.executable, "-c", script, str(hub.port), *hub.expected],
        {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
    )
    if gone == "closed":
        line, streams = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *line], {}
    with subprocess.Popen(line, cwd=runs.ROOT, **streams) as process:
        try:
            runs.wait(lambda: "worker 1" in hub.members)
            if gone == "closed by its reader":
                process.stdout.close(), process.stderr.close()
            hub.members["worker 1"].sock.shutdown(socket.SHUT_RDWR)
            assert process.wait(10) == 1
        finally:
            process.kill()


def test_a_server_that_does_not_end_by_itself_ends_once_all_workers_are_done(quick):
    over = threading.Event()
    hub = watch.Hub("127.0.0.1", 0, ("worker 0", "server 0"), on_over=over.set)
    script = WAITS.replace('"worker 1"', '"server 0"').replace("= 0.05, 1.0", "= 0.05, 1.0; watch.LAST_WORDS = 0.5")
    with subprocess.Popen(
        [sys.executable, "-c", script, str(hub.port), *hub.expected], stdout=subprocess.PIPE, cwd=runs.ROOT
    ) as server:
        (worker,) = joined(hub, "worker 0")
        server.stdout.readline()
        assert server.poll() is None and not over.is_set()
        worker.done()
        assert over.wait(10)
        hub.members["server 0"].sock.shutdown(socket.SHUT_RDWR)  # as when the scheduler ends first
        assert server.wait(30) == 0
