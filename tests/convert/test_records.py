"""`convert FILE.rec --to folder` writes what MXNet's recordio packed, and names damaged records."""

import csv
import io
import struct

import mxnet as mx
import numpy as np
import pytest
from PIL import Image
from runs import gluon_mgpu as command

from gluon_mgpu.convert import records
from gluon_mgpu.support.errors import Error, UsageError


def picture(kind, size):
    content = io.BytesIO()
    Image.new("RGB", (size, size), (size, 0, 0)).save(content, kind)
    return content.getvalue()


IMAGES = [picture("png", 4), picture("jpeg", 5), b"", b"text" + records.MAGIC + b"abc" + records.MAGIC * 2, b"x"]
LABELS = [3.0, [0.5, -1, 2e9], [7, 8], 1.25, float("nan")]
TABLE = [
    ["0000000.png", "10", "3"],
    ["0000001.jpg", "11", "0.5 -1 2000000000"],
    ["", "12", "7 8"],
    ["0000003.bin", "13", "1.25"],
    ["0000004.bin", "14", "nan"],
]


@pytest.fixture
def file(tmp_path):
    """A record file, and the places where its records begin."""
    path, places = tmp_path / "data.rec", []
    writer = mx.recordio.MXIndexedRecordIO(str(tmp_path / "data.idx"), str(path), "w")
    for i, (image, label) in enumerate(zip(IMAGES, LABELS)):
        places.append(writer.tell())
        labels = np.float32(label).tobytes() if isinstance(label, list) else b""  # pack fails for these with NumPy 2.3
        header = mx.recordio.IRHeader(len(labels) // 4, 0 if labels else label, 10 + i, 0)
        writer.write(struct.pack(mx.recordio._IR_FORMAT, *header) + labels + image)
    writer.close()
    (tmp_path / "data.idx").unlink()  # it is not needed
    return path, places


def table(folder):
    header, *rows = csv.reader((folder / "labels.csv").open())
    assert header == ["file", "id", "label"]
    assert {path.name for path in folder.iterdir()} == {"labels.csv", *(name for name, *_ in rows if name)}
    return rows


def test_images_and_labels_are_those_that_mxnet_wrote(file, tmp_path):
    run = command("convert", file[0], "--to", "folder", tmp_path / "out/")
    assert (run.returncode, run.stderr) == (0, "")
    assert table(tmp_path / "out") == TABLE
    contents = [(tmp_path / "out" / name).read_bytes() if name else b"" for name, *_ in TABLE]
    assert contents == IMAGES


def test_a_damaged_record_is_named_and_all_others_are_written(file, tmp_path, capsys):
    path, places = file
    content = path.read_bytes()
    for record, place in enumerate(places):
        for byte in [*range(8), 11]:  # the number that begins a record, its length, the number of labels
            path.write_bytes(
                content[: place + byte] + bytes([content[place + byte] ^ 0x10]) + content[place + byte + 1 :]
            )
            folder = tmp_path / f"{record} {byte}"
            with pytest.raises(Error):
                records.extract(str(path), str(folder))
            text = capsys.readouterr().err
            first = record - 1 if byte < 4 and record else record  # without this number, the previous end is doubtful
            assert f"bytes {places[first]} to" in text, (record, byte, text)
            found = [row[1:] for row in table(folder)]
            assert found == [row[1:] for i, row in enumerate(TABLE) if i not in (first, record)], (record, byte)


def test_of_a_truncated_file_the_complete_records_are_written(file, tmp_path, capsys):
    path, places = file
    content = path.read_bytes()
    for length in range(1, len(content), 3):
        path.write_bytes(content[:length])
        complete = sum(end <= length for end in [*places[1:], len(content)])
        folder = tmp_path / str(length)
        if length in places:
            records.extract(str(path), str(folder))
        else:
            with pytest.raises(Error):
                records.extract(str(path), str(folder))
            assert f"bytes {places[complete]} to {length} are damaged" in capsys.readouterr().err
        assert (
            not complete
            and not folder.exists()
            or [row[1:] for row in table(folder)] == [row[1:] for row in TABLE[:complete]]
        )


@pytest.mark.parametrize("content", [b"", b"x" * 1000])
def test_a_file_without_records_leaves_nothing(tmp_path, content):
    (tmp_path / "data.rec").write_bytes(content)
    with pytest.raises(Error):
        records.extract(str(tmp_path / "data.rec"), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["data.rec"]


def test_an_existing_folder_stays_as_it_is_and_nothing_is_left_if_the_disk_is_full(file, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(UsageError):
        records.extract(str(file[0]), str(tmp_path / "full"))

    def write_bytes(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", write_bytes)
    with pytest.raises(Error):
        records.extract(str(file[0]), str(tmp_path / "out"))
    assert {path.name for path in tmp_path.iterdir()} == {"data.rec", "full"}
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
