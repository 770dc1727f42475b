import errno
import os

import numpy as np
import pytest

from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training import checkpoint

ARRAYS = {"W": np.arange(60, dtype=np.float32).reshape(3, 20), "b": np.ones(3, np.float32)}
FACTS = {"seed": 3, "epochs": 2}


@pytest.fixture
def path(tmp_path):
    checkpoint.save(tmp_path / "c.npz", ARRAYS, FACTS)
    return tmp_path / "c.npz"


def test_a_checkpoint_gives_back_what_it_was_given(path):
    arrays, facts = checkpoint.load(path)
    assert facts == FACTS and arrays.keys() == ARRAYS.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, ARRAYS[name])


def test_a_checkpoint_cut_off_anywhere_is_refused_in_one_line(path):
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        with pytest.raises(Error, match="is no whole checkpoint") as caught:
            checkpoint.load(path)
        assert "\n" not in str(caught.value)


def test_a_checkpoint_with_any_of_its_bytes_altered_is_refused(path):
    whole = path.read_bytes()
    for offset in range(len(whole)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        with pytest.raises(Error, match="is no whole checkpoint"):
            checkpoint.load(path)


def test_a_checkpoint_is_an_archive_that_numpy_reads(path):
    with np.load(path, allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["W"], ARRAYS["W"])


def test_nothing_is_unpickled(path):
    checkpoint.save(path, {"W": np.array([print], dtype=object)}, FACTS)
    with pytest.raises(Error, match="allow_pickle=False"):
        checkpoint.load(path)


def test_a_missing_checkpoint_is_said_to_be_missing(tmp_path):
    with pytest.raises(Error, match="there is no such checkpoint"):
        checkpoint.load(tmp_path / "none.npz")


def test_a_write_that_fails_halfway_leaves_the_file_before_and_nothing_else(path):
    before = path.read_bytes()

    def half(file):
        file.write(before[:100])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_whole(path, half)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_full_disk_is_said_in_one_line_and_the_file_before_stays(path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Error, match=r"c\.npz cannot be written \(No space left on device\)"):
        checkpoint.save(path, ARRAYS, FACTS)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        before = (tmp_path / name).stat()
        with pytest.raises(Error, match=f"{name} is no file: give the name of one"):
            checkpoint.write_whole(tmp_path / name, lambda file: file.write(b"new"))
        assert (tmp_path / name).stat() == before
