"""Where data comes from, what is refused, and what a download leaves behind, with tiny files and a local server."""

import gzip
import http.server
import re
import threading
import tracemalloc

import numpy as np
import pytest
import tiny
from runs import python, refuses, write_program

from gluon_mgpu.data import datasets
from gluon_mgpu.support.errors import Error, UsageError

NAME = "fashion-mnist"
TINY = datasets.synthetic(700, 120, seed=5)
FILES, SUMS = tiny.files(TINY)
GZIPPED = {f"{file}.gz": gzip.compress(raw) for file, raw in FILES.items()}
IMAGES = "train-images-idx3-ubyte"


def test_data_sets_need_neither_mxnet_nor_modules_of_unix():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['mxnet', 'fcntl', 'pwd', 'grp', 'resource']))\n"
    code = "from gluon_mgpu.data import datasets, splitting; print(datasets.synthetic(6, 6).train_images.shape)"
    assert python(blocked + code).stdout == "(6, 1, 28, 28)\n"


class Handler(http.server.BaseHTTPRequestHandler):
    """GET /BEHAVIOUR/FILE.gz: the first file is always sent whole."""

    def do_GET(self):
        _, behaviour, file = self.path.split("/")
        self.server.requests.append(self.path)
        body = GZIPPED[file]
        if file == f"{IMAGES}.gz":
            behaviour = "whole"
        if behaviour == "absent":
            return self.send_error(404)
        if behaviour == "corrupt":
            body = body[:-20] + bytes([body[-20] ^ 255]) + body[-19:]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        if behaviour == "stalled":
            self.server.released.wait(300)
        elif behaviour != "cut":
            self.wfile.write(body[len(body) // 2 :])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.requests, running.released = [], threading.Event()
        running.url = lambda behaviour: f"http://127.0.0.1:{running.server_port}/{behaviour}/"
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield running
        running.released.set()
        running.shutdown()


@pytest.fixture(autouse=True)
def no_data_anywhere(tmp_path, monkeypatch):
    """A home, a system and a network without data, and a PATH without apt-get."""
    tiny.hide_data_sets(monkeypatch, tmp_path, SUMS)
    for variable in ("GLUON_MGPU_MIRROR", "MXNET_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(datasets, "MIRRORS", dict.fromkeys((NAME, "mnist"), ("http://127.0.0.1:1/",)))


def put(folder, files=GZIPPED):
    return tiny.put(folder, files)


def in_cache():
    return sorted(path.name for path in datasets.cache_folder(NAME).iterdir())


def use_mirrors(monkeypatch, server, *behaviours):
    monkeypatch.setitem(datasets.MIRRORS, NAME, tuple(map(server.url, behaviours)))


def assert_tiny(data):
    for part in range(1, 5):
        assert data[part].dtype == np.uint8
        np.testing.assert_array_equal(data[part], TINY[part])


def test_each_place_is_searched_in_its_turn(tmp_path, monkeypatch):
    def check(folder, **options):
        assert datasets.load(NAME, **options).source == str(folder)

    monkeypatch.setenv("GLUON_MGPU_DATA", "")
    for folder in (tmp_path / "system" / NAME, tmp_path / "home/.mxnet/datasets" / NAME):
        check(put(folder))
    monkeypatch.setenv("MXNET_HOME", str(tmp_path / "mxnet"))
    check(tmp_path / "system" / NAME)
    for folder in (tmp_path / "mxnet/datasets" / NAME, datasets.cache_folder(NAME)):
        check(put(folder))
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()  # an incomplete folder is skipped
    check(tmp_path / "mxnet/datasets" / NAME)
    monkeypatch.setenv("GLUON_MGPU_DATA", str(put(tmp_path / "environment")))
    check(tmp_path / "environment")
    check(tmp_path / "argument", data_dir=put(tmp_path / "argument"))


@pytest.mark.parametrize("given", ["nowhere", ".", "x" * 300])
def test_a_given_folder_without_the_data_is_a_usage_error_even_if_the_data_is_elsewhere(tmp_path, monkeypatch, given):
    put(tmp_path / "system" / NAME)
    with pytest.raises(UsageError, match="data_dir=.*" + re.escape(str(tmp_path / given))):
        datasets.load(NAME, data_dir=tmp_path / given)
    monkeypatch.setenv("GLUON_MGPU_DATA", str(tmp_path / given))
    with pytest.raises(UsageError, match="GLUON_MGPU_DATA=.*" + re.escape(str(tmp_path / given))):
        datasets.load(NAME)


def test_a_small_gzip_file_that_decompresses_to_a_large_one_is_refused_without_decompressing_all_of_it(tmp_path):
    content = gzip.compress(bytes(1 << 20)) * 256
    folder = put(tmp_path / NAME, {**GZIPPED, f"{IMAGES}.gz": content})
    tracemalloc.start()
    with pytest.raises(Error):
        datasets.read(folder, NAME)
    assert tracemalloc.get_traced_memory()[1] < 3 * datasets.MOST
    tracemalloc.stop()


@pytest.mark.parametrize("place", ["system", "cache/gluon_mgpu", "given"])
def test_a_truncated_corrupt_or_altered_file_is_refused_by_name_wherever_it_is(tmp_path, place):
    path, whole = put(tmp_path / place / NAME) / f"{IMAGES}.gz", GZIPPED[f"{IMAGES}.gz"]
    altered = bytearray(FILES[IMAGES])
    altered[5000] ^= 1
    damaged = (whole[:-20], whole[:30] + b"\xff" * 30 + whole[60:], whole + b"more", gzip.compress(altered))
    path.unlink()
    for file, content in ((path.with_suffix(""), altered), *((path, content) for content in damaged)):
        file.write_bytes(content)
        with pytest.raises(Error, match=str(file)) as caught:
            datasets.load(NAME, data_dir=tmp_path / "given" if place == "given" else None)
        assert caught.type is Error and "\n" not in str(caught.value)


@pytest.mark.parametrize("limit, tests", [(1, 100), (660, 110), (700, 116)])
def test_limit_keeps_the_first_examples_and_a_sixth_but_at_least_100_tests(tmp_path, limit, tests):
    data = datasets.load(NAME, data_dir=put(tmp_path / "given"), limit=limit)
    for part, size in zip(range(1, 5), (limit, limit, tests, tests)):
        np.testing.assert_array_equal(data[part], TINY[part][:size])


REFUSED = {  # {(name, limit, data_dir): the setting that the error names}
    ("cifar", None, "given"): "dataset",
    (NAME, 0, "given"): "limit",
    (NAME, 701, "given"): "limit",
    ("synthetic", 0, None): "limit",
    ("synthetic", datasets.LARGEST + 1, None): "limit",
    ("synthetic", 60, "given"): "data_dir",
}


@pytest.mark.parametrize("name, limit, folder", REFUSED)
def test_an_unknown_name_a_wrong_limit_and_a_folder_that_is_not_needed_are_refused(name, limit, folder, tmp_path):
    put(tmp_path / "given")
    refuses(REFUSED[name, limit, folder], datasets.load, name, tmp_path / folder if folder else None, limit)


def test_a_download_fills_the_cache_once_from_the_users_own_mirror_if_there_is_one(server, monkeypatch, capsys):
    use_mirrors(monkeypatch, server, "absent")
    monkeypatch.setenv("GLUON_MGPU_MIRROR", server.url("whole").rstrip("/"))
    for _ in range(2):
        data = datasets.load(NAME)
        assert_tiny(data)
        assert data.source == str(datasets.cache_folder(NAME))
    assert in_cache() == sorted(GZIPPED)
    assert sorted(server.requests) == [f"/whole/{file}" for file in sorted(GZIPPED)]
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("behaviour", ["cut", pytest.param("stalled", marks=pytest.mark.slow), "corrupt", "absent"])
def test_a_failed_transfer_leaves_only_whole_files_and_the_next_mirror_sends_the_rest(server, monkeypatch, behaviour):
    monkeypatch.setattr(datasets, "TIMEOUT", (60, 5 if behaviour == "stalled" else 60))
    use_mirrors(monkeypatch, server, behaviour)
    with pytest.raises(Error, match=r"127.0.0.1:\d+: ") as caught:
        datasets.load(NAME)
    assert in_cache() == [f"{IMAGES}.gz"] and "\n" not in str(caught.value)
    use_mirrors(monkeypatch, server, behaviour, "whole")
    assert_tiny(datasets.load(NAME))
    assert in_cache() == sorted(GZIPPED)
    assert [path.split("/")[1] for path in server.requests] == [behaviour] * 3 + ["whole"] * 3


@pytest.mark.parametrize(
    "name, value, named",
    [("GLUON_MGPU_MIRROR", "ftp://school/data", "school"), ("XDG_CACHE_HOME", "/dev/null", "XDG_CACHE_HOME")],
)
def test_a_mirror_without_a_web_address_and_a_cache_that_cannot_be_written_are_errors(monkeypatch, name, value, named):
    monkeypatch.setenv(name, value)
    with pytest.raises(Error, match=named):
        datasets.load(NAME)


def stub_apt(tmp_path, monkeypatch, download="touch stub.deb", unpacked=GZIPPED):
    """Programs named apt-get and dpkg-deb; returns the file in which apt-get records its arguments."""
    put(tmp_path / "package/usr/share/datasets" / NAME, unpacked)
    log = tmp_path / "apt.log"
    scripts = {
        "apt-get": f'echo "$@" >> {log}\ncase "$*" in *update) exit 100;; *) {download};; esac\n',
        "dpkg-deb": f'test -f "$2" && cp -r {tmp_path}/package/. "$3"\n',
    }
    for program, script in scripts.items():
        write_program(tmp_path / "bin" / program, script)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return log


def test_if_no_mirror_answers_the_package_is_used_without_root(tmp_path, monkeypatch):
    log = stub_apt(tmp_path, monkeypatch)  # its `update` fails, as if one of many sources were bad
    assert_tiny(datasets.load(NAME))
    assert in_cache() == sorted(GZIPPED)
    update, download = log.read_text().splitlines()
    assert download.endswith(" download dataset-fashion-mnist")
    for command in (update, download):
        assert f"Dir::State::Lists={datasets.cache_folder(NAME)}" in command


WRONG_PACKAGES = [{"unpacked": {}}, {"unpacked": dict.fromkeys(GZIPPED, b"?")}]


@pytest.mark.parametrize("fault", [*WRONG_PACKAGES, {"download": "sleep 600"}, {"download": "exit 100"}], ids=str)
def test_a_package_that_is_missing_or_wrong_is_an_error_that_leaves_no_file(tmp_path, monkeypatch, fault):
    stub_apt(tmp_path, monkeypatch, **fault)
    monkeypatch.setattr(datasets, "APT_SECONDS", 0.5 if "sleep" in str(fault) else 300)
    with pytest.raises(Error, match="apt-get|train-images"):
        datasets.load(NAME)
    assert in_cache() == []


def test_synthetic_is_the_same_for_the_same_seed_only():
    first, again, other = (datasets.load("synthetic", limit=300, seed=seed) for seed in (3, 3, 4))
    assert first.checksum() == again.checksum() != other.checksum()
    assert datasets.load("synthetic", limit=1, seed=None).source == "synthetic, seed 0"
    assert (first.train_images != other.train_images).mean() > 0.5


def test_synthetic_classes_can_be_told_apart_though_their_images_differ():
    data = datasets.synthetic(2000, 1000, 172)
    train, test = (images.reshape(len(images), -1) / 255 for images in (data.train_images, data.test_images))
    means = np.stack([train[data.train_labels == label].mean(0) for label in range(10)])
    guesses = ((means**2).sum(1) - 2 * test @ means.T).argmin(1)
    assert (guesses == data.test_labels).mean() > 0.9
    for label in range(10):
        assert train[data.train_labels == label].std(0).mean() > 0.05
    assert abs(train.mean() - 0.29) < 0.05 and abs(train.std() - 0.35) < 0.05  # like Fashion-MNIST
