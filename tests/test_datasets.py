"""Where data comes from, what is refused, and what a fetch leaves behind, on tiny files and a loopback server."""

import gzip
import hashlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import datasets

NAME = "fashion-mnist"
TINY = datasets.synthetic(700, 120, seed=5)
HTML = b"<!DOCTYPE html><title>Sign in to the network</title>"
CHILD = """
import json, sys
from gluon_mgpu.training import datasets
datasets.SHA256[sys.argv[1]] = json.loads(sys.argv[2])
print(datasets.load(sys.argv[1]).train_labels.sum())
"""


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.tobytes()


FILES = {
    "train-images-idx3-ubyte": idx(TINY.train_images[:, 0]),
    "train-labels-idx1-ubyte": idx(TINY.train_labels),
    "t10k-images-idx3-ubyte": idx(TINY.test_images[:, 0]),
    "t10k-labels-idx1-ubyte": idx(TINY.test_labels),
}
SUMS = {file: hashlib.sha256(raw).hexdigest() for file, raw in FILES.items()}
GZIPPED = {f"{file}.gz": gzip.compress(raw) for file, raw in FILES.items()}


class Handler(http.server.BaseHTTPRequestHandler):
    """GET /BEHAVIOUR/FILE.gz"""

    def do_GET(self):
        _, behaviour, file = self.path.split("/")
        self.server.requests.append(self.path)
        if behaviour == "both" and file == "train-images-idx3-ubyte.gz":
            self.server.barrier.wait(30)
        if behaviour == "absent" or (behaviour == "first-only" and file != "train-images-idx3-ubyte.gz"):
            return self.send_error(404)
        body = HTML if behaviour == "html" else GZIPPED[file]
        if behaviour == "corrupt":
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 255]) + body[middle + 1 :]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        half = body[: len(body) // 2]
        if behaviour == "slow" and file == "train-images-idx3-ubyte.gz":
            step = len(body) // 20 + 1
            for start in range(0, len(body), step):
                self.wfile.write(body[start : start + step])
                time.sleep(0.04)
        elif behaviour in ("cut", "stalled"):
            self.wfile.write(half)
            if behaviour == "stalled":
                self.server.released.wait(20)
        else:
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.requests, running.released, running.barrier = [], threading.Event(), threading.Barrier(2)
        running.url = lambda behaviour: f"http://127.0.0.1:{running.server_port}/{behaviour}/"
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield running
        running.released.set()
        running.shutdown()


@pytest.fixture(autouse=True)
def nothing_there(tmp_path, monkeypatch):
    """A home, a system and a network without data, and a PATH without apt-get."""
    for variable in ("GLUON_MGPU_DATA", "GLUON_MGPU_MIRROR", "MXNET_HOME"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(datasets, "SYSTEM_FOLDER", tmp_path / "system")
    monkeypatch.setattr(datasets, "SHA256", {NAME: SUMS, "mnist": SUMS})
    closed = ("http://127.0.0.1:1/",)
    monkeypatch.setattr(datasets, "MIRRORS", {NAME: closed, "mnist": closed})


def put(folder, plain=False):
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in (FILES if plain else GZIPPED).items():
        (folder / file).write_bytes(content)
    return folder


def in_cache():
    return sorted(path.name for path in datasets.cache_folder(NAME).iterdir())


def use_mirrors(monkeypatch, server, *behaviours):
    monkeypatch.setitem(datasets.MIRRORS, NAME, tuple(map(server.url, behaviours)))


def start_child(mirror):
    environment = {**os.environ, "GLUON_MGPU_MIRROR": mirror, "PYTHONPATH": str(Path(datasets.__file__).parents[1])}
    command = [sys.executable, "-c", CHILD, NAME, json.dumps(SUMS)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_tiny(data):
    for part in range(1, 5):
        assert data[part].dtype == np.uint8
        np.testing.assert_array_equal(data[part], TINY[part])


# Where data is looked for


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("inside", [NAME, "."])
def test_a_given_folder_holds_the_named_folder_or_the_files_gzip_or_plain(tmp_path, inside, plain):
    folder = put(tmp_path / "given" / inside, plain)
    data = datasets.load(NAME, data_dir=str(tmp_path / "given"))
    assert_tiny(data)
    assert data.name == NAME and data.source == str(folder)


def test_each_place_is_searched_in_its_turn(tmp_path, monkeypatch):
    def expect(folder, **options):
        assert datasets.load(NAME, **options).source == str(folder)

    for folder in (tmp_path / "system" / NAME, tmp_path / "home/.mxnet/datasets" / NAME):
        put(folder)
        expect(folder)
    monkeypatch.setenv("MXNET_HOME", str(tmp_path / "mxnet"))
    expect(tmp_path / "system" / NAME)
    for folder in (tmp_path / "mxnet/datasets" / NAME, datasets.cache_folder(NAME)):
        put(folder)
        expect(folder)
    monkeypatch.setenv("GLUON_MGPU_DATA", str(put(tmp_path / "environment")))
    expect(tmp_path / "environment")
    expect(tmp_path / "argument", data_dir=put(tmp_path / "argument"))


def test_a_folder_that_lacks_a_file_is_passed_over(tmp_path):
    (put(datasets.cache_folder(NAME)) / "t10k-labels-idx1-ubyte.gz").unlink()
    system = put(tmp_path / "system" / NAME)
    assert datasets.load(NAME).source == str(system)


def test_reading_a_folder_that_lacks_a_file_names_the_file(tmp_path):
    put(tmp_path)
    missing = tmp_path / "t10k-labels-idx1-ubyte"
    (tmp_path / f"{missing.name}.gz").unlink()
    with pytest.raises(Error, match=re.escape(f"cannot read {missing} (No such file or directory)")):
        datasets.read(tmp_path, NAME)


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_given_folder_without_the_data_is_an_error_even_if_the_data_is_elsewhere(tmp_path, monkeypatch, how):
    put(tmp_path / "system" / NAME)
    nowhere = str(tmp_path / "nowhere")
    if how == "environment":
        monkeypatch.setenv("GLUON_MGPU_DATA", nowhere)
    with pytest.raises(Error, match=f"{re.escape(nowhere)}.*t10k-labels-idx1-ubyte"):
        datasets.load(NAME, data_dir=nowhere if how == "argument" else None)


def test_an_empty_environment_variable_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("GLUON_MGPU_DATA", "")
    put(tmp_path / "system" / NAME)
    assert_tiny(datasets.load(NAME))


# What is refused


@pytest.mark.parametrize("place", ["system", "cache/gluon_mgpu", "given"])
def test_one_altered_byte_is_refused_with_both_sums_wherever_it_is(tmp_path, place):
    path = put(tmp_path / place / NAME) / "train-images-idx3-ubyte.gz"
    raw = bytearray(FILES["train-images-idx3-ubyte"])
    raw[5000] ^= 1
    path.write_bytes(gzip.compress(bytes(raw)))
    with pytest.raises(Error) as caught:
        datasets.load(NAME, data_dir=tmp_path / "given" if place == "given" else None)
    for part in (str(path), SUMS["train-images-idx3-ubyte"], hashlib.sha256(raw).hexdigest()):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_are_checked_again_at_every_load(tmp_path):
    folder = put(tmp_path / "given", plain=True)
    datasets.load(NAME, data_dir=folder)
    (folder / "train-labels-idx1-ubyte").write_bytes(FILES["t10k-labels-idx1-ubyte"])
    with pytest.raises(Error, match="train-labels-idx1-ubyte is not fashion-mnist's"):
        datasets.load(NAME, data_dir=folder)


@pytest.mark.parametrize("damage", [lambda b: b[:-20], lambda b: b[:30] + b"\xff" * 30 + b[60:], lambda b: b + b"more"])
def test_a_truncated_or_corrupt_gzip_file_is_named(tmp_path, damage):
    path = put(tmp_path / "given") / "train-labels-idx1-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Error, match=f"{re.escape(str(path))} is damaged"):
        datasets.load(NAME, data_dir=tmp_path / "given")


def test_an_unknown_name_is_a_usage_error_that_lists_the_names():
    with pytest.raises(UsageError, match="'cifar'.*fashion-mnist, mnist, synthetic"):
        datasets.load("cifar")


# Limit


@pytest.mark.parametrize("limit, tests", [(1, 100), (12, 100), (660, 110), (700, 116)])
def test_limit_keeps_the_first_examples_and_a_sixth_but_at_least_100_tests(tmp_path, limit, tests):
    data = datasets.load(NAME, data_dir=put(tmp_path / "given"), limit=limit)
    np.testing.assert_array_equal(data.train_images, TINY.train_images[:limit])
    np.testing.assert_array_equal(data.train_labels, TINY.train_labels[:limit])
    np.testing.assert_array_equal(data.test_images, TINY.test_images[:tests])
    np.testing.assert_array_equal(data.test_labels, TINY.test_labels[:tests])


def test_a_limit_beyond_the_data_names_the_size(tmp_path):
    with pytest.raises(UsageError, match="701.*700"):
        datasets.load(NAME, data_dir=put(tmp_path / "given"), limit=701)


@pytest.mark.parametrize("name", [NAME, "synthetic"])
@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_a_usage_error(name, limit):
    with pytest.raises(UsageError, match=str(limit)):
        datasets.load(name, limit=limit)


# Fetching


@pytest.mark.parametrize("behaviour", ["whole", "slow"])
def test_a_download_fills_the_cache_with_four_files_and_is_said_once(server, monkeypatch, capsys, behaviour):
    use_mirrors(monkeypatch, server, behaviour)
    monkeypatch.setattr(datasets, "TIMEOUT", (5, 0.5))  # slow takes 0.8 s, but never stands still
    data = datasets.load(NAME)
    assert_tiny(data)
    assert data.source == str(datasets.cache_folder(NAME))
    assert in_cache() == sorted(GZIPPED)
    assert capsys.readouterr().err == f"downloading {NAME} into {data.source}\n"
    assert_tiny(datasets.load(NAME))
    assert len(server.requests) == 4
    assert capsys.readouterr().err == ""


FAULTS = {
    "cut": "cut off",
    "stalled": "timed out",
    "corrupt": "wrong content",
    "absent": "HTTP 404",
    "html": "wrong content",
}


@pytest.mark.parametrize("behaviour", FAULTS)
def test_a_transfer_that_fails_leaves_no_file_and_its_reason_is_given(server, monkeypatch, behaviour):
    use_mirrors(monkeypatch, server, behaviour)
    monkeypatch.setattr(datasets, "TIMEOUT", (5, 0.5))
    with pytest.raises(Error, match=rf"127.0.0.1:\d+: {FAULTS[behaviour]}"):
        datasets.load(NAME)
    assert in_cache() == []


@pytest.mark.parametrize("behaviour", FAULTS)
def test_after_a_transfer_that_fails_the_next_mirror_is_used_and_then_kept(server, monkeypatch, behaviour):
    use_mirrors(monkeypatch, server, behaviour, "whole")
    monkeypatch.setattr(datasets, "TIMEOUT", (5, 0.5))
    assert_tiny(datasets.load(NAME))
    assert in_cache() == sorted(GZIPPED)
    assert [path.split("/")[1] for path in server.requests] == [behaviour] + ["whole"] * 4


def test_the_files_of_an_unfinished_fetch_are_kept_and_only_the_others_fetched(server, monkeypatch):
    use_mirrors(monkeypatch, server, "first-only")
    with pytest.raises(Error, match="HTTP 404"):
        datasets.load(NAME)
    assert in_cache() == ["train-images-idx3-ubyte.gz"]
    use_mirrors(monkeypatch, server, "whole")
    assert_tiny(datasets.load(NAME))
    assert "/whole/train-images-idx3-ubyte.gz" not in server.requests


def test_a_mirror_of_ones_own_takes_the_place_of_the_known_ones(server, monkeypatch):
    use_mirrors(monkeypatch, server, "html")
    monkeypatch.setenv("GLUON_MGPU_MIRROR", server.url("whole").rstrip("/"))
    assert_tiny(datasets.load(NAME))
    assert not any(path.startswith("/html/") for path in server.requests)


@pytest.mark.parametrize("mirror", ["school", "ftp://school/data", "http://["])
def test_a_mirror_that_is_no_http_address_is_one_line(monkeypatch, mirror):
    monkeypatch.setenv("GLUON_MGPU_MIRROR", mirror)
    with pytest.raises(Error, match="cannot fetch fashion-mnist"):
        datasets.load(NAME)


def test_two_processes_that_fetch_at_once_both_succeed(server):
    children = [start_child(server.url("both")) for _ in range(2)]
    for child in children:
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        assert int(out) == TINY.train_labels.sum()
    assert server.requests.count("/both/train-images-idx3-ubyte.gz") == 2
    assert in_cache() == sorted(GZIPPED)


def test_ctrl_c_in_the_middle_of_a_transfer_leaves_nothing(server):
    child = start_child(server.url("stalled"))
    folder = datasets.cache_folder(NAME)
    deadline = time.monotonic() + 30
    while not any(part.stat().st_size for part in folder.glob(".fetch-*/*.gz")):
        assert child.poll() is None and time.monotonic() < deadline, child.communicate()
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=10)
    assert child.returncode == -signal.SIGINT and "KeyboardInterrupt" in err
    assert in_cache() == []


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(Error, match="cannot write to .*Not a directory.*XDG_CACHE_HOME"):
        datasets.load(NAME)


# The distribution's package


def stub_apt(tmp_path, monkeypatch, download="touch stub.deb", unpacked=GZIPPED):
    content = tmp_path / "package" / "usr/share/datasets" / NAME
    content.mkdir(parents=True)
    for file, raw in unpacked.items():
        (content / file).write_bytes(raw)
    log = tmp_path / "apt.log"
    scripts = {
        "apt-get": f'echo "$@" >> {log}\ncase "$*" in *update) exit 100;; *) {download};; esac\n',
        "dpkg-deb": f'test -f "$2" && cp -r {tmp_path}/package/. "$3"\n',
    }
    for program, script in scripts.items():
        (tmp_path / "bin" / program).write_text(f"#!/bin/sh\n{script}")
        (tmp_path / "bin" / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return log


def test_where_no_mirror_answers_the_package_is_taken_without_root(tmp_path, monkeypatch, capsys):
    log = stub_apt(tmp_path, monkeypatch)  # whose update fails, as with one bad source of many
    assert_tiny(datasets.load(NAME))
    assert in_cache() == sorted(GZIPPED)
    update, download = log.read_text().splitlines()
    assert download.endswith(" download dataset-fashion-mnist")
    for command in (update, download):
        assert f"Dir::State::Lists={datasets.cache_folder(NAME)}" in command
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(
    "fault, reason",
    [
        ({"download": "exit 100"}, "apt-get: exit status 100"),
        ({"unpacked": {}}, "dataset-fashion-mnist: has no train-images"),
        ({"unpacked": dict.fromkeys(GZIPPED, HTML)}, "dataset-fashion-mnist: wrong content"),
        ({"download": "sleep 5"}, "apt-get: not done after 0.2 s"),
    ],
)
def test_a_package_that_cannot_be_had_or_is_wrong_is_said_with_the_other_ways(tmp_path, monkeypatch, fault, reason):
    stub_apt(tmp_path, monkeypatch, **fault)
    monkeypatch.setattr(datasets, "APT_SECONDS", 0.2)
    with pytest.raises(Error, match=f"no connection; {reason}"):
        datasets.load(NAME)
    assert in_cache() == []


def test_where_no_way_is_left_one_line_names_them_all():
    with pytest.raises(Error) as caught:
        datasets.load(NAME)
    message = str(caught.value)
    assert "\n" not in message
    ways = "127.0.0.1:1: no connection", "--data-dir", "GLUON_MGPU_DATA", "apt install dataset-fashion-mnist", "apt-get"
    for way in ways:
        assert way in message
    assert not isinstance(caught.value, UsageError)


def test_mnist_is_not_looked_for_in_a_package_it_is_not_in(tmp_path, monkeypatch):
    log = stub_apt(tmp_path, monkeypatch)
    with pytest.raises(Error) as caught:
        datasets.load("mnist")
    assert "apt" not in str(caught.value) and not log.exists()


# Synthetic


def test_synthetic_is_the_same_for_the_same_seed_only():
    first, again, other = (datasets.load("synthetic", limit=300, seed=seed) for seed in (3, 3, 4))
    for part in range(1, 5):
        np.testing.assert_array_equal(first[part], again[part])
    assert first.source == "synthetic, seed 3"
    assert datasets.load("synthetic", limit=1, seed=None).source == "synthetic, seed 0"
    assert (first.train_images != other.train_images).mean() > 0.5


@pytest.mark.parametrize("limit, tests", [(1, 100), (7, 100), (4097, 682), (60001, 10000), (None, 10000)])
def test_synthetic_has_any_size_and_balanced_classes(limit, tests):
    data = datasets.load("synthetic", limit=limit)
    size = limit or 60000
    assert data.train_images.shape == (size, 1, 28, 28) and data.train_images.dtype == np.uint8
    assert data.test_images.shape == (tests, 1, 28, 28)
    for labels, count in ((data.train_labels, size), (data.test_labels, tests)):
        assert labels.shape == (count,) and labels.dtype == np.uint8
        assert np.ptp(np.bincount(labels, minlength=10)) <= 1


@pytest.mark.parametrize("seed", [0, 1, 172])
def test_synthetic_classes_can_be_told_apart_though_their_images_differ(seed):
    data = datasets.synthetic(2000, 1000, seed)
    train, test = (images.reshape(len(images), -1) / 255 for images in (data.train_images, data.test_images))
    means = np.stack([train[data.train_labels == label].mean(0) for label in range(10)])
    guesses = ((means**2).sum(1) - 2 * test @ means.T).argmin(1)
    assert (guesses == data.test_labels).mean() > 0.9
    for label in range(10):
        assert train[data.train_labels == label].std(0).mean() > 0.05
    assert abs(train.mean() - 0.29) < 0.05 and abs(train.std() - 0.35) < 0.05
