"""Fuzzing: each reader gets random, mutated and hostile bytes. It may raise Error, and nothing else, within limits on
time and memory.

`python tests/torture/fuzz.py checkpoint --seconds 600 --seed 1`
"""

import argparse
import gzip
import hashlib
import io
import json
import random
import resource
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from gluon_mgpu import Error
from gluon_mgpu.data import datasets
from gluon_mgpu.distributed import heartbeat
from gluon_mgpu.distributed.process import Process
from gluon_mgpu.training import records
from gluon_mgpu.training.settings import Settings

MEMORY = 1 << 28  # bytes that a reader may use
SECONDS = 20  # for one input, on a busy machine
BOMB = 1 << 29  # bytes to which a small hostile file decompresses
BOMBS = 0.01  # fraction of inputs
CONFIG = {**asdict(Settings(limit=200, seed=1)), "impl": "scratch", "devices": ["cpu(0)"], "threads": 1, "workers": 1}
EPOCH = dict.fromkeys(records.Epoch._fields, 1)
FACTS = {"format": 1, "config": CONFIG, "history": [EPOCH], "steps": 3, "loss_sum": 1.5, "seconds": 0.5}
VALUES = [None, True, -1, 10**400, 1e400, float("nan"), "", "x" * 999, "\x1b[31m", 5 * 10**9, "cpu(99999999999)"]
VALUES += [[], [[]], [1, 2], {}, {"": 1}]
TEXTS = (b"[" * 10**5, b'{"a":' * 10**5, b"9" * 10**4, b"NaN", b'"\\ud800"', b"\xff\xfe", b"")
HEADERS = ("<f4", "|O", "|S0", "<U1000000000", "<M8[ns]", "x", [("a", "<f4", (2**31,))])
SIZES = (2**31, 2**40, 2**62, 2**63, 10**30, -1, 0, "x", None)


def mutated(rng, content):
    """Change some bytes: overwrite, insert, delete or repeat them."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        place, size = rng.randrange(len(content) + 1), rng.choice((1, 1, 2, 4, 16, 256))
        new = rng.choice((rng.randbytes(size), b"\0" * size, b"\xff" * size, bytes(content[place : place + size]), b""))
        content[place : place + rng.choice((0, len(new), size))] = new
    return bytes(content)


def text(rng, value):
    """JSON with a changed, missing or hostile value somewhere."""

    def changed(value):
        if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
            return rng.choice(VALUES)
        if isinstance(value, list):
            return [changed(value[0]), *value[1:]]
        name = rng.choice(list(value))
        return {k: changed(v) if k == name else v for k, v in value.items() if k != name or rng.random() < 0.9}

    written = json.dumps(changed(value) if rng.random() < 0.8 else value).encode()
    return rng.choice((written, written, written, mutated(rng, written), rng.choice(TEXTS)))


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def make_checkpoint(rng):
    whole = rng.random() < 0.3  # nothing is wrong except the value of one setting
    setting = {rng.choice(list(CONFIG)): rng.choice(VALUES)}
    facts = json.dumps({**FACTS, "config": {**CONFIG, **setting}}).encode() if whole else text(rng, FACTS)
    facts = npy(np.frombuffer(facts, np.uint8))
    members = {"W1.npy": npy(np.ones((20, 1, 5, 5), np.float32)), "b1.npy": npy(np.ones(20)), "facts.json.npy": facts}
    changes = ("none",) if whole else ("header", "path", "bytes", "missing", "archive", "none")
    name, change = rng.choice(list(members)), rng.choice(changes)
    if change == "header":
        shape = rng.choice(((rng.choice(SIZES),), (2**31, rng.choice(SIZES)), (2,) * 100, (4, 4), rng.choice(SIZES)))
        header = repr({"descr": rng.choice(HEADERS), "fortran_order": rng.random() < 0.5, "shape": shape}).encode()
        header = rng.choice((header, header, header, mutated(rng, header), b"(" * 5000, b"-" * 9000 + b"1"))
        members[name] = b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + bytes(64)
    elif change == "path":
        members[rng.choice(("../../up", "/up", "é"))] = members.pop(name)
    elif change == "bytes":
        members[name] = mutated(rng, members[name])
    elif change == "missing":
        del members[name]
    packed = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    kind = zipfile.ZIP_STORED if whole else rng.choice((zipfile.ZIP_STORED, *packed))
    if not whole and rng.random() < BOMBS:
        kind, members["W2.npy"] = zipfile.ZIP_DEFLATED, bytes(BOMB >> 1)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind, compresslevel=1) as archive:
        for path, content in members.items():
            archive.writestr(zipfile.ZipInfo(path), content, kind)
    content = mutated(rng, file.getvalue()) if change == "archive" else file.getvalue()
    return content + hashlib.sha256(content).hexdigest().encode() if rng.random() < 0.95 else content


def read_checkpoint(content, folder):
    """Read a checkpoint, and what `evaluate` and `train --resume` do with its facts before they import MXNet."""
    (folder / "checkpoint.npz").write_bytes(content)
    records.recorded_options(folder)
    _, _, settings, position = records.last(folder)
    assert "\x1b" not in str(position)
    settings.learning_rate(position.steps, 10)
    datasets.load("synthetic", None, settings.limit, settings.seed)


def make_data(rng):
    if rng.random() < BOMBS:
        return gzip.compress(bytes(1 << 20), 1) * (BOMB >> 20)
    whole = struct.pack(">IIII", 2051, 10000, 28, 28) + rng.randbytes(784)
    packed = gzip.compress(whole, mtime=0)
    return rng.choice((whole, mutated(rng, whole), mutated(rng, packed), packed[: rng.randrange(len(packed))]))


def read_data(content, folder):
    for file in datasets.SHA256["mnist"]:
        (folder / file).write_bytes(content)
    datasets.read(folder, "mnist")


def make_messages(rng):
    secret = rng.choice(("the secret", "another", "", None))
    greeting = {"name": "worker 0", "about": "x", "of": [2, 0], "secret": secret}
    values = [{"gather": key, "value": 3} for key in ("value", "issued")]
    messages = [*values, {"stop": True}, {"beat": True}, {"failed": "x", "status": 1}]
    lines = [text(rng, rng.choice([greeting, *messages])) for _ in range(rng.randint(1, 4))]
    first = rng.choice((json.dumps(greeting).encode(), text(rng, greeting), rng.randbytes(9000)))
    return b"\n".join([first, *lines, b""])


def read_messages(content, folder):
    """A coordinator gets messages. If the sender does not know the secret, it must still answer a worker afterward."""
    coordinator = heartbeat.Coordinator(Process("horovod", "worker", 0, 2, secret="the secret"), "127.0.0.1", 0)
    place, failures = ("127.0.0.1", coordinator.port), []
    threading.excepthook = lambda failed: failures.append(failed.exc_value)
    with socket.create_connection(place, SECONDS / 2) as stranger:
        try:
            stranger.sendall(content)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):  # until the coordinator closes the connection
                pass
        except socket.timeout:
            raise
        except OSError:  # it has already closed the connection
            pass
    if not coordinator.ended:
        answer = b""
        with suppress(OSError), socket.create_connection(place, SECONDS / 2) as worker:
            worker.sendall(json.dumps({"name": "worker 1", "of": [2, 0], "secret": "the secret"}).encode() + b"\n")
            answer = worker.recv(1 << 16)
        if b"missing" not in answer and not coordinator.ended:  # the loss of a sender with the secret ends the run
            failures.append("no answer")
    coordinator.finished = True
    coordinator.thread.join()
    if failures:
        raise RuntimeError(failures)


heartbeat.BEAT_INTERVAL = 0.05  # a coordinator ends after at most one interval

READERS = {
    "checkpoint": (make_checkpoint, read_checkpoint),
    "data": (make_data, read_data),
    "messages": (make_messages, read_messages),
}


def check(read, content):
    """Read one input. Raises what the reader raises, except Error."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
        signal.alarm(SECONDS)
        try:
            with suppress(Error):
                read(content, Path(folder))
        finally:
            signal.alarm(0)
            resource.setrlimit(resource.RLIMIT_AS, before)


def readers(rng, box):
    """All readers in turn, for a few seconds each."""
    for reader in READERS:
        done = box.run([sys.executable, __file__, reader, "--seconds", 4, "--seed", rng.randrange(10**6)])
        box.require(done.status == 0, f"{reader}: {done.out}", done)


SCENARIOS = {"readers": (readers, 2.5)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--input", type=int, default=0, help="the first input's number")
    options = parser.parse_args()
    make, read = READERS[options.reader]
    until, n = time.monotonic() + options.seconds, options.input
    while time.monotonic() < until:
        content = make(random.Random(f"{options.reader} {options.seed} {n}"))
        try:
            check(read, content)
        except BaseException as error:
            print(f"python tests/torture/fuzz.py {options.reader} --seed {options.seed} --input {n}: {content[:200]!r}")
            sys.exit(f"error: {error!r} {''.join(traceback.format_tb(error.__traceback__)[-3:])}")
        n += 1
    print(f"{options.reader}: {n - options.input} inputs")


if __name__ == "__main__":
    main()
