"""`evaluate`: NumPy computes its numbers again."""

import re

import numpy as np
import pytest
import reference
from PIL import Image
from runs import call

from gluon_mgpu import evaluate, train
from gluon_mgpu.commands.evaluate import evaluate as command
from gluon_mgpu.data import datasets
from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.training import checkpoint
from gluon_mgpu.training.models import LENET_NAMES, read_arrays

DATA = datasets.synthetic(600, 100, seed=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a half-trained run."""
    folder, options = tmp_path_factory.mktemp("run"), {"device": "cpu", "seed": 0, "momentum": 0.5}
    train("highlevel", 1, 16, 0.1, dataset="synthetic", limit=600, epochs=7, out=folder, **options)
    return folder


def test_it_prints_the_accuracy_that_the_run_recorded_and_the_counts_behind_it(run, capfd):
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()}
    status, text, err = call(capfd, command, run, "--gpus", 3, "--device", "cpu")
    assert (status, err) == (0, "")
    accuracy, right, total = re.search(r"^test accuracy: (\S+) \((\d+)/(\d+)\)$", text, re.M).groups()
    arrays, facts = checkpoint.load(run / "checkpoint.npz")
    expected = facts["history"][-1]["test_accuracy"]
    assert 0.2 < expected < 1, f"{expected}: a network that knows nothing or everything tests little"
    assert int(right) / int(total) == expected and accuracy == f"{expected:.4f}"
    rows = [line.split() for line in text.splitlines() if re.match(r"\d ", line)]
    params = [arrays[name].astype(np.float64) for name in LENET_NAMES]
    predicted = reference.scores(params, DATA.test_images / 255).argmax(1)
    for i, (name, *counts, recall) in enumerate(rows):
        found = predicted[DATA.test_labels == i]
        assert [int(cell.replace(".", "0")) for cell in counts] == np.bincount(found, minlength=10).tolist()
        assert (name, float(recall)) == (str(i), round(np.mean(found == i), 3))
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()} == before


def test_another_lesson_loads_a_run_whatever_only_training_or_the_first_one_uses(tmp_path):
    options = {"shares": (3, 1), "momentum": 0.9, "hybridize": False, "dataset": "synthetic", "limit": 100}
    train("highlevel", 2, 50, 0.1, epochs=1, seed=1, device="cpu", out=tmp_path / "run", **options)
    one, other = (evaluate.load(tmp_path / "run", impl, device="cpu").model for impl in (None, "scratch"))
    np.testing.assert_equal(read_arrays(other), read_arrays(one))


@pytest.mark.slow
def test_resnet18_learns_and_its_recorded_accuracy_is_found_again(tmp_path):
    options = {"model": "resnet18", "dataset": "synthetic", "limit": 200, "seed": 1, "device": "cpu"}
    first, *_, last = train("highlevel", 2, 20, 0.02, epochs=3, out=tmp_path / "run", **options)
    trained = evaluate.load(tmp_path / "run", gpus=2, device="cpu")
    assert last.train_loss < 0.8 * first.train_loss
    assert f": {last.test_accuracy:.4f} (" in evaluate.report(trained, *evaluate.held_out(trained.run))


def grey(image, tmp_path, **save):
    image.save(tmp_path / "image.png", **save)
    return evaluate.read_image(tmp_path / "image.png")[0]


def test_images_of_every_kind_are_read_as_the_same_grey(tmp_path, capsys):
    pixels = DATA.test_images[0, 0]
    image, black, white = Image.fromarray(pixels), Image.new("L", (28, 28)), Image.new("L", (28, 28), 255)
    for same in (
        image,
        image.convert("RGB"),
        Image.fromarray(pixels.astype(np.uint16) * 257),
        Image.merge("LA", (image, white)),
        Image.merge("RGBA", (white, white, white, image)),  # a white object on a transparent background
    ):
        np.testing.assert_array_equal(grey(same, tmp_path), pixels)
    assert grey(Image.merge("LA", (white, black)), tmp_path).max() == 0
    scaled = np.where(pixels, pixels.astype(np.uint16) * 257, 40000).astype(np.uint16)
    np.testing.assert_array_equal(grey(Image.fromarray(scaled), tmp_path, transparency=40000), pixels)
    turned = Image.Exif()
    turned[0x0112] = 3  # upside down
    np.testing.assert_array_equal(grey(image, tmp_path, exif=turned), pixels[::-1, ::-1])
    assert capsys.readouterr().err == ""
    large = grey(Image.fromarray(pixels.repeat(4, 0).repeat(4, 1)), tmp_path)
    assert large.shape == (28, 28) and np.abs(large.astype(int) - pixels).mean() < 10
    assert "112x112" in capsys.readouterr().err  # a notice that it was resized


def test_other_files_are_refused_by_name_and_nothing_is_executed(tmp_path):
    Image.effect_noise((28, 28), 50).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:300])
    (tmp_path / "text.png").write_text("not an image")
    size = int(Image.MAX_IMAGE_PIXELS**0.5) + 1
    Image.new("1", (size, size)).save(tmp_path / "bomb.png")
    Image.new("L", (28, 28)).save(tmp_path / "program.eps")  # PostScript, which Pillow passes to Ghostscript
    for name in ("cut.png", "text.png", "bomb.png", "program.eps", "missing.png", ""):
        with pytest.raises(Error, match=re.escape(str(tmp_path / name))) as refused:
            evaluate.read_image(tmp_path / name)
        assert "\n" not in str(refused.value)


def test_what_cannot_be_evaluated_is_refused(run, tmp_path):
    arrays, facts = checkpoint.load(run / "checkpoint.npz")
    other = {**facts["config"], "impl": "highlevel", "model": "lenet-max"}  # scratch has no such network
    (tmp_path / "checkpoint.npz").write_bytes(checkpoint.packed(arrays, {**facts, "config": other}))
    for options in ((run / "none",), (run.parent,), (tmp_path, "scratch"), (run, None, 0), (run, None, 1, "gpu")):
        with pytest.raises(UsageError):
            evaluate.load(*options)
    evaluate.load(tmp_path)
