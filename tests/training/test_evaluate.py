"""What is said of a run that has been trained: counted again in NumPy, and by a second process with MXNet alone."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gluon_mgpu.commands.common import main as cli
from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import checkpoint, datasets, evaluate

SCRIPTS = Path(__file__).parents[1] / "scripts"
IMPLS = ["scratch", "highlevel"]
LIMIT, SEED = 2000, 0  # 333 test images


def script(name, *options, **environment):
    return subprocess.run(
        [sys.executable, str(SCRIPTS / name), *map(str, options)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs that know some of the ten classes: scratch and highlevel, and one with max pooling and shares."""
    folder = tmp_path_factory.mktemp("runs")
    common = ("--dataset", "synthetic", "--device", "cpu", "--seed", SEED)
    for impl in IMPLS:
        options = ("--limit", LIMIT, "--batch-size", 16, "--lr", 0.15, "--momentum", 0.5, "--epochs", 2)
        done = script("train.py", *common, *options, "--impl", impl, "--out", folder / impl)
        assert done.returncode == 0, done.stderr
    options = ("--limit", 600, "--batch-size", 40, "--momentum", 0.9, "--lr", 0.05, "--epochs", 3, "--gpus", 2)
    options += ("--impl", "highlevel", "--model", "lenet-max", "--shares", "80,20", "--out", folder / "max")
    done = script("train.py", *common, *options)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def data():
    return datasets.synthetic(LIMIT, LIMIT // 6, SEED)


def scores(run, images):
    """LeNet's scores in float64 NumPy, from the arrays of the checkpoint alone."""
    W1, b1, W2, b2, W3, b3, W4, b4 = (checkpoint.load(run / "checkpoint.npz")[0][name] for name in checkpoint.LENET)

    def convolved(X, W, b):
        windows = np.lib.stride_tricks.sliding_window_view(X, W.shape[2:], (2, 3))
        return np.einsum("nihwyx,oiyx->nohw", windows, W, optimize=True) + b[:, None, None]

    def pooled(X):
        n, c, h, w = X.shape
        return X[:, :, : h // 2 * 2, : w // 2 * 2].reshape(n, c, h // 2, 2, w // 2, 2).mean((3, 5))

    hidden = pooled(np.maximum(convolved(images / 255, W1, b1), 0))
    hidden = pooled(np.maximum(convolved(hidden, W2, b2), 0)).reshape(len(images), -1)
    return np.maximum(hidden @ W3.T + b3, 0) @ W4.T + b4


def last_accuracy(run):
    """What the run wrote after its last epoch."""
    accuracy = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["test_accuracy"]
    assert 0.2 < accuracy < 0.95, f"{accuracy}: a net that knows nothing, or all, tests little; change LIMIT or lr"
    return accuracy


def printed_counts(text):
    """The confusion table of a printed report, as counts and recalls."""
    rows = [line.split() for line in text.splitlines() if re.match(r"\d ", line)]
    counts = np.array([[0 if cell == "." else int(cell) for cell in row[1:11]] for row in rows])
    return counts, [float(row[11]) for row in rows]


@pytest.mark.parametrize("impl, gpus", [(impl, gpus) for impl in IMPLS for gpus in (1, 3)])
def test_it_prints_the_accuracy_that_the_run_wrote_and_the_counts_behind_it(impl, gpus, runs, data):
    done = script("evaluate.py", runs / impl, "--gpus", gpus, "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    wrote = last_accuracy(runs / impl)
    accuracy, right, total = re.search(r"^test accuracy: (\S+) \((\d+)/(\d+)\)$", done.stdout, re.M).groups()
    assert int(right) / int(total) == wrote and accuracy == f"{wrote:.4f}"
    counts, recalls = printed_counts(done.stdout)
    predicted = scores(runs / impl, data.test_images).argmax(1)
    for i, j in np.ndindex(10, 10):
        assert counts[i, j] == np.sum((data.test_labels == i) & (predicted == j))
    assert recalls == [round(np.mean(predicted[data.test_labels == i] == i), 3) for i in range(10)]


def test_either_implementation_reads_the_other_ones_lenet(runs):
    for run, impl in zip(IMPLS, IMPLS[::-1]):
        own, other = (
            script("evaluate.py", runs / run, "--device", "cpu", *options).stdout for options in ((), ("--impl", impl))
        )
        assert f"({run})" in own and own.replace(f"lenet ({run})", f"lenet ({impl})") == other


def test_a_run_with_shares_is_read_on_other_devices(runs):
    wrote = last_accuracy(runs / "max")
    for gpus in ("1", "2", "0,1,2"):
        done = script("evaluate.py", runs / "max", "--gpus", gpus, "--device", "cpu")
        assert f"test accuracy: {wrote:.4f} (" in done.stdout, done.stderr


def test_nothing_in_the_runs_folder_is_changed(runs):
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (runs / "scratch").iterdir()}
    assert script("evaluate.py", runs / "scratch", "--device", "cpu").returncode == 0
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (runs / "scratch").iterdir()} == before


def test_the_confusion_table_fits_100_columns_and_names_every_class():
    counts = np.full((10, 10), 999)
    counts[3] = 0
    lines = evaluate.table(counts, datasets.CLASSES["fashion-mnist"]).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[2].split() == "t-shirt trouser pullover dress coat sandal shirt sneaker bag boot recall".split()
    assert lines[1].rindex("ankle") + len("ankle") == lines[2].index("boot") + len("boot")
    assert [line[:10].strip() for line in lines[3:]] == list(datasets.CLASSES["fashion-mnist"])
    assert lines[3].split()[-1] == "0.100" and lines[6].split() == ["dress"] + ["."] * 10 + ["-"]


def test_the_names_of_fashion_mnist_are_in_the_order_of_its_labels():
    names = datasets.CLASSES["fashion-mnist"]
    assert (names[1], names[5], names[8], names[9]) == ("trouser", "sandal", "bag", "ankle boot")
    assert all(len(set(datasets.CLASSES[name])) == 10 for name in datasets.NAMES)


def test_a_file_made_from_a_test_image_gets_the_probabilities_of_that_image(runs, data, tmp_path):
    expected = np.exp(scores(runs / "scratch", data.test_images[:3]))
    expected /= expected.sum(1, keepdims=True)
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for path, image in zip(paths, data.test_images):
        Image.fromarray(image[0]).save(path)
    options = ("--images", paths[0], paths[1], "--images", paths[2], "--gpus", 2, "--device", "cpu")
    done = script("evaluate.py", runs / "scratch", *options, GLUON_MGPU_DATA="nowhere")
    assert (done.returncode, done.stderr) == (0, "")
    said = dict(line.rsplit(": ", 1) for line in done.stdout.splitlines())
    assert set(said) == set(map(str, paths))
    for path, probabilities in zip(paths, expected):
        found = [part.split() for part in said[str(path)].split(", ")]
        assert [int(name) for name, _ in found] == list(probabilities.argsort()[::-1][:3])
        assert [float(p) for _, p in found] == pytest.approx(np.sort(probabilities)[::-1][:3], abs=1e-4)


def grey(image, tmp_path, capsys, **save):
    path = tmp_path / "image.png"
    image.save(path, **save)
    return evaluate.read_image(path)[0], capsys.readouterr().err


def test_images_of_every_depth_are_read_as_the_same_grey(data, tmp_path, capsys):
    pixels = data.test_images[0, 0]
    image, black = Image.fromarray(pixels), Image.new("L", (28, 28))
    white = Image.new("L", (28, 28), 255)
    for same in (
        image,
        image.convert("RGB"),
        Image.fromarray(pixels.astype(np.uint16) * 257),
        Image.merge("LA", (image, white)),
        Image.merge("RGBA", (white, white, white, image)),  # a white object on a transparent ground
    ):
        np.testing.assert_array_equal(grey(same, tmp_path, capsys)[0], pixels)
    assert grey(Image.merge("LA", (white, black)), tmp_path, capsys)[0].max() == 0
    turned = Image.Exif()
    turned[0x0112] = 3  # upside down
    np.testing.assert_array_equal(grey(image, tmp_path, capsys, exif=turned)[0], pixels[::-1, ::-1])


def test_an_image_of_another_size_is_resized_and_a_line_says_so(data, tmp_path, capsys):
    pixels = data.test_images[0, 0]
    read, said = grey(Image.fromarray(pixels.repeat(4, 0).repeat(4, 1)), tmp_path, capsys)
    assert read.shape == (28, 28) and np.abs(read.astype(int) - pixels).mean() < 10
    assert said == f"gluon_mgpu: {tmp_path / 'image.png'}: resized from 112x112 to 28x28\n"
    assert grey(Image.fromarray(pixels), tmp_path, capsys)[1] == ""


def test_files_that_are_no_image_are_refused_by_name_and_nothing_is_executed(tmp_path):
    whole = tmp_path / "whole.png"
    Image.effect_noise((28, 28), 50).save(whole)
    cut, text, bomb, script = (tmp_path / name for name in ("cut.png", "text.png", "bomb.png", "script.eps"))
    cut.write_bytes(whole.read_bytes()[:300])
    text.write_text("no image")
    size = int(Image.MAX_IMAGE_PIXELS**0.5) + 1
    Image.new("1", (size, size)).save(bomb)
    Image.new("L", (28, 28)).save(script)  # a PostScript program, which Pillow gives to Ghostscript
    for path, says in (
        (cut, "truncated"),
        (text, "no image"),
        (bomb, "pixels"),
        (script, "no image"),
        (tmp_path / "none.png", "No such file"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(Error, match=f"^{re.escape(str(path))} .*{says}") as refused:
            evaluate.read_image(path)
        assert "\n" not in str(refused.value)


LOAD = """
import numpy as np
from gluon_mgpu.runtime import numpy_names
numpy_names.lend()
import mxnet as mx
prefix, images, out = {0!r}, {1!r}, {2!r}
block = mx.gluon.SymbolBlock.imports(prefix + "-symbol.json", ["data"], prefix + "-0000.params")
np.save(out, block(mx.nd.array(np.load(images) / 255.0)).asnumpy())
"""


@pytest.mark.parametrize("run", [*IMPLS, "max"])
def test_what_is_exported_gives_stock_mxnet_the_same_scores(run, runs, data, tmp_path):
    done = script("evaluate.py", runs / run, "--gpus", 2, "--device", "cpu", "--export", tmp_path / "net")
    assert done.returncode == 0 and done.stderr == ""
    assert float(re.search(r"differ from the run's by at most (\S+)\n", done.stdout)[1]) < 1e-4
    files = f"'{tmp_path}/net-symbol.json', ['data'], '{tmp_path}/net-0000.params'"
    assert done.stdout.endswith(f"load: gluon.SymbolBlock.imports({files})\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net-0000.params", "net-symbol.json"]
    images, out = tmp_path / "images.npy", tmp_path / "out.npy"
    np.save(images, data.test_images)
    program = LOAD.format(str(tmp_path / "net"), str(images), str(out))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if run == "max":
        trained = evaluate.load(runs / run, "highlevel", 1, "cpu")
        expected = evaluate.scores(trained, data.test_images)
    else:
        expected = scores(runs / run, data.test_images)
    np.testing.assert_allclose(np.load(out), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_array_equal(np.load(out).argmax(1), expected.argmax(1))


def test_an_export_whose_scores_differ_is_refused_and_leaves_nothing(runs, data, tmp_path):
    trained = evaluate.load(runs / "scratch", None, 1, "cpu")
    altered = {**trained.parameters, "b4": trained.parameters["b4"] + 0.01}
    with pytest.raises(Error, match="differ by 0.01"):
        evaluate.export(trained._replace(parameters=altered), str(tmp_path / "net"), data.test_images)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taken", ["net-symbol.json", "net-0000.params"])
def test_an_export_overwrites_nothing(taken, runs, tmp_path):
    (tmp_path / taken).write_text("mine")
    done = script("evaluate.py", runs / "scratch", "--device", "cpu", "--export", tmp_path / "net")
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr == f"error: --export {tmp_path / 'net'}: {tmp_path / taken} exists already; give another prefix\n"
    )
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(taken, "mine")]


@pytest.mark.parametrize("prefix, says", [("{}/", "begin with"), ("{}/none/net", "no folder")])
def test_a_prefix_that_names_no_files_is_refused(prefix, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        evaluate.exported_files(prefix.format(tmp_path))


@pytest.mark.parametrize(
    "run, options, status, says",
    [
        ("none", (), 2, "there is no run"),
        ("", (), 2, "is no run itself: give one in it, such as {folder}/run-a\n"),
        (
            "begun",
            (),
            1,
            "no checkpoint yet; it leaves one after its first epoch, or on Ctrl-C; where it was killed, "
            "train.py --resume {folder} goes on\n",
        ),
        ("altered", (), 1, "altered"),
        ("old", (), 1, "another version"),
        ("other", (), 1, "another network than lenet"),
        ("max", ("--impl", "scratch"), 2, "scratch: it has lenet only, and the run's lenet-max"),
        ("scratch", ("--gpus", "0"), 2, "at least 1 device"),
        ("scratch", ("--device", "gpu"), 2, "--device gpu: "),
        ("scratch", ("image.png",), 2, "after --images"),
        ("scratch", ("--images", "none.png"), 1, "none.png"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line_with_its_exit_status(
    run, options, status, says, runs, tmp_path, capfd
):
    content = (runs / "scratch" / "checkpoint.npz").read_bytes()
    arrays, facts = checkpoint.load(runs / "scratch" / "checkpoint.npz")
    folder = tmp_path / run
    if run in ("scratch", "max"):
        folder = runs / run
    elif not run:
        for name in ("run-b", "run-a"):
            shutil.copytree(runs / "scratch", folder / name)
    elif run != "none":
        shutil.copytree(runs / "scratch", folder)
        (folder / "checkpoint.npz").unlink()
    if run == "altered":
        middle = len(content) // 2
        (folder / "checkpoint.npz").write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    if run == "old":
        checkpoint.save(folder / "checkpoint.npz", arrays, {"seed": 0, "epochs": 2, "steps": 0})
    if run == "other":
        checkpoint.save(folder / "checkpoint.npz", {**arrays, "W1": arrays["W2"]}, facts)
    with pytest.raises(SystemExit) as exit:
        cli.evaluate([str(folder), "--device", "cpu", *options])
    printed, errors = capfd.readouterr()
    assert exit.value.code == status and printed == "", errors
    assert re.fullmatch(r"error: [^\n]*\n", errors) and says.format(folder=folder) in errors


def test_the_installed_command_is_the_same(runs):
    command = [sys.executable, "-m", "gluon_mgpu", "evaluate", str(runs / "none")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "there is no run" in done.stderr
