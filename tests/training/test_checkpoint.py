"""Checkpoints: what is saved is loaded, and a file that is damaged or only partly written is never used."""

import errno
import hashlib
import io
import os
import zipfile

import numpy as np
import pytest

from gluon_mgpu.support import files
from gluon_mgpu.support.errors import Error
from gluon_mgpu.training import checkpoint

ARRAYS = {"W": np.arange(60, dtype=np.float32).reshape(3, 20), "b": np.ones(3, np.float32)}
FACTS = {"seed": 3, "epochs": 2}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "c.npz").write_bytes(checkpoint.packed(ARRAYS, FACTS))
    return tmp_path / "c.npz"


def refused(path):
    with pytest.raises(Error) as caught:
        checkpoint.load(path)
    return str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_load_returns_what_was_saved_and_numpy_reads_it_too(path):
    arrays, facts = checkpoint.load(path)
    assert facts == FACTS and arrays.keys() == ARRAYS.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, ARRAYS[name])
        np.testing.assert_array_equal(array, np.load(path, allow_pickle=False)[name])


def test_names_that_end_like_those_of_files_are_kept_apart(path):
    arrays = {name: np.full(2, i) for i, name in enumerate(("a.npy", "a", "a.npy.npy"))}
    path.write_bytes(checkpoint.packed(arrays, FACTS))
    np.testing.assert_equal(checkpoint.load(path)[0], arrays)


@pytest.mark.parametrize("name", ["file", checkpoint.METADATA])
def test_names_that_a_checkpoint_needs_for_itself_are_refused(name):
    with pytest.raises(Error):
        checkpoint.packed({name: np.ones(2)}, FACTS)


def test_a_missing_truncated_or_altered_file_and_a_pipe_are_errors_in_one_line_with_their_path(path):
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        assert refused(path)
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        assert refused(path)
    path.unlink()
    assert refused(path)
    os.mkfifo(path)  # reading it would wait for a writer
    assert refused(path)


def test_nothing_is_unpickled(path):
    path.write_bytes(checkpoint.packed({"W": np.array([print], dtype=object)}, FACTS))
    assert refused(path)


HEADER = "{{'descr': '{}', 'fortran_order': False, 'shape': {}}}"
HEADERS = [HEADER.format("<f4", "(4294967296,)"), HEADER.format("<f4", f"(1{'0' * 30},)"), "-" * 9000 + "1"]
HEADERS += [HEADER.format("<U1000000000", "(4, 4)")]


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header[:60])
def test_a_small_file_that_claims_any_size_is_refused(header, compression, path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", compression) as archive:
        length = len(header).to_bytes(2, "little")
        archive.writestr("W.npy", b"\x93NUMPY\x01\x00" + length + header.encode() + bytes(64))
    path.write_bytes(packed.getvalue() + hashlib.sha256(packed.getvalue()).hexdigest().encode())
    assert refused(path)


@pytest.mark.parametrize(
    "happens, raised", [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(errno.ENOSPC, "disk full"), Error)], ids=repr
)
def test_a_write_that_fails_halfway_leaves_the_old_file_and_nothing_else(happens, raised, path):
    before = path.read_bytes()

    def half(file):
        file.write(before[:100])
        raise happens

    with pytest.raises(raised):
        files.write_whole(path, half)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_file_does_not_replace_a_folder_or_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder"):
        before = path.stat()
        with pytest.raises(Error):
            files.write_whole(path, lambda file: file.write(b"new"))
        assert path.stat() == before


def test_a_link_keeps_leading_to_the_file_which_keeps_its_permissions(tmp_path):
    (tmp_path / "far").mkdir()
    path, link = tmp_path / "far/notebook.ipynb", tmp_path / "link.ipynb"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to("far/notebook.ipynb")
    files.write_whole(link, lambda file: file.write(b"new"))
    assert link.is_symlink() and path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o640
    files.write_whole(tmp_path / "new", lambda file: file.write(b"new"))
    (tmp_path / "usual").touch()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert len([*tmp_path.rglob("*")]) == 5


def test_a_file_may_have_the_longest_name(tmp_path):
    files.write_whole(tmp_path / ("x" * 255), lambda file: file.write(b"new"))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user that is not root")
def test_a_read_only_file_is_not_replaced(tmp_path):
    (tmp_path / "file").touch(0o444)
    with pytest.raises(Error):
        files.write_whole(tmp_path / "file", lambda file: file.write(b"new"))
